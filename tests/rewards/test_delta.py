"""The delta reward: what a turn gained over the turn before, and nothing executed twice."""

from itertools import pairwise

import pytest

from marcog_trl.execution import Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards import InfrastructureFailure, delta_reward


PROMPT = 'def double(x):\n    """Twice x."""\n'
COLUMNS = {
    "entry_point": "double",
    "test": ["assert double(1) == 2", "assert double(0) == 0", "assert double(2) == 4", "assert double(-1) == -2"],
    "test_format": "asserts",
}
RIGHT = "def double(x):\n    return 2 * x"
HALF = "def double(x):\n    return x * x"  # right for 0 and 2
WRONG = "def double(x):\n    return 'no'"
ALL, TWO, NONE = Verdict("passed", 4, 4), Verdict("failed", 2, 4), Verdict("failed", 0, 4)
INFRASTRUCTURE = Verdict("infrastructure", 0, 4)


def score(completions, **kwargs):
    columns = {name: [value] * len(completions) for name, value in COLUMNS.items()}
    return delta_reward([PROMPT] * len(completions), completions, **(columns | kwargs))


def job(solution):
    return solution_job({"prompt": PROMPT, **COLUMNS}, solution)


def test_first_turns_and_trainers_without_turns(executor):
    for absent in ({}, {"previous_solution": [None] * 3, "previous_verdicts": [[]] * 3, "turn": [0] * 3}):
        assert score([RIGHT, HALF, WRONG], executor=executor, **absent) == [1.0, 0.5, 0.0]


def test_gain_over_the_turn_before(executor):
    logged = {}
    now, before = [RIGHT, HALF, WRONG, "", HALF], [HALF, HALF, RIGHT, RIGHT, None]
    rewards = score(now, previous_solution=before, turn=[1] * 5, executor=executor, log_metric=logged.__setitem__)
    assert rewards == [0.5, 0.0, -1.0, -1.0, 0.5]
    assert {name.removeprefix("delta_reward/turn_2/"): value for name, value in logged.items()} == {
        "improved": 0.4,
        "worsened": 0.4,
        "tests_passed": pytest.approx(8 / 5),
        "tests_total": 4.0,
        "pass_rate": pytest.approx(0.4),
        "solved": 0.2,
        "timeouts": 0.0,
    }


def test_gains_of_an_episode_add_up_to_its_last_turn(executor):
    turns = [None, WRONG, HALF, "", RIGHT]
    gains = [score([now], previous_solution=[before], executor=executor)[0] for before, now in pairwise(turns)]
    assert sum(gains) == 1.0


def test_nothing_is_executed_twice(scripted):
    known = {"previous_solution": [HALF], "previous_verdicts": [[(job(HALF), TWO)]]}
    executor = scripted(ALL)
    assert score([RIGHT], executor=executor, **known) == [0.5]
    assert executor.calls == [[job(RIGHT)]]
    assert score([RIGHT], executor=scripted(), verdicts=[[(job(RIGHT), ALL)]], **known) == [0.5]
    executor = scripted(TWO)
    assert score([HALF], executor=executor, previous_solution=[HALF]) == [0.0]
    assert executor.calls == [[job(HALF)]]
    executor = scripted(ALL, NONE, TWO)  # what is not known is executed in one call
    assert score([RIGHT, WRONG], executor=executor, previous_solution=[HALF, None]) == [0.5, 0.0]
    assert executor.calls == [[job(RIGHT), job(WRONG), job(HALF)]]


@pytest.mark.parametrize("verdicts", [(INFRASTRUCTURE, TWO), (ALL, INFRASTRUCTURE)], ids=["now", "before"])
def test_failure_of_the_executor_on_either_is_no_reward(scripted, verdicts):
    logged = {}
    options = {"previous_solution": [HALF], "log_metric": logged.__setitem__}
    (reward,) = score([RIGHT], executor=scripted(*verdicts), **options)
    assert isinstance(reward, InfrastructureFailure)
    assert "delta_reward/improved" not in logged
    # Of two verdicts on the same job, the one that says something counts
    known = {"previous_verdicts": [[(job(HALF), INFRASTRUCTURE)]], "verdicts": [[(job(RIGHT), ALL), (job(HALF), TWO)]]}
    assert score([RIGHT], executor=scripted(), **options, **known) == [0.5]
