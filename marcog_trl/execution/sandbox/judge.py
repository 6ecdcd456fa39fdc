"""The judge's side: runs the tests against handles for the program's objects. Never runs a line of the program."""

import base64
import builtins
import importlib.util
import marshal
import reprlib
import socket
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import handles, output, session, values, wire
from .output import describe
from .session import Session, SolutionGone


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 12
        self.maxstring = self.maxother = self.maxlong = 120

    def repr1(self, value: Any, level: int) -> str:
        try:
            return super().repr1(value, level)
        except ValueError:  # an int too long for decimal digits
            return f"<{type(value).__name__}>"


shorten = _Repr().repr


# Running the tests


class Mismatch(str):
    """The message of a comparison that is false."""

    __slots__ = ()


def mismatch(left: Any, symbol: str, right: Any) -> Mismatch:
    try:
        text = f"{shorten(left)} {symbol} {shorten(right)} does not hold"
        objects = [value for value in (left, right) if handles.is_object(value)]
        if objects:
            text += f" (an object of the program, of type {type(objects[0]).__name__}, equals only itself)"
        return Mismatch(text)
    except SolutionGone:
        raise
    except Exception as error:
        return Mismatch(f"{type(error).__name__} while describing a value")


class Judge:
    """Runs the tests of one program, and reports each test's result."""

    def __init__(self, control: socket.socket, payload: dict):
        self.control = control
        self.payload = payload
        import random  # not at the top of the module: `forks` loads it first, without its hook on forks

        random.seed("".join(payload["codes"]))  # the same for each program, which cannot know it
        for name in payload["seeded"]:
            session.note_seeds(name)
        module = types.ModuleType("tests")
        self.space: dict[str, Any] = module.__dict__
        self.space.update({"__builtins__": builtins, "__mismatch__": mismatch, "__record__": self.record})
        sys.modules["tests"] = module
        self.session = Session(payload["exports"])

    def report(self, index: int | None, status: str, message: str = "", raised: bool = False) -> None:
        wire.send(self.control, {"t": index, "s": status, "m": message[:1000], "r": raised})

    def run(self, fd: int | None) -> None:
        """Runs the tests on the program behind `fd`, or tests that need none."""
        try:
            exports = {} if fd is None else self.session.attach(socket.socket(fileno=fd))
            self.session.dead = False
            self.exports = exports
            self.space.update(exports)
            for name, source in self.payload["modules"]:
                if source in sys.modules or importlib.util.find_spec(source):
                    self.space[name] = importlib.import_module(source)
            self.execute(self.payload["codes"][0])
            getattr(self, self.payload["format"])(exports)
            if self.session.refuted is not None:  # outside of any test, or after the last one
                raise self.session.refuted
            status, message, raised = "gone" if self.session.dead else "done", "", False
        except SolutionGone:
            status, message, raised = "gone", "", False
        except BaseException as error:
            status, message = "raised", self.describe(error)
            raised = self.session.refuted is None and self.is_of_program(error)
        self.report(None, status, message, raised)

    def execute(self, code: str) -> None:
        exec(marshal.loads(base64.b64decode(code)), self.space)

    def asserts(self, exports: dict[str, Any]) -> None:
        self.restore(exports)
        for index, code in enumerate(self.payload["codes"][1:]):
            with self.record(index):
                self.execute(code)

    def check(self, exports: dict[str, Any]) -> None:
        self.execute(self.payload["codes"][1])
        name, _, method = self.payload["candidate"].partition("().")
        candidate = getattr(exports[name](), method) if method else exports[name]
        if self.payload["counted"]:
            self.space["check"](candidate)
            return
        with self.record(0):
            self.space["check"](candidate)

    def unittest(self, exports: dict[str, Any]) -> None:
        self.execute(self.payload["codes"][1])
        self.restore(exports)
        module = sys.modules["tests"]
        cases = _tests_of(module) if "unittest" in sys.modules else []
        functions: list[Callable[[], None]] = [
            partial(_run_function, self.space[name]) for name in self.payload["functions"]
        ]
        functions += _methods_of(module)
        if not cases and not functions:
            raise NotRun("the tests have no test method")
        wire.send(self.control, {"count": len(cases) + len(functions)})
        if cases:
            self.run_cases(cases)
        for index, function in enumerate(functions, start=len(cases)):
            with self.record(index):
                function()

    def run_cases(self, tests: list[Any]) -> None:
        """Runs the tests of `TestCase` classes."""
        import unittest

        result = _result_class()(self.session)
        for index, test in enumerate(tests):
            process = self.session.generation
            with self.record(index):
                result.begin(test)
                unittest.TestSuite([test]).run(result)
                result.conclude()
            if self.session.generation != process:
                result._previousTestClass = None  # what its fixture made was in the process that has died
            self.fail_late(index - 1, result.late)
        result._testRunEntered = False
        unittest.TestSuite().run(result)
        self.fail_late(len(tests) - 1, result.late)

    def fail_late(self, index: int, errors: list[BaseException]) -> None:
        """Reports the exceptions of fixtures that ran after a test."""
        for error in errors:
            self.report(index, "failed", self.describe(error), self.is_of_program(error))
        errors.clear()

    def outputs(self, exports: dict[str, Any]) -> None:
        for index, (stdin, expected, found) in enumerate(self.payload["tests"]):
            with self.record(index):
                if not self.space["check_output"](stdin, expected, found):
                    raise AssertionError(f"check_output refused {shorten(found)}")

    def restore(self, exports: dict[str, Any]) -> None:
        """Makes the entry point the program's, even if the set-up has defined the name."""
        name = self.payload["entry_point"]
        if name in exports:
            self.space[name] = exports[name]

    @contextmanager
    def record(self, index: int) -> Iterator[None]:
        """Reports how the test in the `with` block ended, and lets the next one run."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        refuted, self.session.refuted = self.session.refuted, None
        error = refuted or error
        if self.session.dead:  # even if the test succeeded
            self.report(index, "gone")
            self.replace()
        elif error is None:
            self.report(index, "passed")
        elif isinstance(error, LeftOut) and refuted is None:
            self.report(index, "left out", str(error))
        else:
            self.report(index, "failed", self.describe(error), refuted is None and self.is_of_program(error))

    def describe(self, error: BaseException) -> str:
        if isinstance(error, AssertionError) and len(error.args) == 1 and type(error.args[0]) is Mismatch:
            return "AssertionError: " + str.__str__(error.args[0])
        said = self.session.said_of(error)
        return describe(error, "<tests>") if said is None else said

    def is_of_program(self, error: BaseException) -> bool:
        """Whether an exception came from the program, or from a name that the program should define."""
        return self.session.said_of(error) is not None or (
            isinstance(error, NameError) and error.name in self.payload["exports"]
        )

    def replace(self) -> None:
        """Waits for a fresh process of the program after one has ended."""
        while True:
            message, fds, _, _ = socket.recv_fds(self.control, 1, 1)
            if not message:
                raise SystemExit
            try:
                self.renew(self.session.attach(socket.socket(fileno=fds[0])))
                return
            except SolutionGone:
                self.report(None, "gone")

    def renew(self, exports: dict[str, Any]) -> None:
        """
        Replaces the containers of a process that has ended with those of the fresh one, where the tests still have them
        under the program's names.

        Handles and constants stay. A name that the tests have bound, also by `import *`, is no longer the program's.
        """
        for name, before in self.exports.items():
            if name in exports and type(before) in values.NODES and self.space.get(name) is before:
                self.space[name] = self.exports[name] = exports[name]


def serve(control: socket.socket, payload: dict, fd: int | None) -> None:
    """Runs the tests of a payload against the solution process behind `fd`."""
    output.recorder.leave_warnings()
    session.bound_recursion()
    Judge(control, payload).run(fd)


# Running functions, and classes that are no TestCase, as pytest does


def _methods_of(module: Any) -> list[Callable[[], None]]:
    """The test methods of the classes of a module that are no `TestCase`. Each runs on an object of its own."""
    cases = sys.modules["unittest"].TestCase if "unittest" in sys.modules else ()
    found: list[Callable[[], None]] = []
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == "tests" and not issubclass(kind, cases):
            names = dict.fromkeys(name for base in kind.__mro__[::-1] for name in vars(base))
            if not kind.__subclasses__():  # which inherit its tests
                found += [partial(_run_method, kind, name) for name in names if name.startswith("test")]
    return found


def _run_method(kind: type, name: str) -> None:
    instance = kind()
    if hasattr(instance, "setup_method"):
        instance.setup_method()
    try:
        _run_function(getattr(instance, name))
    finally:
        if hasattr(instance, "teardown_method"):
            instance.teardown_method()


def _run_function(function: Callable[[], Any]) -> None:
    result = function()
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)


# Running the TestCase classes of a module in the order and with the fixtures of `unittest`


class NotRun(Exception):
    """A test method neither succeeded nor raised."""


class LeftOut(NotRun):
    """A test method is skipped for every program."""


def _tests_of(module: Any) -> list[Any]:
    """The module's tests in the order of `unittest`."""
    import unittest  # large, and loaded by the tests

    def flat(suite: Any) -> Iterator[Any]:
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from flat(test)
            else:
                yield test

    return list(flat(unittest.TestLoader().loadTestsFromModule(module)))


