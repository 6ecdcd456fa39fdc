"""Fixing bugs (`recipes/examples/bugfix`): its problems, what its agents read and earn, and a whole run on the command lines."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from guides import code_of
from players import PROBLEM as TOTAL
from players import Executor, ScriptedExecutor, last, play

from marcog_trl import load_problems, make_workflow
from marcog_trl.cli.main import main
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.train import train
from marcog_trl.execution import Job, TestResult, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards import InfrastructureFailure, make_reward


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "examples" / "bugfix"
WORKFLOW, REWARD = f"{FOLDER}/workflow.py:Bugfix", f"{FOLDER}/reward.py:bugfix_reward"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The built-in problems with bugs, as the script writes them."""
    folder = tmp_path_factory.mktemp("bugs") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["problems.py", str(folder)])
        runpy.run_path(str(FOLDER / "problems.py"), run_name="__main__")
    return str(folder)


# Problems


def test_bugs_fail_a_test_and_reference_solutions_pass(data, executor):
    rows = [*load_problems(data, "train[:20]"), *load_problems(data, "test[:10]")]
    columns = ("buggy_solution", "canonical_solution")
    verdicts = executor.run([solution_job(row, row[column]) for column in columns for row in rows])
    assert [verdict.status for verdict in verdicts] == ["failed"] * len(rows) + ["passed"] * len(rows)


FIX = {
    "task_id": "Python/0",
    "prompt": 'import math\n\n\ndef half(x: float) -> float:\n    """ Half of x.\n    >>> half(3)\n    1.5\n    """\n',
    "declaration": "import math\n\n\ndef half(x: float) -> float:\n",
    "canonical_solution": "    return x / 2\n",
    "buggy_solution": "    return x // 2\n",
    "entry_point": "half",
    "import": "",
    "test_setup": "two = 2\n",
    "test": "\n\n\ndef check(half):\n    assert half(3) == 1.5\n    assert half(4) == two\n\ncheck(half)",
}


def test_humanevalfix(executor):
    row = runpy.run_path(str(FOLDER / "problems.py"))["humanevalfix"](FIX)
    assert row["task_id"] == "humanevalfix/Python/0" and row["setup"] == "import math\ntwo = 2"
    verdicts = executor.run([solution_job(row, row[column]) for column in ("canonical_solution", "buggy_solution")])
    assert [(verdict.passed, verdict.total) for verdict in verdicts] == [(2, 2), (1, 2)]


# What the agents read


BUGGY_TOTAL, FIXED_TOTAL = "def total(xs):\n    return sum(xs)", "def total(xs):\n    return 2 * sum(xs)"
WITH_BUG = TOTAL | {"buggy_solution": f"\n{BUGGY_TOTAL}\n"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("```\nassert total([1, 2]) == 6\n```", "Test: assert total([1, 2]) == 6\nResult: total([1, 2]) returned 3, expected 6"),
        ("assert total([]) == 0", "Test: assert total([]) == 0\nResult: passed"),
        ("assert total(1) == 2", "Test: assert total(1) == 2\nResult: TypeError"),
        ("I cannot.", "Test: none"),
        ("assert other([]) == 0", "Test: none"),
    ],
)  # fmt: skip
def test_the_fixer_reads_the_assert_and_what_it_found(executor, text, result):
    workflow = make_workflow(WORKFLOW)
    tester, fixer = play(workflow, {"tester": [text], "fixer": [FIXED_TOTAL]}, executor, WITH_BUG)
    asked = f"{workflow.agents[0].role}\n\n{TOTAL['prompt'].rstrip()}\n\nCode:\n{BUGGY_TOTAL}"
    assert last(tester["tester"]) == asked
    assert last(fixer["fixer"]).split(f"Code:\n{BUGGY_TOTAL}\n\n")[1].startswith(result)


def test_an_executor_that_failed_is_no_result():
    failed = Executor("passed")
    failed.verdict = Verdict("infrastructure", 0, 1, (TestResult("error", "no worker"),), "no worker")
    replies = {"tester": ["assert total([]) == 0"], "fixer": [FIXED_TOTAL]}
    _, fixer = play(make_workflow(WORKFLOW), replies, failed, WITH_BUG)
    assert last(fixer["fixer"]).endswith("Test: assert total([]) == 0\nResult: could not be run")


