"""What the tests see of a program besides values: what it prints, warns of and logs. And the other way round: what the tests
have put in place of functions and variables of modules.

The tests run in another process than the program. So what the program prints since the last answer travels with the next,
and is printed, warned of or logged again where the tests redirect, record or forbid it; and what the tests patch travels to
the program with what they ask of it.
"""

import contextlib
import importlib
import io
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from . import wire


_LARGEST = 1 << 20  # characters in one answer
_MOST = 1000  # warnings and log records in one answer
_MISSING = object()
_STREAMS = ("stdout", "stderr")
# What tests change in passing, and what reaches the program in another way
_OWN_OF_SYS = frozenset("stdin stdout stderr modules path meta_path path_hooks path_importer_cache".split())
_OWN_MODULES = frozenset("warnings tests unittest unittest.mock unittest.case logging linecache".split())
_HEAP_TYPE = 1 << 9


# The program's side


class Tape:
    """Keeps what the program prints, warns of and logs until it is asked for."""

    def __init__(self) -> None:
        self.forget()

    def record(self) -> None:
        """Starts, before the processes of programs are forked: what it takes would cost each of them a tenth of its time."""
        for fd, name in enumerate(_STREAMS, start=1):
            stream = _Stream(self, fd, name)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        self.usual = warnings.filters[:], warnings.showwarning
        warnings.simplefilter("always")  # the tests' filters decide
        warnings.showwarning = self.warn  # type: ignore[assignment]

    def leave_warnings(self) -> None:
        """Has warnings of this process, which is that of the tests, go where they usually go."""
        filters, warnings.showwarning = self.usual
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]

    def forget(self) -> None:
        self.events: list[list] = []
        self.room = _LARGEST

    def write(self, name: str, text: str) -> None:
        kept = text[: self.room]
        self.room -= len(kept)
        if kept and self.events and self.events[-1][0] == name:
            self.events[-1][1].append(kept)
        elif kept:
            self.events.append([name, [kept]])

    def warn(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if len(self.events) < _MOST:
            self.events.append(["warning", str(message)[:10_000], category, lineno])

    def record_logs(self) -> None:
        """Has all records pass, also those that nothing listens to in this process."""
        import logging

        root, handle, tape = logging.getLogger(), logging.Logger.handle, self
        root.setLevel(1)
        logging.lastResort = logging.NullHandler()  # type: ignore[assignment]

        def keep(logger: Any, record: Any) -> None:
            level = logger.getEffectiveLevel()
            shown = record.levelno >= (logging.WARNING if level == 1 else level)
            if len(tape.events) < _MOST:
                tape.events.append(["log", record.name, record.levelno, shown, record.getMessage()[:10_000]])
            handle(logger, record)

        logging.Logger.handle = keep  # type: ignore[method-assign, assignment]

    def take(self, encode: Callable[[Any], Any]) -> list[list]:
        """What there is, for the wire."""
        events = self.events
        self.forget()
        taken = []
        for kind, first, *rest in events:
            if kind == "warning":
                taken.append([kind, first, encode(rest[0]), rest[1]])
            else:
                taken.append([kind, "".join(first) if kind in _STREAMS else first, *rest])
        return taken


tape = Tape()


class _Stream(io.TextIOWrapper):
    """Standard output of a program: what is written as text is kept, and nobody reads the rest."""

    def __init__(self, tape: Tape, fd: int, name: str):
        super().__init__(io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), encoding="utf-8", errors="replace")
        self.mode = "w"  # type: ignore[misc] # as the interpreter sets it
        self._tape, self._stream = tape, name

    def write(self, text: str) -> int:
        if not isinstance(text, str) or self.closed:
            return super().write(text)
        self._tape.write(self._stream, str(text))
        return len(text)


class Patched:
    """What the tests have put in place of attributes of modules of this process."""

    def __init__(self) -> None:
        self.before: dict[tuple[str, str], Any] = {}

    def apply(self, patches: list[list]) -> None:
        """Puts exactly these in place: `[module, name, value]`, where the name may be that of a class's attribute."""
        wanted = {(module, name): value for module, name, value in patches}
        for module, name in [key for key in self.before if key not in wanted]:
            self.put(module, name, self.before.pop((module, name)))
        for (module, name), value in wanted.items():
            if module == "os.environ":
                self.before.setdefault((module, name), os.environ.get(name, _MISSING))
            elif (module, name) not in self.before:
                try:
                    owner, last = _owner(importlib.import_module(module), name)
                except (ImportError, AttributeError):
                    continue  # it is not here, and the program cannot use it either
                self.before[module, name] = vars(owner).get(last, _MISSING)
            self.put(module, name, value)

    def put(self, module: str, name: str, value: Any) -> None:
        if module == "os.environ":
            os.environ.pop(name, None)
            if isinstance(value, str):
                os.environ[name] = value
            return
        owner, last = _owner(sys.modules[module], name)
        if value is _MISSING:
            delattr(owner, last)
        elif (
            isinstance(owner, type)
            and isinstance(value, types.FunctionType)
            and value.__module__ == __package__ + ".server"
        ):
            setattr(owner, last, staticmethod(value))  # an object of the tests that is called without the instance
        else:
            setattr(owner, last, value)


