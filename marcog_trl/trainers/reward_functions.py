"""Reward functions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marcog_trl.checks import nearest
from marcog_trl.rewards import REWARD_NAMES, make_reward
from marcog_trl.team.base_models import check_model
from marcog_trl.workflows.from_file import names_file


def reward_functions(given: Any, optional: bool = False) -> list[Any]:
    """Returns the reward functions of a trainer as a list, with this package's rewards in place of their names."""
    given = given if isinstance(given, list) else [given] if given else []
    if not given and not optional:
        raise ValueError("reward_funcs is missing. Pass 'execution_reward', or a function that takes completions.")
    return [named_reward(func) for func in given]


def named_reward(reward_func):
    """
    Returns the reward of this package with a name, or the function that a name such as `my_reward.py:shortest` names. Hub ids,
    paths and functions are returned unchanged.

    Raises:
        ValueError: If a name without a slash is neither a reward of this package nor a model, or a file cannot be used.
    """
    if isinstance(reward_func, str) and names_file(reward_func):
        return make_reward(reward_func)
    if isinstance(reward_func, str) and "/" not in reward_func and not Path(reward_func).exists():
        try:
            return make_reward(reward_func)
        except ValueError as unknown:
            if nearest(reward_func, REWARD_NAMES):
                raise
            try:
                check_model("reward_funcs", reward_func, tokenizer=False)
            except ValueError as error:
                raise ValueError(f"{unknown} It is not a reward model either: {error}") from error
    if isinstance(reward_func, type) or not (callable(reward_func) or isinstance(reward_func, str)):
        raise TypeError(
            f"reward_funcs has {reward_func!r}, which is not a reward. Pass a function that takes completions, a reward model, or "
            "a name such as 'execution_reward'."
        )
    return reward_func
