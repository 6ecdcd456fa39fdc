"""The results of a job's tests, and the verdict that they add up to."""

import re
import time


class Results:
    """The results of a job's tests, as they arrive."""

    def __init__(self, total: int):
        self.reset(total)

    def reset(self, total: int) -> None:
        self.entries: list[list | None] = [None] * total
        self.outputs: dict[int, str] = {}  # what scripts printed, if the job keeps it
        self.lost = 0  # tests that timed out or ended their process
        self.last = time.monotonic()

    def put(self, index: int, status: str, message: str = "", raised: bool = False) -> None:
        now = time.monotonic()
        self.entries[index] = [status, message, now - self.last, raised]
        self.last = now
        if status in ("timeout", "error"):
            self.lost += 1

    def first_open(self) -> int | None:
        return next((k for k, entry in enumerate(self.entries) if entry is None), None)

    def fill(self, status: str, message: str, raised: bool = False) -> None:
        self.entries = [[status, message, 0.0, raised] if entry is None else entry for entry in self.entries]

    def verdict(self, start: float) -> dict:
        self.fill("skipped", "not reached")
        entries = [[status, _printable(text), *rest] for status, text, *rest in filter(None, self.entries)]
        for index, output in self.outputs.items():  # of scripts, which have all of their entries
            entries[index].append(_printable(output))
        entries = [entry for entry in entries if entry[0] != "left out"] or [
            ["failed", "all tests are skipped", 0.0, False]
        ]
        seen = {entry[0] for entry in entries}
        status = next((name for name in ("timeout", "error", "failed", "skipped") if name in seen), "passed")
        order = (status, "timeout", "error", "failed", "skipped")
        message = next((entry[1] for name in order for entry in entries if entry[0] == name and name != "passed"), "")
        return {
            "status": "failed" if status == "skipped" else status,
            "tests": entries,
            "message": message,
            "seconds": time.monotonic() - start,
        }


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _printable(text: str) -> str:
    """The text with control characters and surrogates escaped, so that any terminal, log or file can take it."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