def test_second_turn(executor):
    """Each agent sees its own history, and the fixer also what the new assert finds."""
    workflow = make_workflow(WORKFLOW, num_turns=2)
    asserts = ["assert total([]) == 0", "assert total([1, 2]) == 6"]
    replies = {"tester": asserts, "fixer": [BUGGY_TOTAL, f"Fixed:\n```python\n{FIXED_TOTAL}\n```"]}
    stages = play(workflow, replies, executor, WITH_BUG)
    assert [list(stage) for stage in stages] == [["tester"], ["fixer"]] * 2
    tester, fixer = stages[2]["tester"], stages[3]["fixer"]
    assert [message["content"] for message in tester if message["role"] == "assistant"] == asserts[:1]
    assert last(tester).startswith("Tests: 0 of 1 passed") and "Revise your answer." in last(tester)
    assert [message["content"] for message in fixer if message["role"] == "assistant"] == [BUGGY_TOTAL]
    assert "Definition of total: found" in last(fixer) and "returned 3, expected 6\n\n" in last(fixer)
    assert workflow.solution(WITH_BUG, {"fixer": replies["fixer"][1]}) == FIXED_TOTAL


def test_the_bug_may_be_in_the_prompt(executor):
    problem = TOTAL | {"prompt": BUGGY_TOTAL}
    replies = {"tester": ["assert total([1]) == 2"], "fixer": [FIXED_TOTAL]}
    _, fixer = play(make_workflow(WORKFLOW), replies, executor, problem)
    assert last(fixer["fixer"]).endswith("Result: total([1]) returned 1, expected 2")
    with pytest.raises(ValueError, match="it has no 'buggy_solution'"):
        play(make_workflow(WORKFLOW), replies, executor, TOTAL | {"prompt": [{"role": "user", "content": "Total."}]})


# What the agents earn


PROMPT = 'def add(a, b):\n    """Add.\n\n    >>> add(1, 2)\n    3\n    """\n'
REFERENCE, BUGGY = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
PROBLEM = {
    "entry_point": "add",
    "test": [f"assert add({i}, 1) == {i + 1}" for i in range(4)] + ["assert add(0, 2) == 2"],
    "test_format": "asserts",
    "buggy_solution": BUGGY,
    "canonical_solution": REFERENCE,
    "test_timeout": 1.0,
}
MOSTLY_RIGHT = "def add(a, b):\n    return a + min(b, 1)"  # passes 4 of 5 tests
NOTHING, ALL = pytest.approx(0.4), pytest.approx(0.9)  # of the tester, with this solution


def score(texts, solution=MOSTLY_RIGHT, executor=None, problem=PROBLEM, prompt=PROMPT, **kwargs):
    columns = {name: [value] * len(texts) for name, value in problem.items()}
    replies = [{"tester": text, "fixer": solution} for text in texts]
    given = columns | {"replies": replies, "executor": executor} | kwargs
    return make_reward(REWARD)([prompt] * len(texts), [solution] * len(texts), **given)


@pytest.mark.parametrize(("solution", "share"), [(MOSTLY_RIGHT, 0.8), (BUGGY, 0.0), (REFERENCE, 1.0)])
def test_an_assert_that_discriminates(executor, solution, share):
    knows, does_not = score(["assert add(1, 1) == 2", "assert add(1, 0) == 1"], solution, executor)
    assert knows == {"tester": pytest.approx(share / 2 + 0.5), "fixer": pytest.approx(share)}
    assert does_not == {"tester": pytest.approx(share / 2), "fixer": pytest.approx(share)}


