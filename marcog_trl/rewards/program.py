"""Reward that programs give themselves."""

from __future__ import annotations

from typing import Any


def program_reward(*, advice: list[list[Any]], **given: Any) -> list[Any]:
    """
    The rewards that a [`~marcog_trl.Program`] returned beside its solution.

    Args:
        advice (`list[list]` of length E): What the episodes' workflows received from outside; the last one is the
            program's result.
        **given: Other arguments of rewards, which are not used.

    Returns:
        `list` of length E: A float, a float for each agent (0 for those that the program left out), `None` where it returned
        no rewards, and 0 where it failed.

    Raises:
        ValueError: If the workflow is not a program.
    """
    from marcog_trl.workflows.program_server import Result  # brings a web server

    results = [answers[-1] if answers else None for answers in advice]
    if not all(isinstance(result, Result) for result in results):
        raise ValueError(
            "program_reward needs a program as the workflow. Set workflow to a Program, or use another reward."
        )
    return [result.rewards if result.failure is None else 0.0 for result in results]  # type: ignore[union-attr]
