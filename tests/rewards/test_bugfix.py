"""The reward for correcting a bug, by agent."""

import pytest

from marcog_trl.execution import Job, Verdict
from marcog_trl.rewards import InfrastructureFailure, bugfix_reward, make_reward


PROMPT = 'def add(a, b):\n    """Add."""\n'
REFERENCE = "def add(a, b):\n    return a + b"
BUGGY = "def add(a, b):\n    return a - b"
PROBLEM = {
    "entry_point": "add",
    "test": [f"assert add({i}, 1) == {i + 1}" for i in range(4)] + ["assert add(0, 2) == 2"],
    "test_format": "asserts",
    "buggy_solution": BUGGY,
    "canonical_solution": REFERENCE,
    "test_timeout": 1.0,
}
MOSTLY_RIGHT = "def add(a, b):\n    return a + min(b, 1)"  # passes 4 of 5 tests


def score(texts, solution=MOSTLY_RIGHT, executor=None, problem=PROBLEM, **kwargs):
    columns = {name: [value] * len(texts) for name, value in problem.items()}
    replies = [{"tester": text, "fixer": solution} for text in texts]
    return bugfix_reward(
        [PROMPT] * len(texts), [solution] * len(texts), replies=replies, executor=executor, **(columns | kwargs)
    )


def test_an_assert_that_discriminates(executor):
    assert score(["assert add(1, 1) == 2", "assert add(1, 0) == 1"], executor=executor) == [
        {"tester": pytest.approx(0.9), "fixer": pytest.approx(0.8)},
        {"tester": pytest.approx(0.4), "fixer": pytest.approx(0.8)},
    ]
    assert score(["assert add(1, 1) == 2"], BUGGY, executor) == [{"tester": 0.5, "fixer": 0.0}]
    assert score(["assert add(1, 1) == 2"], REFERENCE, executor) == [{"tester": 1.0, "fixer": 1.0}]


HOSTILE = {
    "does not parse": "assert add(1, 1) ==",
    "false": "assert False",
    "false, and calls": "assert add(1, 1) == 2 and False",
    "true": "assert True",
    "wrong name": "assert plus(1, 1) == 2",
    "wrong arguments": "assert add(1) == 2",
    "wrong value": "assert add(1, 1) == 3",
    "never ends": "assert add(1, 1) == 2 and max(range(10 ** 12))",
    "never ends on the bug": "assert add(1, 1) == 2 or max(range(10 ** 12))",
    "reads the source": "assert add.__code__.co_code != b''  and add(1, 1) == 2",
    "draws a number": "import random\nassert random.random() < 0.5",
    "looks at addresses": "assert add(1, 1) > 0 or str(add)[-2] in '02468ace'",
    "looks into the judge": "assert [c for c in ().__class__.__base__.__subclasses__() if add(1, 1) == 2]",
    "writes a file": "assert open('/tmp/seen', 'a') and add(1, 1) == 2",
    "in a function": "def test():\n    assert add(1, 1) == 2",
    "prints a verdict": "print('passed')\nassert add(1, 1) == 1 - 0 and 'passed'",
    "defines the function": "def add(a, b):\n    return 2",
    "nothing": "",
}


def test_asserts_that_earn_nothing(executor):
    rewards = score(list(HOSTILE.values()), executor=executor)
    assert dict(zip(HOSTILE, (reward["tester"] for reward in rewards), strict=True)) == dict.fromkeys(
        HOSTILE, pytest.approx(0.4)
    )


WITH_EXAMPLE = 'def add(a, b):\n    """Add.\n\n    >>> add(1, 1)\n    2\n    """\n'
WITHOUT_KNOWING = {
    "not what the bug returns": "assert add(2, 1) != 1",
    "nor other usual values": "assert add(2, 1) not in (None, 0, 1)",
    "several": "assert [add(a, 1) for a in (2, 3)] != [1, 2]",
    "not as small": "assert add(2, 1) > 1",
    "the example": "assert add(1, 1) == 2",
    "the example in another form": "assert add(b=1, a=2 - 1) in [2]",
    "the example twice": "assert add(1, 1) + add(1, 1) == 4",
}


def test_asserts_that_need_no_knowledge_of_the_result_earn_nothing(executor):
    def testers(texts, prompt):
        count = len(texts)
        columns = {name: [value] * count for name, value in PROBLEM.items()}
        replies = [{"tester": text, "fixer": ""} for text in texts]
        rewards = bugfix_reward(
            [prompt] * count, [MOSTLY_RIGHT] * count, replies=replies, executor=executor, **columns
        )
        return [reward["tester"] for reward in rewards]

    rewards = testers(list(WITHOUT_KNOWING.values()), WITH_EXAMPLE)
    assert dict(zip(WITHOUT_KNOWING, rewards, strict=True)) == dict.fromkeys(WITHOUT_KNOWING, pytest.approx(0.4))
    knowing = ["assert add(2, 1) == 3", "assert add(1, 1) == 2 and add(2, 1) == 3", "assert abs(add(2, 1) - 3) < 0.1"]
    assert testers(knowing, WITH_EXAMPLE) == pytest.approx([0.9] * 3)
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": WITH_EXAMPLE}]
    assert testers(["assert add(1, 1) == 2", "assert add(2, 1) == 3"], chat) == pytest.approx([0.4, 0.9])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("None", "0"), ("[]", "[a]"), ("''", "'a'"), ("True", "False"), ("{a: b}", "{}"), ("a + 0.5", "a"), ("'ab'", "'b'"),
     ("{a, b}", "{a}"), ("(a, b)", "(b, a)"), ("iter([a])", "[b]")],
)  # fmt: skip
def test_any_result_can_be_tested(executor, right, wrong):
    problem = PROBLEM | {f"{kind}_solution": f"def add(a, b):\n    return {value}" for kind, value in (("canonical", right), ("buggy", wrong))}  # fmt: skip
    value, other = (eval(source, {"a": 3, "b": 4}) for source in (right, wrong))
    value = [3] if right.startswith("iter") else value
    call = "list(add(3, 4))" if right.startswith("iter") else "add(3, 4)"
    texts = [f"assert {call} == {value!r}", f"assert {call} != {other!r}"]
    rewards = score(texts, executor=executor, problem=problem)
    knows_both = isinstance(value, bool)  # what is not False is True
    assert [2 * (reward["tester"] - reward["fixer"] / 2) for reward in rewards] == [1, knows_both]


