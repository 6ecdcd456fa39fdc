"""Reward for passed tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.verdicts import (
    Completion,
    log_means,
    problems_of,
    reward_or_failure,
    run_tests,
    test_components,
    text_of,
)


@needs_tests
def execution_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    all_or_nothing: bool = False,
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    Fraction of the tests that a solution passes, in [0, 1].

    Logs `execution_reward/…`: `definition` (share that define the entry point), `syntax` (share without syntax errors),
    `tests_passed`, `tests_total`, `pass_rate`, `solved` (share that pass all tests), `timeouts`.

    Args:
        prompts (`list` of length E): Prompts of the problems.
        completions (`list` of length E): Solutions, as plain text or as messages of the assistant.
        all_or_nothing (`bool`, *optional*, defaults to `False`): Whether to return 1 if all tests pass, else 0.
        verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): Jobs that the workflow executed in
            this turn, and their verdicts.
        turn (`list[int]` of length E, *optional*): Turn of each episode, counted from 0.
        executor (`CodeExecutor`, *optional*): Runs the tests, within its limits. Defaults to the shared executor.
        log_metric (`Callable`, *optional*): `log_metric` of TRL.
        **columns: Columns of the dataset (see `marcog_trl.problems`) and other arguments of the trainer.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests.
    """
    problems = problems_of(prompts, columns)
    solutions = [text_of(completion) for completion in completions]
    results = run_tests(problems, solutions, verdicts, executor)
    rewards = []
    for verdict in results:
        assert verdict is not None
        rate = verdict.passed / verdict.total
        rewards.append(reward_or_failure(verdict, float(rate == 1) if all_or_nothing else rate))

    definition: list[float | None] = []
    syntax: list[float | None] = []
    for problem, solution in zip(problems, solutions, strict=True):
        name, found = problem.get("entry_point"), code_in(problem, solution)
        definition.append(float(defines(found, name) if name else bool(found)))
        syntax.append(float(bool(found) and error_in(problem, solution) is None))
    components = {"definition": definition, "syntax": syntax, **test_components(results)}
    log_means(log_metric, "execution_reward", components, turn)
    return rewards
