"""
Reward functions that execute code. They have TRL's signature, and can be used with teams and in TRL's own trainers. See the
README of this folder.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from marcog_trl.rewards.classes import class_reward
from marcog_trl.rewards.collaboration import collaboration_reward
from marcog_trl.rewards.coverage import coverage_reward
from marcog_trl.rewards.delta import delta_reward
from marcog_trl.rewards.divided_work import divided_work_reward
from marcog_trl.rewards.execution import execution_reward
from marcog_trl.rewards.graded import graded_reward
from marcog_trl.rewards.program import program_reward
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure
from marcog_trl.workflows.from_file import load_function, names_file


__all__ = [
    "EpisodeMean",
    "InfrastructureFailure",
    "class_reward",
    "collaboration_reward",
    "coverage_reward",
    "delta_reward",
    "divided_work_reward",
    "execution_reward",
    "graded_reward",
    "make_reward",
    "needs_entry_point",
    "needs_tests",
    "program_reward",
]

_REWARDS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        execution_reward,
        divided_work_reward,
        collaboration_reward,
        coverage_reward,
        graded_reward,
        delta_reward,
        class_reward,
        program_reward,
    )
}


REWARD_NAMES = tuple(_REWARDS)


def make_reward(name: str, **options: Any) -> Callable:
    """
    Get a reward function by its name.

    Args:
        name (`str`): `"execution_reward"`, `"divided_work_reward"`, `"collaboration_reward"`, `"coverage_reward"`,
            `"graded_reward"`, `"delta_reward"`, `"class_reward"` or `"program_reward"`; or a file and a function in it, such as
            `"my_reward.py:shortest"`. The file is run.
        **options: Options of the function, such as `all_or_nothing=True`.

    Returns:
        `Callable`: The function, or a `functools.partial` of it with the options. TRL logs both under the same name.

    Raises:
        ValueError: If the name is unknown, or the file cannot be used.
    """
    if not names_file(name) and name not in _REWARDS:
        raise ValueError(
            f"Reward {name!r} is unknown. Use one of {', '.join(map(repr, _REWARDS))}, or a function of your own, such as "
            "'my_reward.py:shortest'."
        )
    function = load_function(name) if names_file(name) else _REWARDS[name]
    return partial(function, **options) if options else function
