"""Takes what the program prints, warns of and logs to the tests, and what the tests have patched to the program.

The tests and the program run in different processes. Each answer of the program carries its output since the last one, which
is then printed, warned of or logged again where the tests redirect, record or forbid it. Each request of the tests carries
what they have replaced in modules.
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
# What tests change without meaning the program, and what reaches the program in another way
_OWN_OF_SYS = frozenset("stdin stdout stderr modules path meta_path path_hooks path_importer_cache".split())
_OWN_MODULES = frozenset("warnings tests unittest unittest.mock unittest.case logging linecache".split())
_HEAP_TYPE = 1 << 9


# The program's side


class Tape:
    """Records what the program prints, warns of and logs."""

    def __init__(self) -> None:
        self.forget()

    def record(self) -> None:
        """Starts recording. Done before the processes of programs are forked, because it would slow each of them by 10 %."""
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
        """Records all log records, also those without a handler in this process."""
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
        """The events since the last call, ready to be sent."""
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
    """Standard output or error of a program. Text is recorded; bytes are written to the file and ignored."""

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
    """Replaces attributes of modules in the program's process as the tests have in theirs."""

    def __init__(self) -> None:
        self.before: dict[tuple[str, str], Any] = {}

    def apply(self, patches: list[list]) -> None:
        """Makes exactly these replacements: `[module, name, value]`, where `name` may be `Class.attribute`."""
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
                    continue  # it does not exist here, so the program cannot use it either
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
    Repeats for the tests what the program printed, warned of and logged, and finds what the tests have patched.

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
        """Begins with a fresh process of the program, in which nothing is patched yet."""
        self.sent = []

    def hear(self, events: list, decode: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        """One function per event, which repeats it for the tests. It may raise, for example where warnings are errors."""
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
        """What the tests have replaced in modules, or `None` if nothing has changed since the last call."""
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
    """A module, named "", and the classes in it that can be patched, with their names."""
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
    """Logs a record if the tests' own levels let it pass or, without any, if the program would have shown it."""
    import logging

    logger = logging.getLogger(name)
    levels = [part.level for part in _with_parents(logger) if part.level]
    if (level >= levels[0]) if levels and levels != [logging.WARNING] else shown:
        logger.handle(logging.LogRecord(name, level, "<solution>", 0, text, None, None))


def _with_parents(logger: Any) -> Iterator[Any]:
    while logger is not None:
        yield logger
        logger = logger.parent