def _result_class() -> Any:
    """A function, because it needs `unittest`, which is large and only loaded by the tests."""
    import unittest

    class Result(unittest.TestResult):
        """Records how one test after another ends."""

        def __init__(self, session: Session) -> None:
            super().__init__()
            self._previousTestClass = None
            self._testRunEntered = True  # so that class fixtures last across suites of one test
            self.session = session
            self.late: list[BaseException] = []  # raised by fixtures that end an earlier class or the module
            self.broken: dict[Any, BaseException] = {}  # raised by fixtures that begin a class, or the module (None)

        def begin(self, test: Any) -> None:
            self.kind, self.asked = type(test), self.session.asked
            self.events: list[BaseException | None] = []

        def note(self, test: Any, event: BaseException | None) -> None:
            if isinstance(event, LeftOut) and self.session.asked != self.asked:
                event = NotRun(f"{event}, after the program was asked")
            if isinstance(test, unittest.TestCase):
                self.events.append(event)
            elif test.id().startswith("tearDown"):
                self.late += [] if event is None else [event]
            else:
                assert event is not None, "a fixture that succeeds is not reported"
                self.broken[None if test.id().startswith("setUpModule") else self.kind] = event

        def conclude(self) -> None:
            """Raises unless the test ran and succeeded."""
            events = self.events or [self.broken.get(self.kind) or self.broken.get(None) or NotRun("did not run")]
            problems = [event for event in events if event is not None]
            if problems:
                raise min(problems, key=lambda event: isinstance(event, NotRun))

        def addSuccess(self, test: Any) -> None:
            self.note(test, None)

        def addFailure(self, test: Any, err: Any) -> None:
            self.note(test, err[1])

        addError = addFailure

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.note(test, err[1])

        def addSkip(self, test: Any, reason: str) -> None:
            self.note(test, LeftOut(f"skipped: {reason}"))

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            self.note(test, None)

        def addUnexpectedSuccess(self, test: Any) -> None:
            self.note(test, NotRun("succeeded, which was not expected"))

    return Result