def test_what_is_beside_the_assert_is_not_run(executor):
    texts = {
        "def add(a, b):\n    return 2\nassert add(1, 1) == 2": 0.9,
        "add = max\nassert add(1, 0) == 1": 0.4,
        "exit(1)\nassert add(1, 1) == 2": 0.9,
    }
    rewards = score(list(texts), executor=executor)
    assert [reward["tester"] for reward in rewards] == pytest.approx(list(texts.values()))


def test_a_bug_that_never_ends_is_not_shown_by_a_timeout(executor):
    problem = PROBLEM | {"buggy_solution": "def add(a, b):\n    while True:\n        pass"}
    assert score(["assert add(1, 1) == 2"], executor=executor, problem=problem)[0]["tester"] == pytest.approx(0.4)


def test_one_call_of_the_executor_without_what_is_known(scripted):
    passed, failed = Verdict("passed", 1, 1), Verdict("failed", 0, 1)
    text = "assert add(1, 1) == 2"
    on_bug = Job(BUGGY, (text,), entry_point="add", test_timeout=1.0)
    known = [[(on_bug, failed)]] * 2 + [[]]
    rewards = score(
        [text, text, "assert add(2, 2) == 4"],
        # the solution, the reference, two other programs, and the other assert on four programs
        executor=scripted(Verdict("failed", 4, 5), passed, failed, failed, failed, passed, failed, failed),
        verdicts=known,
    )
    assert [reward["tester"] for reward in rewards] == pytest.approx([0.9] * 3)
    executor = scripted(Verdict("failed", 4, 5), passed, failed, failed)
    score([text, text], executor=executor, verdicts=known[:2])
    [[solution, reference, above, below]] = executor.calls
    assert (solution.code, reference.code) == (MOSTLY_RIGHT, REFERENCE)
    assert above.code != below.code and {job.tests for job in (reference, above, below)} == {(text,)}


@pytest.mark.parametrize("lost", range(5))
def test_failure_of_the_executor_is_no_reward(scripted, lost):
    passed, failed = Verdict("passed", 1, 1), Verdict("failed", 0, 1)
    verdicts = [Verdict("failed", 4, 5), failed, passed, failed, failed]
    verdicts[lost] = Verdict("infrastructure", 0, 1, message="no worker")
    [reward] = score(["assert add(1, 1) == 2"], executor=scripted(*verdicts))
    assert isinstance(reward, InfrastructureFailure) and reward.reason


def test_components_are_logged(executor):
    logged = {}
    texts = ["assert add(1, 1) == 2", "assert add(1, 0) == 1", "assert add(1, 1) == 3", "no"]
    score(texts, executor=executor, log_metric=logged.__setitem__, turn=[1] * 4)
    assert {name.removeprefix("bugfix_reward/turn_2/"): value for name, value in logged.items()} == {
        "usable_assert": 0.75,
        "fails_on_bug": 0.5,
        "passes_on_reference": 0.5,
        "fails_on_others": 0.75,
        "discriminates": 0.25,
        "tests_passed": 4.0,
        "tests_total": 5.0,
        "pass_rate": pytest.approx(0.8),
        "solved": 0.0,
        "timeouts": 0.0,
    }


def test_other_agents_earn_what_the_fixer_earns(executor):
    columns = {name: [value] for name, value in PROBLEM.items()}
    replies = {"planner": "", "tester": "assert add(1, 1) == 2", "fixer": ""}
    [reward] = bugfix_reward([PROMPT], [MOSTLY_RIGHT], replies=[replies], executor=executor, **columns)
    assert reward == pytest.approx({"planner": 0.8, "tester": 0.9, "fixer": 0.8})


def test_a_single_agent_earns_the_share_of_tests(executor):
    columns = {name: [value] for name, value in PROBLEM.items() if name.startswith("test")}
    assert bugfix_reward([PROMPT], [MOSTLY_RIGHT], executor=executor, **columns) == pytest.approx([0.8])


def test_what_it_needs():
    assert bugfix_reward.needs_tests and bugfix_reward.needs_entry_point and bugfix_reward.needs_tester
    assert make_reward("bugfix_reward") is bugfix_reward
    columns = {name: value for name, value in PROBLEM.items() if name != "canonical_solution"}
    with pytest.raises(ValueError, match="no column 'canonical_solution'"):
        score(["assert add(1, 1) == 2"], problem=columns)