HOSTILE = {
    "does not parse": "assert add(1, 1) ==",
    "false, and calls": "assert add(1, 1) == 2 and False",
    "wrong arguments": "assert add(1) == 2",
    "wrong value": "assert add(1, 1) == 3",
    "never ends": "assert add(1, 1) == 2 and max(range(10 ** 12))",
    "never ends on the bug": "assert add(1, 1) == 2 or max(range(10 ** 12))",
    "looks into the judge": "assert [c for c in ().__class__.__base__.__subclasses__() if add(1, 1) == 2]",
    "prints a verdict": "print('passed')\nassert add(1, 1) == 1 - 0 and 'passed'",
    "defines the function": "def add(a, b):\n    return 2",
    "another function": "add = max\nassert add(1, 0) == 1",
    # Nothing of the result is known
    "not what the bug returns": "assert add(2, 1) != 1",
    "nor other usual values": "assert add(2, 1) not in (None, 0, 1)",
    "several": "assert [add(a, 1) for a in (2, 3)] != [1, 2]",
    "not as small": "assert add(2, 1) > 1",
    "the example": "assert add(1, 2) == 3",
    "the example in another form": "assert add(1, b=4 - 2) in [3]",
    "the example in another order": "assert add(b=2, a=1) == 3",
    "the example twice": "assert add(1, 2) + add(1, 2) == 6",
}
HONEST = {
    "plain": "assert add(2, 1) == 3",
    "after what is not run": "def add(a, b):\n    return 2\nassert add(1, 1) == 2",
    "after an exit": "exit(1)\nassert add(1, 1) == 2",
}


@pytest.mark.parametrize(
    "prompt", [PROMPT, [{"role": "system", "content": "Think."}, {"role": "user", "content": PROMPT}]]
)
def test_asserts_that_know_the_result_earn_and_others_do_not(executor, prompt):
    rewards = score([*HOSTILE.values(), *HONEST.values()], executor=executor, prompt=prompt)
    found = dict(zip([*HOSTILE, *HONEST], (reward["tester"] for reward in rewards), strict=True))
    assert found == dict.fromkeys(HOSTILE, NOTHING) | dict.fromkeys(HONEST, ALL)


def test_what_the_code_with_the_bug_returns_earns_nothing(data, executor):
    """The attacks that once worked on the built-in problems: all that they know is the code that the tester is shown."""
    for row in load_problems(data, "train[:4]"):
        namespace = {}
        exec(row["buggy_solution"], namespace)  # our own program
        call = row["test"][0].removeprefix("assert ").split(" == ")[0]
        wrong, name = eval(call, namespace), row["entry_point"]
        texts = {
            f"assert {call} != {wrong!r}",
            f"assert {call} == {wrong!r}",
            f"assert [{call}, {call}] != {[wrong, wrong]!r}",
            f"assert [{name}(v) for v in [{call.removeprefix(name)}]] != {[wrong]!r}",
            "assert False",
            "I see a bug.",
        }
        prompt, problem = row["prompt"], {key: value for key, value in row.items() if key != "prompt"}
        for solution, share in ((row["canonical_solution"], 1.0), (row["buggy_solution"], None)):
            for reward in score(sorted(texts), solution, executor, problem, prompt):
                assert reward["tester"] == pytest.approx(reward["fixer"] / 2)
                assert reward["fixer"] == share or (share is None and reward["fixer"] < 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("None", "0"), ("[]", "[a]"), ("''", "'a'"), ("True", "False"), ("{a: b}", "{}"), ("a + 0.5", "a"), ("'ab'", "'b'"),
     ("{a, b}", "{a}"), ("(a, b)", "(b, a)")],
)  # fmt: skip
def test_any_result_can_be_tested(executor, right, wrong):
    codes = {"canonical_solution": right, "buggy_solution": wrong}
    problem = PROBLEM | {column: f"def add(a, b):\n    return {value}" for column, value in codes.items()}
    value, other = (eval(source, {"a": 3, "b": 4}) for source in (right, wrong))
    texts = [f"assert add(3, 4) == {value!r}", f"assert add(3, 4) != {other!r}"]
    rewards = score(texts, executor=executor, problem=problem)
    knows_both = isinstance(value, bool)  # what is not False is True
    assert [2 * (reward["tester"] - reward["fixer"] / 2) for reward in rewards] == [1, knows_both]


def test_a_bug_that_never_ends_is_not_shown_by_a_timeout(executor):
    problem = PROBLEM | {"buggy_solution": "def add(a, b):\n    while True:\n        pass"}
    assert score(["assert add(1, 1) == 2"], executor=executor, problem=problem)[0]["tester"] == NOTHING


PASSED, FAILED = Verdict("passed", 1, 1), Verdict("failed", 0, 1)


