"""Output and warnings of a program, which each of its answers brings to the tests as text."""

import builtins
import io
import sys
import traceback
import warnings
from typing import Any


_LARGEST = 1 << 20  # characters in one answer
_MOST = 1000  # warnings in one answer
_STREAMS = ("stdout", "stderr")


class Recorder:
    """Records what the program prints and warns of."""

    def __init__(self) -> None:
        self.forget()

    def record(self) -> None:
        """Starts recording. Done before the processes of programs are forked, because it takes time."""
        for fd, name in enumerate(_STREAMS, start=1):
            stream = _Stream(self, fd, name)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        self.usual = warnings.filters[:], warnings.showwarning
        warnings.simplefilter("always")  # the tests' filters decide
        warnings.showwarning = self.warn  # type: ignore[assignment]

    def leave_warnings(self) -> None:
        """Restores the usual handling of warnings, in the process of the tests."""
        filters, warnings.showwarning = self.usual
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]

    def forget(self) -> None:
        self.events: list[tuple[str, list[str]]] = []
        self.room = _LARGEST

    def write(self, name: str, text: str) -> None:
        kept = text[: self.room]
        self.room -= len(kept)
        if kept and self.events and self.events[-1][0] == name:
            self.events[-1][1].append(kept)
        elif kept:
            self.events.append((name, [kept]))

    def warn(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if len(self.events) < _MOST:
            builtin: Any = next(kind for kind in category.__mro__ if vars(builtins).get(kind.__name__) is kind)
            self.events.append((builtin.__name__, [str(message)[:10_000]]))

    def take(self) -> list[list[str]]:
        """The events since the last call, each a stream or a class of warnings and a text."""
        if not self.events:
            return []
        events = [[name, "".join(pieces)] for name, pieces in self.events]
        self.forget()
        return events


recorder = Recorder()


class _Stream(io.TextIOWrapper):
    """Standard output or error of a program. Text is recorded; bytes are written to the file and ignored."""

    def __init__(self, recorder: Recorder, fd: int, name: str):
        super().__init__(io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), encoding="utf-8", errors="replace")
        self.mode = "w"  # type: ignore[misc] # as the interpreter sets it
        self._recorder, self._stream = recorder, name

    def write(self, text: str) -> int:
        if not isinstance(text, str) or self.closed:
            return super().write(text)
        self._recorder.write(self._stream, str(text))
        return len(text)


def hear(events: list) -> BaseException | None:
    """Prints and warns again, in the tests' process, where the tests redirect or record it. Returns the first exception that
    this raises, for example where they turn warnings into errors."""
    problem: BaseException | None = None
    for name, text in events:
        try:
            if name in _STREAMS:
                getattr(sys, name).write(str(text))
            else:
                kind = vars(builtins)[name]
                if issubclass(kind, Warning):
                    warnings.warn_explicit(str(text), kind, "<solution>", 1)
        except Exception as error:
            problem = problem or error
    return problem


def describe(error: BaseException, name: str = "<solution>") -> str:
    """The exception's type and message, and the line of the file `name` that it came from."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno}, column {error.offset})"[:500]
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # of the program's own `__str__`
        text = type(error).__name__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    return text[:450] + (f" (line {lines[-1]})" if lines else "")
