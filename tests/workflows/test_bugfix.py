"""A tester and a fixer."""

import pytest
from players import PROBLEM as TOTAL
from players import Executor, last, play

from marcog_trl.execution import CodeExecutor, TestResult, Verdict
from marcog_trl.workflows import Bugfix, Centralized, make_workflow


BUGGY = "def total(xs):\n    return sum(xs)"
FIXED = "def total(xs):\n    return 2 * sum(xs)"
PROBLEM = TOTAL | {"buggy_solution": f"\n{BUGGY}\n"}


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        yield executor


def test_fixer_reads_the_assert_and_what_it_found(executor):
    tester, fixer = play(
        Bugfix(), {"tester": ["```\nassert total([1, 2]) == 6\n```"], "fixer": [FIXED]}, executor, PROBLEM
    )
    assert list(tester) == ["tester"] and list(fixer) == ["fixer"]
    role = Bugfix().agents[0].role
    assert last(tester["tester"]) == f"{role}\n\n{PROBLEM['prompt'].rstrip()}\n\nCode:\n{BUGGY}"
    test, result = last(fixer["fixer"]).split(f"Code:\n{BUGGY}\n\n")[1].split("\n")
    assert test == "Test: assert total([1, 2]) == 6"
    assert result == "Result: total([1, 2]) returned 3, expected 6"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("assert total([]) == 0", "Test: assert total([]) == 0\nResult: passed"),
        ("assert total(1) == 2", "Test: assert total(1) == 2\nResult: TypeError"),
        ("I cannot.", "Test: none"),
        ("assert other([]) == 0", "Test: none"),
    ],
)
def test_other_asserts(executor, text, result):
    _, fixer = play(Bugfix(), {"tester": [text], "fixer": [FIXED]}, executor, PROBLEM)
    assert last(fixer["fixer"]).split(f"Code:\n{BUGGY}\n\n")[1].startswith(result)


def test_an_executor_that_failed_is_no_result():
    failed = Executor("passed")
    failed.verdict = Verdict("infrastructure", 0, 1, (TestResult("error", "no worker"),), "no worker")
    _, fixer = play(Bugfix(), {"tester": ["assert total([]) == 0"], "fixer": [FIXED]}, failed, PROBLEM)
    assert last(fixer["fixer"]).endswith("Test: assert total([]) == 0\nResult: could not be run")


def test_the_solution_is_the_fixers_code():
    replies = {"tester": "assert total([]) == 0", "fixer": f"Fixed:\n```python\n{FIXED}\n```"}
    assert Bugfix().solution(PROBLEM, replies) == FIXED


def test_second_turn(executor):
    """Each agent sees its own history, and the fixer also what the new assert finds."""
    workflow = make_workflow("bugfix", num_turns=2)
    asserts = ["assert total([]) == 0", "assert total([1, 2]) == 6"]
    stages = play(workflow, {"tester": asserts, "fixer": [BUGGY, FIXED]}, executor, PROBLEM)
    assert [list(stage) for stage in stages] == [["tester"], ["fixer"]] * 2
    tester, fixer = stages[2]["tester"], stages[3]["fixer"]
    assert [message["content"] for message in tester if message["role"] == "assistant"] == asserts[:1]
    assert last(tester).startswith("Tests: 0 of 1 passed") and "Revise your answer." in last(tester)
    assert [message["content"] for message in fixer if message["role"] == "assistant"] == [BUGGY]
    assert "Definition of total: found" in last(fixer) and "returned 3, expected 6\n\n" in last(fixer)


def test_roles_and_what_it_needs():
    workflow = make_workflow("bugfix", roles={"tester": "Test."})
    assert [agent.name for agent in workflow.agents] == ["tester", "fixer"] and workflow.agents[0].role == "Test."
    assert workflow.needs_entry_point and not workflow.needs_tests
    with pytest.raises(ValueError, match="num_agents=3 is not an option"):
        make_workflow("bugfix", num_agents=3)
    with pytest.raises(ValueError, match=r"it has no 'buggy_solution', .* Use load_problems"):
        play(Bugfix(), {}, problem=TOTAL)
    with pytest.raises(ValueError, match="centralized=True needs a workflow that asks"):
        play(Centralized(Bugfix()), {}, problem=PROBLEM)
