"""The collaboration reward's levels, each against its number."""

import pytest

from marcog_trl.rewards import collaboration_reward
from marcog_trl.workflows import Collaboration


PROMPT = 'def total(xs):\n    """Double the numbers, then add them up."""\n'
PROBLEM = {
    "entry_point": "total",
    "test": [
        "assert total([1, 2]) == 6",
        "assert total([]) == 0",
        "assert total([5]) == 10",
        "assert total([0]) == 0",
    ],
    "test_format": "asserts",
}
AUX = "def aux(xs):\n    return [2 * x for x in xs]"
MAIN = "def total(xs):\n    ys = aux(xs)\n    return sum(ys)"


def score(helper, main, workflow=None, **kwargs):
    replies = {"helper": helper, "main": main}
    solution = (workflow or Collaboration()).solution({"prompt": PROMPT, **PROBLEM}, replies)
    columns = {name: [value] for name, value in PROBLEM.items()}
    [reward] = collaboration_reward([PROMPT], [solution], replies=[replies], **columns, **kwargs)
    return reward


CASES = {
    # name: (helper, main, reward)
    "all there is": (AUX, MAIN, 4.0),
    "fenced": (f"Here:\n```python\n{AUX}\n```", f"```python\n{MAIN}\n```", 4.0),
    "nothing": ("", "I cannot.", 0.0),
    "no main": (AUX, "I cannot.", 0.4),
    "main returns nothing": (AUX, "def total(xs):\n    print(aux(xs))", 0.4),
    "no helper": ("I cannot.", "def total(xs):\n    return 2 * sum(xs)", 0.6 + 0.5 + 1.0),
    "helper returns nothing": ("def aux(xs):\n    pass", "def total(xs):\n    return 2 * sum(xs)", 0.6 + 0.5 + 1.0),
    "helper has another name": ("def help(xs):\n    return xs", "def total(xs):\n    return 2 * sum(xs)", 0.6 + 0.5 + 1.0),
    "broken helper": ("def aux(xs):\n    return (xs", "def total(xs):\n    return 2 * sum(xs)", 0.6),
    "broken main": (AUX, "def total(xs):\n    if xs:\n        return 1\n    return sum(aux(xs)", 0.4 + 0.6),
    "no test passes": (AUX, "def total(xs):\n    return str(aux(xs))", 0.4 + 0.6 + 0.5),
    "half of the tests": (AUX, "def total(xs):\n    return sum(aux(xs)) * 0", 0.4 + 0.6 + 0.5 + 0.5 + 0.5 + 1.0),
    "helper not called": (AUX, "def total(xs):\n    return 2 * sum(xs)", 0.4 + 0.6 + 0.5 + 1.0),
    "called in a comment": (AUX, "def total(xs):\n    # aux(xs)\n    return 2 * sum(xs)", 0.4 + 0.6 + 0.5 + 1.0),
    "thin wrapper": ("def aux(xs):\n    return 2 * sum(xs)", "def total(xs):\n    return aux(xs)", 0.4 + 0.6 + 0.5 + 1.0 + 0.5),
    "result ignored": (AUX, "def total(xs):\n    aux(xs)\n    return 2 * sum(xs)", 4.0 - 0.5),
    "result stored and ignored": (AUX, "def total(xs):\n    ys = aux(xs)\n    return 2 * sum(xs)", 4.0 - 0.5),
    "main defines aux": (AUX, f"{AUX}\n\n{MAIN}", 0.4 + 0.6 + 0.5 + 1.0),
    "main calls what nobody wrote": (
        "I cannot.",
        "def total(xs):\n    try:\n        return sum(aux(xs))\n    except NameError:\n        return 2 * sum(xs)",
        0.6 + 0.5 + 1.0,
    ),
    "lambda": (AUX, "total = lambda xs: sum(aux(xs))", 4.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_levels(executor, name):
    helper, main, expected = CASES[name]
    assert score(helper, main, executor=executor) == pytest.approx(expected)


def test_what_does_not_parse_or_lacks_main_is_not_executed(scripted):
    for name in ("nothing", "no main", "broken helper", "broken main"):
        helper, main, expected = CASES[name]
        assert score(helper, main, executor=scripted()) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", ["all there is", "helper not called", "thin wrapper", "result ignored", "no main", "no test passes"]
)
def test_one_agent_may_write_both_functions(executor, name):
    helper, main, expected = CASES[name]
    columns = {name: [value] for name, value in PROBLEM.items()}
    for text in (f"{helper}\n\n\n{main}", f"First:\n```\n{helper}\n```\nThen:\n```\n{main}\n```"):
        assert collaboration_reward([PROMPT], [text], executor=executor, **columns) == [pytest.approx(expected)]


def test_several_helpers_share_their_parts(executor):
    workflow = Collaboration(num_agents=3)
    problem = {"prompt": PROMPT, **PROBLEM}
    replies = {
        "helper": AUX,
        "helper2": "def aux2(xs):\n    return sum(xs)",
        "main": "def total(xs):\n    return aux2(xs) * 2",
    }
    columns = {name: [value] for name, value in PROBLEM.items()}
    [reward] = collaboration_reward(
        [PROMPT], [workflow.solution(problem, replies)], replies=[replies], executor=executor, **columns
    )
    assert reward == pytest.approx(0.4 + 0.6 + 0.5 + 1.0 + (0.5 + 1.0) / 2)


def test_components_are_logged(executor):
    replies = [
        dict(zip(("helper", "main"), CASES[name][:2], strict=True))
        for name in ("all there is", "no main", "result ignored")
    ]
    solutions = [Collaboration().solution({"prompt": PROMPT, **PROBLEM}, reply) for reply in replies]
    columns = {name: [value] * 3 for name, value in PROBLEM.items()}
    logged = {}
    collaboration_reward(
        [PROMPT] * 3,
        solutions,
        replies=replies,
        turn=[0] * 3,
        executor=executor,
        log_metric=logged.__setitem__,
        **columns,
    )
    assert {name.removeprefix("collaboration_reward/"): value for name, value in logged.items()} == {
        "helper_definition": 1.0,
        "main_definition": pytest.approx(2 / 3),
        "syntax": 1.0,
        "calls_helper": pytest.approx(2 / 3),
        "not_wrapper": pytest.approx(2 / 3),
        "result_ignored": pytest.approx(1 / 3),
        "tests_passed": 4.0,
        "tests_total": 4.0,
        "pass_rate": pytest.approx(2 / 3),
        "solved": pytest.approx(2 / 3),
        "timeouts": 0.0,
    }
