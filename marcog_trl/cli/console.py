"""Errors and warnings of commands: one line instead of a traceback, and each warning once."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from marcog_trl.checks import OLD_NAMES


_PACKAGE = str(Path(__file__).parents[1])
MISTAKEN = (
    2  # exit status of a command that could not do what it was asked; 1 where it did, and the result is negative
)
INTERRUPTED = 130  # of a program that Ctrl-C ended
_ENDS = {
    signal.SIGINT: "Interrupted",
    signal.SIGTERM: "Terminated",
}  # what ends a program: Ctrl-C, and `kill` or a scheduler


class RunStatus:
    """The line that Ctrl-C prints, on what it leaves behind and how to continue: `now` is replaced as the run proceeds."""

    def __init__(self) -> None:
        self.now: Callable[[], str] = lambda: "Nothing was kept."


@contextmanager
def interrupts() -> Iterator[RunStatus]:
    """Ends the program at Ctrl-C and SIGTERM with one line that says what is kept."""
    status = RunStatus()
    before = {number: signal.signal(number, _interrupt_once) for number in _ENDS}
    try:
        yield status
    except KeyboardInterrupt as end:
        number = end.args[0] if end.args else signal.SIGINT
        log(f"{_ENDS[number]}. {status.now()}")
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt_once:
                signal.signal(number, handler)


@contextmanager
def warnings_once() -> Iterator[None]:
    """
    Shows each warning once, in one line. Python shows some again and again, because libraries that change its filters for a
    moment reset its own record. Those of other libraries are shown on the main process only.
    """
    shown: set[tuple[str, type[Warning]]] = set()
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        text = " ".join(str(message).split())
        if (text, category) in shown or not (is_main() or filename.startswith(_PACKAGE)) or re.search(OLD_NAMES, text):
            return
        shown.add((text, category))
        place = "" if category is UserWarning else f" ({category.__name__} in {filename}:{lineno})"
        print(f"warning: {text}{place}", file=file or sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C reaches a process twice, from the terminal and from its launcher: the second time, it is ending already."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Ends the program at these errors with their message in one line, and a line for each of their notes. The exit status is 2."""
    try:
        yield
    except errors as error:
        line = f"error: {' '.join(str(error).split())}"
        for note in getattr(error, "__notes__", ()):
            line += f"\n  {' '.join(note.split())}"
        print(line, file=sys.stderr)
        end = SystemExit(line)  # for callers in Python; the interpreter prints no message beside a number
        end.code = MISTAKEN
        raise end from error


def is_main() -> bool:
    """Whether this is the main process, also before the processes have found each other."""
    return os.environ.get("RANK", "0") == "0"


def begin(line: str) -> None:
    """Prints what begins now, on the main process: it may take long."""
    if is_main():
        print(f"{line} ...", flush=True)


def log(line: str) -> None:
    """Prints a line to standard error, below a progress bar that may be there; on the main process."""
    if is_main():
        print(f"\n{line}", file=sys.stderr)
