"""How recipes end: with one line where Python would print a traceback."""

import os
import signal
import sys
from contextlib import contextmanager


INTERRUPTED = 130  # exit status of a program that Ctrl-C ended


def _interrupt(number, frame):
    """Raises KeyboardInterrupt once: Ctrl-C reaches a process twice, from the terminal and from its launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _show(kind, error, traceback):
    if issubclass(kind, KeyboardInterrupt):  # while packages are imported
        say("Interrupted. Nothing was kept.")
    else:
        sys.__excepthook__(kind, error, traceback)


def say(line):
    """Prints a line to standard error, below a progress bar that may be there; on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{line}", file=sys.stderr)


class Kept:
    """What Ctrl-C leaves behind, and how to go on."""

    def __init__(self):
        self.now = lambda: "Nothing was kept."  # replaced as the run goes on


@contextmanager
def interrupts(kept):
    """Ends the program at Ctrl-C with one line that says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"Interrupted. {kept.now()}")
        sys.exit(INTERRUPTED)


@contextmanager
def one_line(*errors):
    """Ends the program with one line at these errors."""
    try:
        yield
    except errors as error:
        print(file=sys.stderr)  # below a progress bar that may be there
        sys.exit(f"error: {' '.join(str(error).split())}")


signal.signal(signal.SIGINT, _interrupt)
sys.excepthook = _show