def _owner(module: Any, name: str) -> tuple[Any, str]:
    kind, _, last = name.rpartition(".")
    return (getattr(module, kind) if kind else module), last


# The tests' side


class Echo:
    """
    Repeats to the tests what the program printed, warned of and logged, and finds out what they have patched.

    Args:
        modules (`list[str]`): Modules that the tests may patch.
    """

    def __init__(self, modules: list[str]):
        self.registry: dict = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.originals: dict[tuple[str, str], dict[str, Any]] = {}
        self.environment = dict(os.environ) if modules else None
        self.stdin = sys.stdin
        for module in sorted({*modules} - _OWN_MODULES):
            known = module.partition(".")[0] in sys.stdlib_module_names or module in sys.modules
            with contextlib.suppress(ImportError):  # the tests will say so themselves
                for kind, owner in _owners(importlib.import_module(module)) if known else ():
                    self.originals[module, kind] = dict(vars(owner))

    def begin(self) -> None:
        """Begins with a fresh process of the program, in which nothing is patched."""
        self.sent = []

    def hear(self, events: list, decode: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        """What is to be called so that the tests hear of each event; each may raise what the tests make of it."""
        return [self.event(decode, *event) for event in events]

    def event(self, decode: Callable[[Any], Any], kind: str, text: str, *rest: Any) -> Callable[[], Any]:
        if type(text) is not str:
            raise wire.BrokenChannel("a malformed echo")
        if kind in _STREAMS:
            return lambda: _print(kind, text)
        if kind == "warning":
            category, line = decode(rest[0]), int(rest[1])
            if not (isinstance(category, type) and issubclass(category, Warning)):
                category = UserWarning
            return lambda: warnings.warn_explicit(text, category, "<solution>", line, "solution", self.registry)
        if kind == "log":
            level, shown = int(rest[0]), rest[1] is True
            return lambda: _log(text, level, str(rest[2]), shown)
        raise wire.BrokenChannel("a malformed echo")

    def patches(self) -> list[tuple[str, str, Any]] | None:
        """What the tests have now in place of what modules had, or `None` if that is as at the last time."""
        found = []
        for (module, kind), before in self.originals.items():
            owner = getattr(sys.modules[module], kind) if kind else sys.modules[module]
            for name, value in [*vars(owner).items()]:
                if before.get(name, _MISSING) is not value and _is_patch(module, name, value, before):
                    found.append((module, f"{kind}.{name}" if kind else name, value))
        if sys.stdin is not self.stdin:
            found.append(("sys", "stdin", sys.stdin))
        if self.environment is not None and self.environment != os.environ:
            now = dict(os.environ)
            names = [name for name in {**self.environment, **now} if now.get(name) != self.environment.get(name)]
            found += [("os.environ", name, now.get(name)) for name in names]
        if len(found) == len(self.sent) and all(map(_same, found, self.sent)):
            return None
        self.sent = found
        return found

    def not_sent(self) -> None:
        self.sent = [("", "", None)]


def _owners(module: Any) -> Iterator[tuple[str, Any]]:
    """A module, and the classes in it that can be patched, with their names."""
    yield "", module
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__ and value.__flags__ & _HEAP_TYPE:
            yield name, value


def _is_patch(module: str, name: str, value: Any, before: dict[str, Any]) -> bool:
    if isinstance(value, types.ModuleType) or (module == "sys" and name in _OWN_OF_SYS):
        return False
    return name in before or not name.startswith("_")


def _same(a: tuple[str, str, Any], b: tuple[str, str, Any]) -> bool:
    return a[:2] == b[:2] and (a[2] is b[2] or (type(a[2]) is str and type(b[2]) is str and a[2] == b[2]))


def _print(name: str, text: str) -> None:
    stream = getattr(sys, name)
    if stream is not getattr(sys, f"__{name}__"):
        stream.write(text)


def _log(name: str, level: int, text: str, shown: bool) -> None:
    """Logs where the tests' own levels let it pass or, without any, if it would have been shown."""
    import logging

    logger = logging.getLogger(name)
    levels = [part.level for part in _with_parents(logger) if part.level]
    if (level >= levels[0]) if levels and levels != [logging.WARNING] else shown:
        logger.handle(logging.LogRecord(name, level, "<solution>", 0, text, None, None))


def _with_parents(logger: Any) -> Iterator[Any]:
    while logger is not None:
        yield logger
        logger = logger.parent
