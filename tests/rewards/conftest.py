"""An executor for all tests of a module, and one that follows a script."""

import pytest

from marcog_trl.execution import CodeExecutor, Verdict


@pytest.fixture(scope="package")
def executor():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        yield executor


class ScriptedExecutor:
    """Answers jobs with given verdicts in order, and keeps each call's jobs."""

    def __init__(self, *verdicts: Verdict):
        self.verdicts = list(verdicts)
        self.calls: list[list] = []

    def run(self, jobs):
        self.calls.append(list(jobs))
        return [self.verdicts.pop(0) for _ in jobs]


@pytest.fixture
def scripted():
    return ScriptedExecutor
