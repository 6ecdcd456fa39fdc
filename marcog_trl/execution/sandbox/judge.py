"""The judge's side: runs the tests against handles for the program's objects. Never runs a line of the program."""

import base64
import builtins
import importlib.util
import marshal
import reprlib
import socket
import sys
import types
from typing import Any

from . import assertions, cases, handles, output, session, values, wire
from .session import Session, SolutionGone
from .solution import describe


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
        self.space.update({"__builtins__": builtins, "__mismatch__": mismatch, assertions.RECORD: self.record})
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
        candidate = exports[self.payload["entry_point"]]
        if self.payload["counted"]:
            self.space["check"](candidate)
            return
        with self.record(0):
            self.space["check"](candidate)

    def unittest(self, exports: dict[str, Any]) -> None:
        self.execute(self.payload["codes"][1])
        self.restore(exports)
        tests = cases.tests_of(sys.modules["tests"])
        if not tests:
            raise cases.NotRun("the tests have no test method")
        if len(tests) != len(self.payload["names"]):
            wire.send(self.control, {"count": len(tests)})
        cases.run(tests, self.record, lambda: (self.session.generation, self.session.asked), self.fail)

    def fail(self, index: int, error: BaseException) -> None:
        self.report(index, "failed", self.describe(error), self.is_of_program(error))

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

    def record(self, index: int) -> "TestRecord":
        return TestRecord(self, index)

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


class TestRecord:
    """Reports how the test in its `with` block ended, and lets the next one run."""

    __slots__ = ("index", "judge")

    def __init__(self, judge: Judge, index: int):
        self.judge = judge
        self.index = index

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        judge = self.judge
        refuted, judge.session.refuted = judge.session.refuted, None
        error = refuted or error
        if judge.session.dead:  # even if the test succeeded
            judge.report(self.index, "gone")
            judge.replace()
        elif error is None:
            judge.report(self.index, "passed")
        elif isinstance(error, cases.LeftOut) and refuted is None:
            judge.report(self.index, "left out", str(error))
        else:
            raised = refuted is None and judge.is_of_program(error)
            judge.report(self.index, "failed", judge.describe(error), raised)
        return True


def serve(control: socket.socket, payload: dict, fd: int | None) -> None:
    """Runs the tests of a payload against the solution process behind `fd`."""
    output.recorder.leave_warnings()
    Judge(control, payload).run(fd)
