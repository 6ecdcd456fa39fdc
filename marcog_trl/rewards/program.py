"""Reward that programs give themselves."""

from __future__ import annotations

from typing import Any


def program_reward(*, advice: list[list[Any]], replies: list[dict[str, str]], **given: Any) -> list[Any]:
    """
    The rewards that a [`~marcog_trl.Program`] returned beside its solution.

    Args:
        advice (`list[list]` of length E): What the episodes' workflows received from outside; the last one is the
            program's result.
        replies (`list[dict[str, str]]` of length E): Replies of the agents.
        **given: Other arguments of rewards, which are not used.

    Returns:
        `list` of length E: A float, a float for each agent (0 for those that the program left out), or `None` where it
        returned no rewards.

    Raises:
        ValueError: If the program names an unknown agent.
    """
    return [getattr(answers[-1], "rewards", None) if answers else None for answers in advice]
