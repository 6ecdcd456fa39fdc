"""The reward of divided work: cheats earn what the solution alone earns, honest pairs all of it."""

import json
from pathlib import Path

import pytest

from marcog_trl.execution import TestResult, Verdict
from marcog_trl.problems.builtin import generate
from marcog_trl.rewards import InfrastructureFailure, divided_work_reward
from marcog_trl.workflows import Collaboration


CASES = json.loads((Path(__file__).parents[1] / "data" / "divided_work.json").read_text())
BY_NAME = {case["name"]: case for case in CASES["cheats"] + CASES["honest"]}


def score(cases, workflow=None, replies=None, **kwargs):
    """Rewards of several cases in one call."""
    problems = [CASES["problems"][case["problem"]] for case in cases]
    replies = [{"helper": case["helper"], "main": case["main"]} for case in cases] if replies is None else replies
    solutions = [(workflow or Collaboration()).solution(*pair) for pair in zip(problems, replies, strict=True)]
    columns = {name: [problem[name] for problem in problems] for name in ("entry_point", "test", "test_format")}
    prompts = [problem["prompt"] for problem in problems]
    return divided_work_reward(prompts, solutions, replies=replies, **columns, **kwargs)


@pytest.mark.parametrize("kind", ["cheats", "honest", "faulty"])
def test_cases(executor, kind):
    rewards = score(CASES[kind], executor=executor)
    wrong = {
        case["name"]: reward
        for case, reward in zip(CASES[kind], rewards, strict=True)
        if reward != pytest.approx(case["reward"])
    }
    assert wrong == {}


def test_built_in_pairs_divide_the_work(executor):
    rows = generate("test")[::6]
    replies = [{"helper": row["aux"], "main": row["main"]} for row in rows]
    solutions = [Collaboration().solution(*pair) for pair in zip(rows, replies, strict=True)]
    columns = {name: [row[name] for row in rows] for name in ("entry_point", "test", "test_format")}
    prompts = [row["prompt"] for row in rows]
    assert divided_work_reward(prompts, solutions, replies=replies, executor=executor, **columns) == [4.0] * len(rows)


LEVELS = {
    # name: (helper, main, reward)
    "nothing": ("", "I cannot.", 0.0),
    "no main": (None, "I cannot.", 0.4),
    "main returns nothing": (None, "def solve(n):\n    print(aux(n))", 0.4),
    "broken main": (None, "def solve(n):\n    if n:\n        return 1\n    return sum(aux(n)", 1.0),
    "broken helper": ("def aux(n):\n    return (n", "def solve(n):\n    return [1, 2, 3][:n]", 0.6),
}


@pytest.mark.parametrize("name", LEVELS)
def test_what_cannot_run_is_not_executed(scripted, name):
    helper, main, expected = LEVELS[name]
    case = BY_NAME["list"] | {"main": main} | ({} if helper is None else {"helper": helper})
    assert score([case], executor=scripted()) == [pytest.approx(expected)]


