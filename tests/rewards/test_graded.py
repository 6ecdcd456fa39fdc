"""The graded reward's grades, each against its number, by what happened and not by what messages say."""

import pytest

from marcog_trl.execution import TestResult, Verdict
from marcog_trl.rewards import graded_reward
from marcog_trl.workflows import Collaboration, Pipeline


PROMPT = 'def double(x):\n    """Twice x."""\n'
COLUMNS = {
    "entry_point": "double",
    "test": ["assert double(1) == 2", "assert double(2) == 4", "assert double(-1) == -2"],
    "test_format": "asserts",
    "timeout": 0.5,
}
# Here the absolute value of what is no number is asked for: the tests' own exception, which is a wrong answer
JUDGED = {"test": ["assert abs(double(1)) == 2", "assert abs(double(2)) == 4", "assert abs(double(-1)) == 2"]}
RIGHT = "def double(x):\n    return 2 * x"


def score(completions, **kwargs):
    columns = {name: [value] * len(completions) for name, value in COLUMNS.items()}
    return graded_reward([PROMPT] * len(completions), completions, **(columns | kwargs))


CASES = {
    # name: (completion, reward, what is logged of it)
    "all": (RIGHT, 1.0, ""),
    "all, in words": (f"Sure!\n```python\n{RIGHT}\n```", 1.0, ""),
    "all, and a broken example": (f"```\n{RIGHT}\n```\nFor example:\n```\ndouble(1\n```", 1.0, ""),
    "two of three": ("def double(x):\n    return 2 * x if x > 0 else 9", 0.1 + 0.6 * 2 / 3, "wrong_answer"),
    "one, then an exception": ("def double(x):\n    return {1: 2}[x]", 0.1 + 0.6 / 3, "runtime_error"),
    "one, then hangs": ("def double(x):\n    while x > 1: pass\n    return 2", 0.1 + 0.6 / 3, "timeouts"),
    "wrong": ("def double(x):\n    return 3 * x", 0.0, "wrong_answer"),
    "nothing returned": ("def double(x):\n    y = x", 0.0, "wrong_answer"),
    "exception": ("def double(x):\n    return x / 0", -0.1, "runtime_error"),
    "assertion of its own": ("def double(x):\n    assert x > 9, '1 == 2 does not hold'", -0.1, "runtime_error"),
    "wrong once": (
        "def double(x):\n    if x == 1: return 5\n    raise ValueError",
        -0.1,
        "wrong_answer runtime_error",
    ),
    "not loaded": ("x = 1 / 0\n" + RIGHT, -0.1, "runtime_error"),
    "another function": ("def triple(x):\n    return 3 * x", -0.1, "runtime_error"),
    "process ended": ("import os\ndef double(x):\n    os._exit(1)", -0.1, "runtime_error"),
    "hangs": ("def double(x):\n    while True: pass", -0.2, "timeouts"),
    "syntax": ("def double(x):\n    return (2 * x", -0.3, "syntax_error"),
    "syntax, second half": ("def double(x):\n    y = 3 * x\n    return (y", -0.3, "syntax_error"),
    "refusal": ("I cannot.", -0.5, "no_code"),
    "nothing": ("", -0.5, "no_code"),
}


@pytest.mark.parametrize("columns", [{}, JUDGED], ids=["direct", "judged"])
def test_grades(executor, columns):
    columns = {name: [value] * len(CASES) for name, value in columns.items()}
    rewards = score([completion for completion, _, _ in CASES.values()], executor=executor, **columns)
    expected = {name: pytest.approx(reward) for name, (_, reward, _) in CASES.items()}
    assert dict(zip(CASES, rewards, strict=True)) == expected


def test_scripts(executor):
    programs = {
        "print(2 * int(input()))": 1.0,
        "print(3 * int(input()))": 0.0,
        "print(1 / 0)": -0.1,
        "raise SystemExit(2)": -0.1,
        "while True: pass": -0.2,
        "```\nprint((1\n```": -0.3,
    }
    columns = {"entry_point": "", "test": [["1", "2"]], "test_format": "stdio"}
    columns = {name: [value] * len(programs) for name, value in columns.items()}
    assert score(list(programs), executor=executor, **columns) == list(programs.values())


def test_what_happened_is_logged(executor):
    for completion, _, happened in CASES.values():
        logged = {}
        score([completion], executor=executor, log_metric=logged.__setitem__)
        names = ("wrong_answer", "runtime_error", "timeouts", "syntax_error", "no_code")
        shares = {name: logged.pop(f"graded_reward/{name}") for name in names}
        assert shares == {name: float(name in happened.split()) for name in names}, completion
        assert set(logged) == {
            f"graded_reward/{name}" for name in ("tests_passed", "tests_total", "pass_rate", "solved")
        }


def test_the_worst_counts_and_messages_do_not(scripted):
    tests = (
        TestResult("failed", "KeyError: 1"),
        TestResult("failed", "AssertionError", raised=True),
        TestResult("timeout", "time limit reached"),
        TestResult("skipped", "not reached"),
    )
    for last, reward in ((1, 0.0), (2, -0.1), (3, -0.2), (4, -0.2)):
        verdict = Verdict("failed", 0, last, tests[:last])
        assert score([RIGHT], executor=scripted(verdict)) == [reward]


AUX = "def aux(x):\n    return 2"
MAIN = "def double(x):\n    return aux(x) * x"


@pytest.mark.parametrize(
    ("helper", "main", "reward"),
    [
        (AUX, MAIN, 1.0),
        (AUX, f"{MAIN} + (1", -0.3),
        ("def aux(x:\n    return 2", MAIN, -0.1),  # what is asked for is whole, and calls what is not there
        (AUX, "I cannot.", -0.5),
        ("def aux(x:\n    return 2", "I cannot.", -0.3),
        ("I cannot.", "Nor can I.", -0.5),
    ],
)
def test_a_team_is_told_of_syntax_errors_that_its_solution_does_not_show(executor, helper, main, reward):
    replies = {"helper": helper, "main": main}
    solution = Collaboration().solution({"prompt": PROMPT, **COLUMNS}, replies)
    assert score([solution], replies=[replies], executor=executor) == [reward]


def test_errors_that_a_later_agent_corrected_do_not_count(executor):
    replies = {
        "planner": "Double it.",
        "coder": "def double(x:\n    return 2",
        "debugger": "def double(x): return 3 * x",
    }
    solution = Pipeline().solution({"prompt": PROMPT, **COLUMNS}, replies)
    assert score([solution], replies=[replies], executor=executor) == [0.0]
