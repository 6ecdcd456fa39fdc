"""
Reward functions that execute code. They have TRL's signature, and can be used with teams and in TRL's own trainers. See the
README of this folder.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from marcog_trl.rewards.bugfix import bugfix_reward
from marcog_trl.rewards.classes import class_reward
from marcog_trl.rewards.collaboration import collaboration_reward
from marcog_trl.rewards.delta import delta_reward
from marcog_trl.rewards.divided_work import divided_work_reward
from marcog_trl.rewards.execution import execution_reward
from marcog_trl.rewards.graded import graded_reward
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure


__all__ = [
    "EpisodeMean",
    "InfrastructureFailure",
    "bugfix_reward",
    "class_reward",
    "collaboration_reward",
    "delta_reward",
    "divided_work_reward",
    "execution_reward",
    "graded_reward",
    "make_reward",
    "needs_entry_point",
    "needs_tests",
]

_REWARDS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        execution_reward,
        divided_work_reward,
        collaboration_reward,
        graded_reward,
        delta_reward,
        class_reward,
        bugfix_reward,
    )
}


REWARD_NAMES = tuple(_REWARDS)


def make_reward(name: str, **options: Any) -> Callable:
    """
    Get a shipped reward function by its name.

    Args:
        name (`str`): `"execution_reward"`, `"divided_work_reward"`, `"collaboration_reward"`, `"graded_reward"`,
            `"delta_reward"`, `"class_reward"` or `"bugfix_reward"`.
        **options: Options of the function, such as `all_or_nothing=True`.

    Returns:
        `Callable`: The function, or a `functools.partial` of it with the options. TRL logs both under the same name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in _REWARDS:
        raise ValueError(f"Reward {name!r} is unknown. Use one of {', '.join(map(repr, _REWARDS))}.")
    return partial(_REWARDS[name], **options) if options else _REWARDS[name]
