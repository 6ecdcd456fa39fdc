"""The execution reward against hand-counted tests, and what every reward function shares."""

from functools import partial

import pytest
from trl.trainer.utils import get_callable_name

from marcog_trl.execution import TestResult, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards import REWARD_NAMES, InfrastructureFailure, execution_reward, make_reward


PROMPT = 'def double(x):\n    """Twice x."""\n'
COLUMNS = {
    "entry_point": "double",
    "test": ["assert double(1) == 2", "assert double(0) == 0", "assert double(2) == 4", "assert double(-1) == -2"],
    "test_format": "asserts",
}
RIGHT = "def double(x):\n    return 2 * x"
FAILED = Verdict("failed", 1, 4)
PASSED = Verdict("passed", 4, 4)
INFRASTRUCTURE = Verdict("infrastructure", 0, 4, message="no worker")


def score(completions, reward=execution_reward, **kwargs):
    columns = {name: [value] * len(completions) for name, value in COLUMNS.items()}
    return reward(prompts=[PROMPT] * len(completions), completions=completions, **(columns | kwargs))


COMPLETIONS = [
    RIGHT,
    f"Sure!\n```python\n{RIGHT}\n```",
    "    return 2 * x",
    "def double(x):\n    return x * x",
    "def double(x):\n    return 2 * x if x > 0 else 1 / 0",
    "def double(x):\n    return (2 * x",
    "print('4 of 4 passed')",
    "I cannot.",
    "",
]
RATES = [1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_fraction_of_tests_passed(executor):
    logged = {}
    rewards = score(COMPLETIONS, executor=executor, log_metric=logged.__setitem__)
    assert rewards == RATES
    assert logged == {
        "execution_reward/definition": pytest.approx(5 / 9),
        "execution_reward/syntax": pytest.approx(6 / 9),
        "execution_reward/tests_passed": pytest.approx(16 / 9),
        "execution_reward/tests_total": 4.0,
        "execution_reward/pass_rate": pytest.approx(4 / 9),
        "execution_reward/solved": pytest.approx(3 / 9),
        "execution_reward/timeouts": 0.0,
    }


def test_all_or_nothing(executor):
    reward = make_reward("execution_reward", all_or_nothing=True)
    assert score(COMPLETIONS, reward, executor=executor) == [float(rate == 1) for rate in RATES]
    assert get_callable_name(reward) == "execution_reward"


def test_conversational_completions(executor):
    messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    prompts = [[{"role": "user", "content": PROMPT}]] * len(messages)
    columns = {name: [value] * len(messages) for name, value in COLUMNS.items()}
    assert execution_reward(prompts, messages, executor=executor, **columns) == RATES


def test_one_call_of_the_executor_and_no_job_twice(scripted):
    executor = scripted(PASSED, FAILED)
    wrong = "def double(x):\n    return x"
    assert score([RIGHT, wrong, RIGHT], executor=executor) == [1.0, 0.25, 1.0]
    assert [len(jobs) for jobs in executor.calls] == [2]


def test_verdicts_of_the_workflow_are_taken_over(scripted):
    job = solution_job({"prompt": PROMPT, **COLUMNS}, RIGHT)
    assert score([RIGHT], verdicts=[[(job, FAILED)]], executor=scripted()) == [0.25]
    other = solution_job({"prompt": PROMPT, **COLUMNS}, "def double(x):\n    return x")
    assert score([RIGHT], verdicts=[[(other, FAILED)]], executor=scripted(PASSED)) == [1.0]


# What all rewards of functions share


@pytest.fixture(
    params=[name for name in REWARD_NAMES if name not in ("class_reward", "coverage_reward", "program_reward")]
)
def reward(request):
    return make_reward(request.param)


BOTH = f"def aux(x):\n    return 2\n\n{RIGHT}"


def test_failure_of_the_executor_is_no_reward(scripted, reward):
    """And passed tests, of the other episode, are logged, in later turns apart."""
    logged, name = {}, reward.__name__
    verdicts = INFRASTRUCTURE, Verdict("passed", 4, 4, (TestResult("passed"),) * 4)
    rewards = score([BOTH, RIGHT], reward, executor=scripted(*verdicts), log_metric=logged.__setitem__, turn=[1, 1])
    assert isinstance(rewards[0], InfrastructureFailure) and rewards[0].reason == "no worker"
    assert rewards[1] >= 1 and not isinstance(rewards[1], InfrastructureFailure)
    assert logged[f"{name}/turn_2/solved"] == 1.0 and f"{name}/solved" not in logged


def test_what_is_missing_in_the_data(reward):
    assert reward.needs_tests
    with pytest.raises(
        ValueError, match=rf"no column 'test', which {reward.__name__} needs.* \['prompt', 'entry_point'\]"
    ):
        reward(prompts=[PROMPT], completions=[RIGHT], entry_point=["double"], trainer_state=object())
    with pytest.raises(ValueError, match=r"test=\[\]"):
        score([RIGHT], reward, test=[[]])


def test_no_episodes_are_no_work(scripted, reward):
    assert score([], reward, executor=scripted(), log_metric=lambda name, value: 1 / 0) == []


@pytest.mark.parametrize("name", ["collaboration_reward", "divided_work_reward"])
def test_replies_of_another_team(name):
    assert make_reward(name).needs_entry_point
    with pytest.raises(ValueError, match=rf"{name} needs replies of 'main' .* got those of \['planner', 'coder'\]"):
        score([RIGHT], make_reward(name), replies=[{"planner": "", "coder": ""}])


def test_lookup():
    assert make_reward("execution_reward") is execution_reward
    assert isinstance(make_reward("execution_reward", all_or_nothing=True), partial)
    with pytest.raises(
        ValueError, match=r"'speed_reward' is unknown\. Use one of 'execution_reward', 'divided_work_reward', "
    ):
        make_reward("speed_reward")
