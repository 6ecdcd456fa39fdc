"""How commands end: with one line instead of a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


INTERRUPTED = 130  # exit status of a program that Ctrl-C ended


class Kept:
    """What Ctrl-C leaves behind, and how to continue: `now` is replaced as the run proceeds."""

    def __init__(self) -> None:
        self.now: Callable[[], str] = lambda: "Nothing was kept."


@contextmanager
def interrupts() -> Iterator[Kept]:
    """Ends the program at Ctrl-C with one line that says what is kept."""
    kept = Kept()
    before = signal.signal(signal.SIGINT, _interrupt_once)
    try:
        yield kept
    except KeyboardInterrupt:
        say(f"Interrupted. {kept.now()}")
        sys.exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt_once:
            signal.signal(signal.SIGINT, before)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C reaches a process twice, from the terminal and from its launcher: the second time, it is ending already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Ends the program with one line at these errors."""
    try:
        yield
    except errors as error:
        print(file=sys.stderr)  # below a progress bar that may be there
        sys.exit(error_line(error))


def error_line(error: Exception, where: str = "") -> str:
    """An error's message in one line."""
    return f"error: {where}{' '.join(str(error).split())}"


def say(line: str) -> None:
    """Prints a line to standard error, below a progress bar that may be there; on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{line}", file=sys.stderr)
