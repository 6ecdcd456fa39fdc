"""Reward for the increase in passed tests since the turn before."""

from __future__ import annotations

from math import isnan
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import Job, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.rewards.solutions import Completion, Components, Solutions, passed_share, test_components


@needs_tests
def delta_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    previous_solution: list[str | None] | None = None,
    previous_verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    **given: Any,
) -> list[float]:
    """
    Fraction of the tests that the solution passes, minus that of the turn before, in [-1, 1]. In the first turn, and in
    trainers without turns, the fraction itself. The rewards of an episode sum to the fraction of its last turn.

    Logs `delta_reward/…`: `improved`, `worsened` (shares of the episodes), and of this turn `tests_passed`, `tests_total`,
    `pass_rate`, `solved`, `timeouts`.

    Args:
        prompts, completions, **given: See [`execution_reward`].
        previous_solution (`list[str | None]` of length E, *optional*): Solutions of the turn before; `None` in the first
            turn.
        previous_verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): Jobs that were executed in the turn
            before, and their verdicts.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed for one of the two solutions.

    Raises:
        ValueError: If the dataset has no tests.
    """
    solutions = Solutions("delta_reward", prompts, completions, given)
    before = [
        None if text is None else solution_job(problem, text)
        for problem, text in zip(solutions.problems, previous_solution or [None] * len(prompts), strict=True)
    ]
    results = solutions.run([*solutions.jobs, *before], previous_verdicts or ())
    now, previous = results[: len(prompts)], results[len(prompts) :]
    rewards = [_reward(*map(passed_share, pair)) for pair in zip(now, previous, strict=True)]
    changes: Components = {
        "improved": [None if isnan(reward) else float(reward > 0) for reward in rewards],
        "worsened": [None if isnan(reward) else float(reward < 0) for reward in rewards],
    }
    solutions.log(changes | test_components(now))
    return rewards


def _reward(now: float, before: float) -> float:
    """The difference, or the failure among the two."""
    return next((share for share in (now, before) if isnan(share)), now - before)
