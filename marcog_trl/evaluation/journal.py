"""The journal of an evaluation: one line per finished problem, so an interrupted evaluation can resume."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from marcog_trl.files import write_json
from marcog_trl.report.episodes import write_rows


ProblemRecord = dict[str, Any]
"""The record of one problem: a line of the evaluation's `.jsonl` file."""

_FIGURES = {"figures", "settings"}
_RECORD = {"index", "greedy", "samples", "seconds", "waiting_seconds"}
_EPISODE = {"split", "generation", "messages"}


class Journal:
    """
    Writes one line per finished problem, and the results at the end. Only the main process has a journal.

    Args:
        output (`Path`): The `.json` file for the results.
        settings (`dict`): Settings of the evaluation. A journal can be resumed only with the same settings.
        overwrite (`bool`): Whether to replace an evaluation with other settings.
    """

    def __init__(self, output: Path, settings: dict[str, Any], overwrite: bool):
        self.output = output
        self.problems = output.with_suffix(".jsonl")
        self.episodes = output.with_suffix(".parquet")
        self.partial = output.with_suffix(".jsonl.partial")
        self.settings = settings
        self.overwrite = overwrite
        self._lock: IO | None = None  # the partial file, locked while it is open

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def resume(self) -> dict[int, ProblemRecord]:
        """Returns the records of an interrupted evaluation by problem index. Drops an incomplete last line."""
        self._check_files()
        if self.output.is_file():
            self._same_settings(self.output, json.loads(self.output.read_text())["settings"])
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.partial.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output={str(self.output)!r} is being written by another evaluation. Wait for it to finish, or set "
                f"output={str(self.output.with_stem(self.output.stem + '2'))!r}."
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
        return {record["index"]: record for record in lines[1:]}

    def _same_settings(self, path: Path, theirs: dict[str, Any]) -> bool:
        """Whether a file has the settings of this evaluation. Raises if it does not and `overwrite` is false."""
        different = [name for name in self.settings | theirs if theirs.get(name) != self.settings.get(name)]
        if different and not self.overwrite:
            name = different[0]
            raise ValueError(
                f"{str(path)!r} is an evaluation with {name}={theirs.get(name)!r:.200}, but this one has "
                f"{name}={self.settings.get(name)!r:.200}. Set another output, or overwrite_output=True (--overwrite_output "
                "true) to replace it."
            )
        return not different

    def _check_files(self) -> None:
        """Refuses to replace a file that is not an evaluation."""
        for path, parts in ((self.output, _FIGURES), (self.problems, _RECORD), (self.episodes, _EPISODE)):
            if path.is_dir():
                raise ValueError(f"output={str(self.output)!r}: {str(path)!r} is a folder. Set another output.")
            if path.exists() and not _is_ours(path, parts):
                raise ValueError(
                    f"output={str(self.output)!r} would replace {str(path)!r}, which is not an evaluation. Set "
                    f"output={str(self.output.with_stem(f'{self.output.stem}_evaluation'))!r}."
                )

    def add(self, records: list[ProblemRecord]) -> None:
        with self.partial.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def finish(self, figures: Mapping[str, float], records: list[ProblemRecord]) -> None:
        """Writes the problems, then the metrics. Each file is written elsewhere and renamed."""
        lines = [json.dumps(record) + "\n" for record in records]
        finished = self.problems.with_suffix(".jsonl.finished")
        finished.write_text("".join(lines))
        os.replace(finished, self.problems)
        write_rows(self.episodes, list(_rows(records)))
        write_json(self.output, {"figures": dict(figures), "settings": self.settings})
        self.partial.unlink()


def _is_ours(path: Path, keys: set[str]) -> bool:
    """Whether a file is an evaluation: its content, its first line in a `.jsonl` file, or its table has these keys."""
    try:
        if path.suffix == ".parquet":
            return {*pq.read_schema(path).names} >= keys
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.readline() if path.suffix == ".jsonl" else file.read())
    except ValueError:  # of JSON or Arrow
        return False
    return isinstance(found, dict) and found.keys() >= keys


def _read_line(path: Path, i: int, line: bytes) -> dict[str, Any]:
    """Parses line `i` of a partial evaluation. Line 0 has the settings, the others have problems."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or (i and not found.keys() >= _RECORD):
        raise ValueError(
            f"Line {i + 1} of {str(path)!r} is not part of an evaluation: {line.decode(errors='replace')!r:.60}. Delete "
            "the file, or set another output."
        )
    return found


def _rows(records: list[ProblemRecord]) -> Iterator[dict[str, Any]]:
    """The episodes as rows of a table: see [`~marcog_trl.report.episodes.COLUMNS`]."""
    for record in records:
        yield {**record["greedy"], "split": "greedy", "generation": 0}
        for sample, episode in enumerate(record["samples"]):
            yield {**episode, "split": "sampled", "generation": sample}
