"""The journal of an evaluation: problems that are done, line by line, so that it can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from marcog_trl.files import write_json
from marcog_trl.processes import on_main


ProblemRecord = dict[str, Any]
"""What is known of a problem: a line of the evaluation's `.jsonl`."""

_FIGURES = {"figures", "settings"}
_RECORD = {"index", "greedy", "samples", "seconds", "waiting_seconds"}


class Journal:
    """
    The problems that are done, line by line, and at the end the results. Held by the main process.

    Args:
        output (`Path`): Where the figures go at the end.
        settings (`dict`): What a journal must agree in to be continued.
        overwrite (`bool`): Whether an evaluation with other settings is replaced.
    """

    def __init__(self, output: Path, settings: dict[str, Any], overwrite: bool):
        self.output = output
        self.problems = output.with_suffix(".jsonl")
        self.partial = output.with_suffix(".jsonl.partial")
        self.settings = settings
        self.overwrite = overwrite
        self._records: dict[int, ProblemRecord] = {}
        self._lock: IO | None = None  # the partial file, locked for as long as it is open

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def resume(self) -> dict[int, ProblemRecord]:
        """What an evaluation that was stopped has left; a line that it had not finished is dropped."""
        self._check_files()
        if self.output.is_file():
            self._same_settings(self.output, json.loads(self.output.read_text())["settings"])
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.partial.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output={str(self.output)!r} is being written by another evaluation; its end, or "
                f"{str(self.output.with_stem(self.output.stem + '2'))!r}, works"
            ) from None
        whole, newline, _ = self.partial.read_bytes().rpartition(b"\n")
        whole += newline
        lines = [_read_line(self.partial, i, line) for i, line in enumerate(whole.splitlines())]
        if lines and not self._same_settings(self.partial, lines[0]):
            whole, lines = b"", []
        if whole:
            os.truncate(self.partial, len(whole))
        else:
            self.partial.write_text(json.dumps(self.settings) + "\n")
        self._records = {record["index"]: record for record in lines[1:]}
        return dict(self._records)

    def _same_settings(self, path: Path, theirs: dict[str, Any]) -> bool:
        """Whether an evaluation on disk is this one; another one is refused, unless it may be replaced."""
        different = [name for name in self.settings | theirs if theirs.get(name) != self.settings.get(name)]
        if different and not self.overwrite:
            name = different[0]
            raise ValueError(
                f"{str(path)!r} is an evaluation with {name}={theirs.get(name)!r:.200}, and this one has "
                f"{name}={self.settings.get(name)!r:.200}. Set another output, or overwrite_output=True (--overwrite_output "
                "true) to replace it."
            )
        return not different

    def _check_files(self) -> None:
        """Refuses to replace what no evaluation wrote."""
        for path, parts in ((self.output, _FIGURES), (self.problems, _RECORD)):
            if path.is_dir():
                raise ValueError(f"output={str(self.output)!r}: {str(path)!r} is a folder; another name works")
            if path.exists() and not _is_ours(path, parts):
                raise ValueError(
                    f"output={str(self.output)!r} would replace {str(path)!r}, which no evaluation wrote; "
                    f"{str(self.output.with_stem(f'{self.output.stem}_evaluation'))!r} works"
                )

    def add(self, records: list[ProblemRecord]) -> None:
        with self.partial.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        self._records |= {record["index"]: record for record in records}

    def finish(self, figures: Mapping[str, float]) -> None:
        """Problems in order, and figures; each file appears whole."""
        lines = [json.dumps(self._records[i]) + "\n" for i in sorted(self._records)]
        finished = self.problems.with_suffix(".jsonl.finished")
        finished.write_text("".join(lines))
        os.replace(finished, self.problems)
        write_json(self.output, {"figures": dict(figures), "settings": self.settings})
        self.partial.unlink()


def _is_ours(path: Path, keys: set[str]) -> bool:
    """Whether an evaluation wrote a file: its content, or the first of its lines, has the keys of one."""
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.readline() if path.suffix == ".jsonl" else file.read())
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() >= keys


def _read_line(path: Path, i: int, line: bytes) -> dict[str, Any]:
    """A line of a partial evaluation: settings first, then problems."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or (i and not found.keys() >= _RECORD):
        raise ValueError(
            f"{str(path)!r} has a line {i + 1} that no evaluation wrote, {line.decode(errors='replace')!r:.60}; another "
            "output works, or deleting that file"
        )
    return found


def resume_on_all(journal: Journal | None) -> dict[int, ProblemRecord]:
    """What the main process's journal holds, in all processes; so is its error."""
    return on_main(lambda: journal.resume() if journal is not None else {})
