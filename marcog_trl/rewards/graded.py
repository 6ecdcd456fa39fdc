"""Reward with partial credit, from no code to all tests passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import TestResult, Verdict
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.solutions import Completion, Components, Solutions, test_components
from marcog_trl.rewards.values import InfrastructureFailure


ALL_PASSED = 1.0
SOME_PASSED = 0.1
PER_PASSED = 0.6
NONE_PASSED = {
    "wrong_answer": 0.0,
    "runtime_error": -0.1,
    "timeouts": -0.2,
    "syntax_error": -0.3,
    "no_code": -0.5,
}


@needs_tests
def graded_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    **given: Any,
) -> list[float]:
    """
    1.0 if a solution passes all tests, 0.1 + 0.6 · fraction of passed tests if it passes any, otherwise the reward of the
    worst fault:

    * 0.0 a wrong answer;
    * −0.1 a runtime error: the program raises an exception, or cannot be loaded;
    * −0.2 a timeout;
    * −0.3 a syntax error in the entry point, or, if a team's solution does not define it, in the code of an agent;
    * −0.5 no code.

    A program can hide a fault by catching its own exceptions or by stopping early. This counts as a wrong answer, which is
    worth less than one passed test.

    Logs `graded_reward/…`: `wrong_answer`, `runtime_error`, `timeouts`, `syntax_error`, `no_code` (shares of the episodes
    with this fault, whether or not some tests passed), `tests_passed`, `tests_total`, `pass_rate`, `solved`.

    Args:
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests.

    Source: the reward of MARCOG.
    """
    solutions = Solutions("graded_reward", prompts, completions, given)
    results = solutions.test()
    rewards: list[float] = []
    faults: list[set[str] | None] = []
    for i, verdict in enumerate(results):
        if verdict.status == "infrastructure":
            rewards.append(InfrastructureFailure(verdict.message))
            faults.append(None)
            continue
        written = replies[i].values() if replies else ()
        found = _faults(solutions.problems[i], solutions.texts[i], written, verdict.tests)
        rewards.append(_reward(verdict, found))
        faults.append(found)
    shares: Components = {
        name: [None if found is None else float(name in found) for found in faults] for name in NONE_PASSED
    }
    solutions.log(shares | test_components(results))
    return rewards


def _reward(verdict: Verdict, faults: set[str]) -> float:
    if verdict.passed == verdict.total:
        return ALL_PASSED
    if verdict.passed:
        return SOME_PASSED + PER_PASSED * verdict.passed / verdict.total
    return min(NONE_PASSED[name] for name in faults)


def _faults(
    problem: Mapping[str, Any], solution: str, replies: Iterable[str], tests: tuple[TestResult, ...]
) -> set[str]:
    """The faults of a solution. If its code is not complete, the results of the tests do not count."""
    entry_point, found = problem.get("entry_point"), code_in(problem, solution)
    is_defined = defines(found, entry_point) if entry_point else bool(found)
    # Code of agents that does not parse is not part of the solution
    texts = [solution] if is_defined else [solution, *replies]
    if any(error_in(problem, text) is not None for text in texts):
        return {"syntax_error"}
    return {_cause(result) for result in tests if result.status not in ("passed", "skipped")} if found else {"no_code"}


def _cause(result: TestResult) -> str:
    if result.status == "timeout":
        return "timeouts"
    return "runtime_error" if result.raised or result.status == "error" else "wrong_answer"
