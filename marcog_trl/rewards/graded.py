"""Reward in grades, from no code to all tests passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, TestResult, Verdict
from marcog_trl.parsing.extract import extract_code, syntax_error
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.prompts import context_of
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.values import InfrastructureFailure
from marcog_trl.rewards.verdicts import Completion, judge, log_means, problems_of, test_components, text_of


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
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    1.0 if a solution passes all tests; 0.1 + 0.6 · the fraction that it passes if it passes any; otherwise the worst of
    what happened:

    * 0.0 a wrong answer;
    * −0.1 a runtime error: an exception came out of the program, or it could not be loaded;
    * −0.2 a timeout;
    * −0.3 a syntax error: the code asked for does not parse as a whole, or, where a team's solution does not define it,
      the code of one of the agents;
    * −0.5 no code.

    A program can hide what went wrong, by catching its own exceptions or stopping early; it then has given a wrong answer,
    which is worth less than one test that passes.

    Logs `graded_reward/…`: `wrong_answer`, `runtime_error`, `timeouts`, `syntax_error`, `no_code` (shares of the episodes
    to which it happened, whether or not some tests passed), `tests_passed`, `tests_total`, `pass_rate`, `solved`.

    Args:
        prompts (`list` of length E): The problems' prompts.
        completions (`list` of length E): Solutions, as plain text or as the assistant's messages.
        replies (`list[dict[str, str]]` of length E, *optional*): What each agent wrote.
        verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): What the workflow has executed in this turn.
        turn (`list[int]` of length E, *optional*): Turn of the episodes, counted from 0.
        executor (`CodeExecutor`, *optional*): Runs the tests. Defaults to the process-wide one; its limits hold.
        log_metric (`Callable`, *optional*): TRL's hook for scalar metrics.
        **columns: The dataset's columns (see `marcog_trl.problems`), and whatever else the trainer passes.

    Returns:
        `list[float]` of length E: [`InfrastructureFailure`] where the executor failed, not the solution.

    Raises:
        ValueError: If the dataset has no tests.

    Source: the reward of MARCOG.
    """
    problems = problems_of(prompts, columns)
    solutions = [text_of(completion) for completion in completions]
    results = judge(problems, solutions, verdicts, executor)
    rewards: list[float] = []
    happened: list[set[str] | None] = []
    for i, verdict in enumerate(results):
        assert verdict is not None
        if verdict.status == "infrastructure":
            happened.append(None)
            rewards.append(InfrastructureFailure(verdict.message))
            continue
        what = _happened(problems[i], solutions[i], (replies[i] if replies else {}).values(), verdict.tests)
        happened.append(what)
        if verdict.passed == verdict.total:
            rewards.append(ALL_PASSED)
        elif verdict.passed:
            rewards.append(SOME_PASSED + PER_PASSED * verdict.passed / verdict.total)
        else:
            rewards.append(min(NONE_PASSED[name] for name in what))

    components: dict[str, list[float | None]] = {
        name: [None if names is None else float(name in names) for names in happened] for name in NONE_PASSED
    }
    log_means(log_metric, "graded_reward", components | test_components(results), turn)
    return rewards


def _happened(
    problem: Mapping[str, Any], solution: str, replies: Iterable[str], tests: tuple[TestResult, ...]
) -> set[str]:
    """What went wrong. Where there is no whole code, what executing the rest came to says nothing."""
    entry_point, context = problem.get("entry_point"), context_of(problem)
    found = extract_code(solution, entry_point, context)
    is_defined = defines(found, entry_point) if entry_point else bool(found)
    # What a team's agents wrote in vain is not in its solution any more
    texts = [solution] if is_defined else [solution, *replies]
    if any(syntax_error(text, entry_point, context) is not None for text in texts):
        return {"syntax_error"}
    return {_cause(result) for result in tests if result.status not in ("passed", "skipped")} if found else {"no_code"}


def _cause(result: TestResult) -> str:
    if result.status == "timeout":
        return "timeouts"
    return "runtime_error" if result.raised or result.status == "error" else "wrong_answer"
