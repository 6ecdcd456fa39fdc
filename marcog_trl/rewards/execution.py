"""Reward for passed tests."""

from __future__ import annotations

from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.solutions import Completion, Solutions, or_failure, test_components


@needs_tests
def execution_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    all_or_nothing: bool = False,
    **given: Any,
) -> list[float]:
    """
    Fraction of the tests that a solution passes, in [0, 1].

    Logs `execution_reward/…`: `definition` (share that define the entry point), `syntax` (share without syntax errors),
    `tests_passed`, `tests_total`, `pass_rate`, `solved` (share that pass all tests), `timeouts`.

    Args:
        prompts (`list` of length E): Prompts of the problems.
        completions (`list` of length E): Solutions, as plain text or as messages of the assistant.
        all_or_nothing (`bool`, *optional*, defaults to `False`): Whether to return 1 if all tests pass, else 0.
        **given: Columns of the dataset (see `marcog_trl.problems`), and what trainers pass, all optional: `verdicts`
            (`list[list[tuple[Job, Verdict]]]` of length E), the jobs that the workflow executed in this turn, and their verdicts;
            `turn` (`list[int]` of length E), counted from 0; `executor` ([`CodeExecutor`]), which runs the tests within its
            limits, by default the one that all callers in a process share; TRL's `log_metric`.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests.
    """
    solutions = Solutions("execution_reward", prompts, completions, given)
    results = solutions.test()
    rewards = [
        or_failure(
            verdict, float(verdict.passed == verdict.total) if all_or_nothing else verdict.passed / verdict.total
        )
        for verdict in results
    ]
    definition: list[float | None] = []
    syntax: list[float | None] = []
    for problem, text in zip(solutions.problems, solutions.texts, strict=True):
        name, found = problem.get("entry_point"), code_in(problem, text)
        definition.append(float(defines(found, name) if name else bool(found)))
        syntax.append(float(bool(found) and error_in(problem, text) is None))
    solutions.log({"definition": definition, "syntax": syntax, **test_components(results)})
    return rewards
