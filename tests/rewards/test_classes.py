"""The reward for completing a class, part by part."""

from textwrap import indent

import pytest

from marcog_trl.execution import Verdict
from marcog_trl.rewards import InfrastructureFailure, class_reward, make_reward
from marcog_trl.workflows import ClassTeam


SKELETON = '''class Account:
    """Money."""

    def __init__(self):
        self.balance = 0

    def put(self, amount):
        """Put in; return the balance."""

    def take(self, amount):
        """Take out; return the balance."""

    def rename(self, name):
        """Set the name."""

    def describe(self):
        """Say the name."""
'''
TEST = """import unittest

class T(unittest.TestCase):
    def setUp(self):
        self.account = Account()

    def test_put(self):
        self.assertEqual(self.account.put(2), 2)

    def test_take(self):
        self.account.put(3)
        self.assertEqual(self.account.take(2), 1)

    def test_name(self):
        self.account.rename("Ada")
        self.assertEqual(self.account.describe(), "Ada")

    def test_new(self):
        self.assertEqual(self.account.balance, 0)
"""
PROBLEM = {
    "task_id": "bank/1",
    "entry_point": "Account",
    "starter_code": SKELETON,
    "test": TEST,
    "test_format": "unittest",
}
PUT = "def put(self, amount):\n    self.balance += amount\n    return self.balance"
TAKE = "def take(self, amount):\n    self.balance -= amount\n    return self.balance"
RENAME = "def rename(self, name):\n    self.name = name"
DESCRIBE = "def describe(self):\n    return self.name"
BROKEN = "def describe(self):\n    return (self.name"
ALL = "\n\n".join([PUT, TAKE, RENAME, DESCRIBE])


def score(replies, **kwargs):
    solution = ClassTeam(split="pick").solution({"prompt": SKELETON, **PROBLEM}, replies)
    columns = {name: [value] for name, value in PROBLEM.items()}
    [reward] = class_reward([SKELETON], [solution], replies=[replies], **(columns | kwargs))
    return reward


CASES = {
    # name: (first agent, second agent, tests, overlap)
    "all there is": (f"{PUT}\n\n{TAKE}", f"{RENAME}\n\n{DESCRIBE}", 1, 0),
    "one agent writes all": (ALL, "I cannot.", 1, 0),
    "both write all": (ALL, ALL, 1, 1),
    "one method twice": (f"{PUT}\n\n{TAKE}", f"{TAKE}\n\n{RENAME}\n\n{DESCRIBE}", 1, 1 / 4),
    "one method missing": (f"{PUT}\n\n{TAKE}", RENAME, 3 / 4, 0),
    "one method broken": (f"{PUT}\n\n{TAKE}", f"{RENAME}\n\n{BROKEN}", 3 / 4, 0),
    "broken here, right there": (f"{PUT}\n\n{TAKE}\n\n{BROKEN}", f"{RENAME}\n\n{DESCRIBE}", 1, 0),
    "one method wrong": (f"{PUT}\n\n{PUT.replace('put', 'take')}", f"{RENAME}\n\n{DESCRIBE}", 3 / 4, 0),
    "nobody": ("I cannot.", "", 1 / 4, 0),
    "stubs": (SKELETON, SKELETON, 1 / 4, 0),
    "the class, each a part": (
        f"{SKELETON}\n{indent(ALL, '    ')}".replace(indent(RENAME, "    "), "").replace(indent(DESCRIBE, "    "), ""),
        f"{SKELETON}\n{indent(RENAME, '    ')}\n\n{indent(DESCRIBE, '    ')}",
        1, 0,
    ),
    "the constructor twice": (
        f"class Account:\n    def __init__(self):\n        self.balance = 0\n{indent(PUT, '    ')}",
        f"class Account:\n    def __init__(self):\n        self.balance = 1 - 1\n{indent(TAKE, '    ')}",
        3 / 4, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts(executor, name):
    first, second, tests, overlap = CASES[name]
    reward = score({"coder": first, "coder2": second}, executor=executor)
    assert reward == pytest.approx(6 * tests - overlap)


@pytest.mark.parametrize("line", ["x = 0", "self", "return None", "del self", "while False: pass", "raise ValueError"])
def test_a_method_that_does_nothing_earns_nothing(executor, line):
    names = ("put", "take", "rename", "describe")
    idle = [f"def {name}(self, *args):\n    {line}" for name in names]
    nobody = score({"coder": "I cannot.", "coder2": ""}, executor=executor)
    assert score({"coder": "\n\n".join(idle[:2]), "coder2": "\n\n".join(idle[2:])}, executor=executor) == nobody
    half = score({"coder": f"{PUT}\n\n{TAKE}", "coder2": ""}, executor=executor)
    assert score({"coder": f"{PUT}\n\n{TAKE}", "coder2": "\n\n".join(idle[2:])}, executor=executor) == half


def test_one_completion_holds_the_class(executor):
    completions = {
        f"class Account:\n    def __init__(self):\n        self.balance = 0\n\n{indent(ALL, '    ')}": 6.0,
        f"Here:\n```python\n{SKELETON}\n{indent(PUT, '    ')}\n```": 6 * 2 / 4,
        SKELETON: 6 * 1 / 4,
    }
    columns = {name: [value] * len(completions) for name, value in PROBLEM.items()}
    rewards = class_reward([SKELETON] * 3, list(completions), executor=executor, **columns)
    assert rewards == pytest.approx(list(completions.values()))


def test_components_are_logged(executor):
    teams = [dict(zip(("coder", "coder2"), CASES[name][:2], strict=True)) for name in ("both write all", "nobody")]
    teams.append({"coder": PUT})  # the other was not asked
    workflow = ClassTeam(split="pick")
    solutions = [workflow.solution({"prompt": SKELETON, **PROBLEM}, replies) for replies in teams]
    columns = {name: [value] * 3 for name, value in PROBLEM.items()}
    logged = {}
    class_reward(
        [SKELETON] * 3, solutions, replies=teams, executor=executor, log_metric=logged.__setitem__, turn=[1] * 3, **columns
    )  # fmt: skip
    assert {name.removeprefix("class_reward/turn_2/"): value for name, value in logged.items()} == {
        "methods": pytest.approx(1.25 / 3),
        "overlap": pytest.approx(1 / 3),
        "agents/coder/methods": pytest.approx(1.25 / 3),
        "agents/coder2/methods": 0.5,
        "tests_passed": pytest.approx(7 / 3),
        "tests_total": 4.0,
        "pass_rate": pytest.approx(7 / 12),
        "solved": pytest.approx(1 / 3),
        "timeouts": 0.0,
    }


def test_failure_of_the_executor_is_no_reward(scripted):
    reward = score(
        {"coder": ALL, "coder2": ""}, executor=scripted(Verdict("infrastructure", 0, 4, message="no worker"))
    )
    assert isinstance(reward, InfrastructureFailure) and reward.reason == "no worker"


def test_what_it_needs():
    assert class_reward.needs_tests and class_reward.needs_entry_point
    assert make_reward("class_reward") is class_reward
    with pytest.raises(ValueError, match="no column 'entry_point'"):
        class_reward([SKELETON], [ALL], test=[TEST], test_format=["unittest"])
    columns = {name: [value] for name, value in PROBLEM.items()} | {"entry_point": ["f"]}
    with pytest.raises(ValueError, match=r"Problem 'bank/1' has entry_point='f', .*'execution_reward'"):
        class_reward([SKELETON], [ALL], **columns)