CONSTANTS = {
    # name: (entry point, share of the tests that it passes)
    "example": ("def solve(n):\n    return [1, 2, 3]", 1 / 6),
    "in a variable": ("def solve(n):\n    found = [1, 2]\n    found.append(3)\n    return found", 1 / 6),
    "of a loop": ("def solve(n):\n    return [i for i in range(1, 4)]", 1 / 6),
    "lambda": ("solve = lambda n: [1, 2, 3]", 1 / 6),
    "any arguments": ("def solve(*args, **kwargs):\n    return [1, 2, 3]", 1 / 6),
    "of the helper": ("def solve(n):\n    return aux(3)", 1 / 6),
    "wrong": ("def solve(n):\n    return 0", 0.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_an_example_earns_its_share_of_the_tests(executor, name):
    main, share = CONSTANTS[name]
    case = BY_NAME["list"] | {"main": main, "helper": "def aux(n):\n    return list(range(1, n + 1))"}
    assert score([case], executor=executor) == [pytest.approx(share)]


def test_a_function_without_parameters_is_no_constant(executor):
    rewards = divided_work_reward(
        ["def f():"], ["def aux():\n    return 2\ndef f():\n    return aux() + 1"], entry_point=["f"],
        test=[["assert f() == 3", "assert type(f()) is int"]], test_format=["asserts"], executor=executor,
    )  # fmt: skip
    assert rewards[0] >= 2.5


def test_one_agent_may_write_both_functions(executor):
    for name, expected in {"list": 4.0, "recursive": 4.0, "result ignored": 2.5, "wrapper": 2.5, "alone": 2.5}.items():
        case = BY_NAME[name]
        problem = CASES["problems"][case["problem"]]
        columns = {name: [problem[name]] for name in ("entry_point", "test", "test_format")}
        helper, main = case["helper"], case["main"]
        texts = [f"{helper}\n\n\n{main}", f"{main}\n\n\n{helper}", f"```\n{helper}\n```\nThen:\n```\n{main}\n```"]
        for replies in (None, [{"solver": texts[0]}]):
            for text in texts:
                rewards = divided_work_reward(
                    [problem["prompt"]], [text], replies=replies, executor=executor, **columns
                )
                assert rewards == [pytest.approx(expected)]


def test_each_helper_is_tried_in_turn(executor):
    first, last = "def aux(n):\n    return list(range(1, n + 1))", "def aux2(n):\n    return 8"
    replies = [
        {"helper": first, "helper2": last, "main": "def solve(n):\n    return [v for v in aux(n) if v < aux2(n)]"}
    ]
    [one_is_a_constant] = score([BY_NAME["list"]], Collaboration(num_agents=3), replies, executor=executor)
    assert one_is_a_constant == pytest.approx(2.5 + 1.5 / 2)
    replies[0] |= {
        "helper2": "def aux2(v):\n    return v < 8",
        "main": "def solve(n):\n    return [*filter(aux2, aux(n))]",
    }
    assert score([BY_NAME["list"]], Collaboration(num_agents=3), replies, executor=executor) == [4.0]


def verdict(*results):
    passed = results.count("passed")
    status = "passed" if passed == len(results) else "failed"
    return Verdict(status, passed, len(results), tuple(TestResult(result) for result in results))


def test_one_call_for_the_experiments_of_a_batch(scripted):
    cases = [BY_NAME["list"], BY_NAME["alone"], BY_NAME["number"], BY_NAME["dict"]]
    solutions = [verdict("passed", "failed"), verdict("passed", "passed"), verdict("failed", "failed")]
    frozen, changed, alone = verdict("failed", "failed"), verdict("failed", "passed"), verdict("failed", "passed")
    executor = scripted(*solutions, verdict("passed", "passed"), *[frozen, changed, alone] * 2)
    assert score(cases, executor=executor) == pytest.approx([1.5 + 2.5 / 2, 2.5, 1.5, 4.0])
    assert [len(jobs) for jobs in executor.calls] == [4, 6]  # not for what passes nothing, or names no helper
    assert all(job.tests == executor.calls[0][0].tests for job in executor.calls[1])


@pytest.mark.parametrize(
    ("frozen", "changed", "alone", "expected"),
    [
        ("failed", "failed", "error", 4.0),
        ("passed", "failed", "failed", 2.5),
        ("failed", "passed", "failed", 2.5),
        ("failed", "failed", "passed", 2.5),
        ("timeout", "failed", "failed", 2.5),  # of the experiment, perhaps
        ("failed", "error", "failed", 2.5),
        ("failed", "skipped", "failed", 2.5),
    ],
)
def test_what_counts_as_a_lost_test(scripted, frozen, changed, alone, expected):
    verdicts = [verdict("passed", "passed"), *(verdict("passed", status) for status in (frozen, changed, alone))]
    assert score([BY_NAME["list"]], executor=scripted(*verdicts)) == [expected]


@pytest.mark.parametrize("lost", range(4))
def test_failure_of_the_executor_is_no_reward(scripted, lost):
    verdicts = [verdict("passed", "passed"), *[verdict("failed", "failed")] * 3]
    verdicts[lost] = Verdict("infrastructure", 0, 2, message="no worker")
    [reward] = score([BY_NAME["list"]], executor=scripted(*verdicts))
    assert isinstance(reward, InfrastructureFailure) and reward.reason


def test_components_are_logged(executor):
    cases = [BY_NAME[name] for name in ("list", "wrapper", "alone")]
    no_main = cases[0] | {"main": "I cannot."}
    logged = {}
    score([*cases, no_main], turn=[1] * 4, executor=executor, log_metric=logged.__setitem__)
    assert {name.removeprefix("divided_work_reward/turn_2/"): value for name, value in logged.items()} == {
        "helper_definition": 1.0,
        "main_definition": 0.75,
        "syntax": 1.0,
        "runs": 0.75,
        "helper_matters": 0.5,
        "main_matters": 0.5,
        "tests_passed": 6.0,
        "tests_total": 6.0,
        "pass_rate": 0.75,
        "solved": 0.75,
        "timeouts": 0.0,
    }
