"""Reward for the increase in passed tests since the turn before."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.values import InfrastructureFailure
from marcog_trl.rewards.verdicts import Completion, log_means, problems_of, run_tests, test_components, text_of


@needs_tests
def delta_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    previous_solution: list[str | None] | None = None,
    previous_verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    Fraction of the tests that the solution passes, minus that of the turn before, in [-1, 1]. In the first turn, and in
    trainers without turns, the fraction itself. The rewards of an episode sum to the fraction of its last turn.

    Logs `delta_reward/…`: `improved`, `worsened` (shares of the episodes), and of this turn `tests_passed`, `tests_total`,
    `pass_rate`, `solved`, `timeouts`.

    Args:
        prompts, completions, verdicts, turn, executor, log_metric, **columns: See [`execution_reward`].
        previous_solution (`list[str | None]` of length E, *optional*): Solutions of the turn before; `None` in the first
            turn.
        previous_verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): Jobs that were executed in the turn
            before, and their verdicts.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed for one of the two solutions.

    Raises:
        ValueError: If the dataset has no tests.
    """
    problems = problems_of(prompts, columns)
    solutions = [text_of(completion) for completion in completions]
    before = [None] * len(solutions) if previous_solution is None else previous_solution
    known = [*(verdicts or []), *(previous_verdicts or [])]
    results = run_tests([*problems, *problems], [*solutions, *before], known, executor)
    now, previous = results[: len(solutions)], results[len(solutions) :]
    rewards = [_reward(verdict, earlier) for verdict, earlier in zip(now, previous, strict=True)]
    components: dict[str, list[float | None]] = {
        "improved": [None if isnan(reward) else float(reward > 0) for reward in rewards],
        "worsened": [None if isnan(reward) else float(reward < 0) for reward in rewards],
    }
    log_means(log_metric, "delta_reward", components | test_components(now), turn)
    return rewards


def _reward(*verdicts: Verdict | None) -> float:
    """Difference of the fractions of passed tests of two verdicts; the fraction is 0 if nothing was executed."""
    for verdict in verdicts:
        if verdict is not None and verdict.status == "infrastructure":
            return InfrastructureFailure(verdict.message)
    now, before = (0.0 if verdict is None else verdict.passed / verdict.total for verdict in verdicts)
    return now - before
