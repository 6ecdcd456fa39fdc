"""Reward for passing more tests than the turn before."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.values import InfrastructureFailure
from marcog_trl.rewards.verdicts import Completion, judge, log_means, problems_of, test_components, text_of


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
    Fraction of the tests that a turn's solution passes minus that of the turn before, in [-1, 1]; in the first turn, and in
    trainers without turns, the fraction itself. Over an episode these add up to the fraction of its last turn.

    Logs `delta_reward/…`: `improved`, `worsened` (shares), `tests_passed`, `tests_total`, `pass_rate`, `solved`, `timeouts`
    (of this turn).

    Args:
        prompts (`list` of length E): The problems' prompts.
        completions (`list` of length E): Solutions, as plain text or as the assistant's messages.
        verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): What the workflow has executed in this turn.
        previous_solution (`list[str | None]` of length E, *optional*): Solutions of the turn before; `None` in the first.
        previous_verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): What has been executed of them.
        turn (`list[int]` of length E, *optional*): Turn of the episodes, counted from 0.
        executor (`CodeExecutor`, *optional*): Runs the tests. Defaults to the process-wide one; its limits hold.
        log_metric (`Callable`, *optional*): TRL's hook for scalar metrics.
        **columns: The dataset's columns (see `marcog_trl.problems`), and whatever else the trainer passes.

    Returns:
        `list[float]` of length E: [`InfrastructureFailure`] where the executor failed on either solution.

    Raises:
        ValueError: If the dataset has no tests.
    """
    problems = problems_of(prompts, columns)
    solutions = [text_of(completion) for completion in completions]
    before = [None] * len(solutions) if previous_solution is None else previous_solution
    known = [*(verdicts or []), *(previous_verdicts or [])]
    results = judge([*problems, *problems], [*solutions, *before], known, executor)
    now, previous = results[: len(solutions)], results[len(solutions) :]
    rewards = [_reward(verdict, earlier) for verdict, earlier in zip(now, previous, strict=True)]
    components: dict[str, list[float | None]] = {
        "improved": [None if isnan(reward) else float(reward > 0) for reward in rewards],
        "worsened": [None if isnan(reward) else float(reward < 0) for reward in rewards],
    }
    log_means(log_metric, "delta_reward", components | test_components(now), turn)
    return rewards


def _reward(*verdicts: Verdict | None) -> float:
    """Difference of the fractions of tests that pass, 0 where nothing was to be executed."""
    for verdict in verdicts:
        if verdict is not None and verdict.status == "infrastructure":
            return InfrastructureFailure(verdict.message)
    now, before = (0.0 if verdict is None else verdict.passed / verdict.total for verdict in verdicts)
    return now - before