def test_what_the_workflow_executed_is_not_executed_again():
    text = "assert add(1, 1) == 2"
    on_bug = Job(BUGGY, (text,), entry_point="add", test_timeout=1.0)
    executor = ScriptedExecutor(Verdict("failed", 4, 5), PASSED, FAILED, FAILED)
    rewards = score([text, text], executor=executor, verdicts=[[(on_bug, FAILED)]] * 2)
    assert [reward["tester"] for reward in rewards] == [ALL, ALL]
    [[solution], [reference, above, below]] = executor.calls
    assert (solution.code, reference.code) == (MOSTLY_RIGHT, REFERENCE) and above.code != below.code


@pytest.mark.parametrize("lost", range(5))
def test_failure_of_the_executor_is_no_reward(lost):
    verdicts = [Verdict("failed", 4, 5), FAILED, PASSED, FAILED, FAILED]
    verdicts[lost] = Verdict("infrastructure", 0, 1, message="no worker")
    [reward] = score(["assert add(1, 1) == 2"], executor=ScriptedExecutor(*verdicts))
    assert isinstance(reward, InfrastructureFailure) and reward.reason


def test_shares_are_logged(executor):
    logged = {}
    texts = ["assert add(1, 1) == 2", "assert add(1, 0) == 1", "assert add(1, 1) == 3", "no"]
    score(texts, executor=executor, log_metric=logged.__setitem__, turn=[1] * 4)
    assert {name.removeprefix("bugfix_reward/turn_2/"): value for name, value in logged.items() if "bugfix" in name} == {
        "usable_assert": 0.75, "fails_on_bug": 0.5, "passes_on_reference": 0.5, "fails_on_others": 0.75, "discriminates": 0.25,
    }  # fmt: skip
    assert logged["execution_reward/turn_2/pass_rate"] == pytest.approx(0.8)


def test_other_teams(executor):
    columns = {name: [value] for name, value in PROBLEM.items()}
    replies = {"planner": "", "tester": "assert add(1, 1) == 2", "fixer": ""}
    reward = make_reward(REWARD)
    [found] = reward([PROMPT], [MOSTLY_RIGHT], replies=[replies], executor=executor, **columns)
    assert found == pytest.approx({"planner": 0.8, "tester": 0.9, "fixer": 0.8})
    assert reward([PROMPT], [MOSTLY_RIGHT], executor=executor, **columns) == pytest.approx([0.8])  # a single agent
    del columns["canonical_solution"]
    with pytest.raises(ValueError, match="no column 'canonical_solution'"):
        reward([PROMPT], [MOSTLY_RIGHT], replies=[replies], executor=executor, **columns)


# Whole runs


def test_from_training_to_solving(tiny_model, tmp_path, data, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    few = ["--dataset_name", data, "--dataset_test_split", "test[:1]", "--isolation", "best_effort"]
    train(
        RECIPES["magrpo"],
        [
            *few, "--num_test_samples", "1", "--workflow", WORKFLOW, "--reward", REWARD, "--dataset_train_split", "train[:2]", "--output_dir", "team",
            "--model_name_or_path", tiny_model, "--report_to", "none", "--per_device_train_batch_size", "2", "--num_generations",
            "2", "--max_completion_length", "6", "--max_steps", "1", "--bf16", "false", "--use_cpu", "--write_report", "false",
        ],
    )  # fmt: skip
    assert "bugfix_reward/usable_assert" in json.loads(Path("team/results.json").read_text())["trained"]
    team = ["--team", "team", "--trust_remote_code"]
    assert main(["evaluate", *team, *few, "--num_samples", "1", "--reward", REWARD, "--output", "e.json"]) == 0
    assert "bugfix_reward/discriminates" in json.loads(Path("e.json").read_text())["figures"]
    Path("buggy.py").write_text(f"{BUGGY}\n\n\nassert add(1, 1) == 2\n")
    solve = ["solve", *team, "--problem", "buggy.py", "--isolation", "best_effort", "--messages"]
    assert main(solve) == 1  # random weights
    printed = capfd.readouterr().err
    assert "--- tester, turn 1" in printed and "--- fixer, turn 1" in printed


def test_the_code_of_the_guide(monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(code_of("recipes/examples/bugfix/README.md"), {})
