"""Runs the TestCase classes of a module in the order and with the fixtures of `unittest`, one record per test method."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class NotRun(Exception):
    """A test method neither succeeded nor raised."""


class LeftOut(NotRun):
    """A test method is skipped for every program."""


def tests_of(module: Any) -> list[Any]:
    """The module's tests in the order of `unittest`."""
    import unittest  # large, and loaded by the tests

    def flat(suite: Any) -> Iterator[Any]:
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from flat(test)
            else:
                yield test

    return list(flat(unittest.TestLoader().loadTestsFromModule(module)))


def run(
    tests: list[Any],
    record: Callable[[int], AbstractContextManager],
    progress: Callable[[], Any],
    fail: Callable[[int, BaseException], None],
) -> None:
    """
    Runs tests. Tests that are skipped before the program is asked for anything are left out.

    Args:
        tests (`list`): Test cases.
        record (`Callable`): Takes a test's index and returns the context manager that sees how the test ends.
        progress (`Callable`): Returns a pair: the process of the program, which changes after its death, and how often
            the program was asked for something.
        fail (`Callable`): Takes a test's index, and the exception of a fixture that ran after that test.
    """
    import unittest

    result = _result_class()(progress)
    for index, test in enumerate(tests):
        process, _ = progress()
        with record(index):
            result.begin(test)
            unittest.TestSuite([test]).run(result)
            result.conclude()
        if progress()[0] != process:
            result._previousTestClass = None  # what its fixture made was in the process that has died
        for problem in result.late:
            fail(index - 1, problem)
        result.late.clear()
    result._testRunEntered = False
    unittest.TestSuite().run(result)
    for problem in result.late:
        fail(len(tests) - 1, problem)


def _result_class() -> Any:
    """A function, because it needs `unittest`, which is large and only loaded by the tests."""
    import unittest

    class Result(unittest.TestResult):
        """Records how one test after another ends."""

        def __init__(self, progress: Callable[[], Any]) -> None:
            super().__init__()
            self._previousTestClass = None
            self._testRunEntered = True  # so that class fixtures last across suites of one test
            self.progress = progress
            self.late: list[BaseException] = []  # raised by fixtures that end an earlier class or the module
            self.broken: dict[Any, BaseException] = {}  # raised by fixtures that begin a class, or the module (None)

        def begin(self, test: Any) -> None:
            self.kind, self.asked = type(test), self.progress()
            self.events: list[BaseException | None] = []

        def note(self, test: Any, event: BaseException | None) -> None:
            if isinstance(event, LeftOut) and self.progress() != self.asked:
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
