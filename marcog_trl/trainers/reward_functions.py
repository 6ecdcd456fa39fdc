"""Wrappers of reward functions, which TRL calls once per turn with the episodes that have the turn."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from marcog_trl.checks import nearest
from marcog_trl.execution import CodeExecutor
from marcog_trl.rewards import REWARD_NAMES, make_reward
from marcog_trl.rewards.requirements import wants_executor
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure
from marcog_trl.team.base_models import check_model


CALL_COLUMN = "marcog_call"  # column in which TRL passes the record of a call to the reward functions


@dataclass(repr=False)
class ScoringCall:
    """
    One call of all reward functions.

    Args:
        turn (`int`): The turn that is scored.
        playing (`list[int]`): Indices of the episodes that have the turn. Functions get these, in this order.
        by_agent (`dict[tuple[int, int], dict[str, float]]`): Rewards by agent, for each function and position in `playing`.
        missing (`list[tuple[int, int]]`): Positions in `playing` without a reward, each with the function.
        lost (`dict[int, str]`): Why an episode could not be scored, by position in `playing`.
        columns (`dict[str, list]`): Values that functions passed to `log_extra`.
        metrics (`list[tuple[str, float]]`): Values that functions passed to `log_metric`.
        errors (`dict[str, Exception]`): Errors on this process, by what failed.
    """

    turn: int
    playing: list[int]
    by_agent: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    missing: list[tuple[int, int]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    columns: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)

    def metrics_of(self, i: int) -> dict[str, float]:
        """Returns the metrics of the i-th episode, or of the call if a function logs only one value. Omits the turn in names."""
        found = defaultdict(list)
        for name, value in self.metrics:
            of_episode = value.values[i] if isinstance(value, EpisodeMean) else value
            if of_episode is not None:
                found[name.replace(f"/turn_{self.turn + 1}/", "/", 1)].append(of_episode)
        return {name: sum(values) / len(values) for name, values in found.items()}


class LoggedValues:
    """Collects what a reward function logs in one call with `count` episodes."""

    def __init__(self, count: int):
        self.count = count
        self.columns: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []

    def extra(self, column: str, values: list) -> None:
        if len(values) != self.count:
            raise ValueError(
                f"a reward function logged {len(values)} values as {column!r} for {self.count} episodes. Log one value for "
                "each of its completions."
            )
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        of_episodes = isinstance(value, EpisodeMean) and len(value.values) == self.count
        self.metrics.append((name, value if of_episodes else float(value)))


class RewardFunction:
    """
    Wraps a user's reward function. TRL calls the wrapper with all episodes, and it passes on those that have the turn.

    Args:
        index (`int`): Index of the reward function.
        func (`Callable`): The user's function.
        agents (`list[str]`): Names of the agents.
        executor (`Callable`): Returns the executor, for functions that take one.
        timeout (`float`, *optional*): Time limit of a call of a coroutine function, in seconds.
    """

    def __init__(
        self,
        index: int,
        func: Callable,
        agents: list[str],
        executor: Callable[[], CodeExecutor],
        timeout: float | None,
    ):
        self.__name__ = get_callable_name(func)  # TRL logs it under this name
        self._index = index
        self._func = func
        self._agents = agents
        self._executor = executor
        self._timeout = timeout
        self._accepted = _parameters(func)

    def __call__(self, **kwargs: Any) -> list[float]:
        size, (call, *_) = len(kwargs["prompts"]), kwargs.pop(CALL_COLUMN)
        log = LoggedValues(len(call.playing))
        try:
            return self._expand(self._func(**self._select(kwargs, call, log)) if call.playing else [], size, call, log)
        except (Exception, SystemExit) as error:
            return self._fail(error, size, call)

    def _select(self, kwargs: dict[str, Any], call: ScoringCall, log: LoggedValues) -> dict[str, Any]:
        """Returns the arguments of the user's function."""
        size = len(kwargs["prompts"])
        chosen = {
            key: [value[e] for e in call.playing] if isinstance(value, list) and len(value) == size else value
            for key, value in kwargs.items()
        }
        chosen |= {"log_extra": log.extra, "log_metric": log.metric}
        if wants_executor(self._func):
            chosen["executor"] = self._executor()
        return chosen if self._accepted is None else {key: chosen[key] for key in self._accepted & chosen.keys()}

    def _expand(self, output: Any, size: int, call: ScoringCall, log: LoggedValues) -> list[float]:
        """Returns one number per episode, as TRL needs, and stores everything else in the call."""
        rewards = check_rewards(self.__name__, output, len(call.playing), self._agents)
        # An episode without a reward gets 0, which nothing reads: TRL would print a warning for every None
        expanded = [0.0] * size
        for i, (e, reward) in enumerate(zip(call.playing, rewards, strict=True)):
            if reward is None or isinstance(reward, InfrastructureFailure):
                call.missing.append((i, self._index))
                if reward is not None:
                    call.lost[i] = reward.reason
            elif isinstance(reward, dict):
                call.by_agent[self._index, i] = reward
                expanded[e] = sum(reward.values()) / len(reward)
            else:
                expanded[e] = reward
        # Not earlier, so that nothing is logged for a failed call
        call.columns |= log.columns
        call.metrics += log.metrics
        return expanded

    def _fail(self, error: Exception | SystemExit, size: int, call: ScoringCall) -> list[float]:
        name = f"reward function {self.__name__!r}"
        if isinstance(error, SystemExit):  # the other processes would wait for this one
            error = RuntimeError(f"{name} called exit: {error!r}").with_traceback(error.__traceback__)
        call.errors[name] = error
        return [0.0] * size  # not used


class AsyncRewardFunction(RewardFunction):
    """Wraps a coroutine function. A call that takes longer than `timeout` is cancelled at its next `await`."""

    async def __call__(self, **kwargs: Any) -> list[float]:  # type: ignore[override]
        size, (call, *_) = len(kwargs["prompts"]), kwargs.pop(CALL_COLUMN)
        log = LoggedValues(len(call.playing))
        try:
            output = await self._limited(self._select(kwargs, call, log)) if call.playing else []
            return self._expand(output, size, call, log)
        except (Exception, SystemExit) as error:
            return self._fail(error, size, call)

    async def _limited(self, arguments: dict[str, Any]) -> Any:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._func(**arguments)
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the function itself
            raise TimeoutError(
                f"reward function {self.__name__!r} took longer than reward_timeout={self._timeout} seconds. Set a longer "
                "reward_timeout, or on_reward_error='mask' to exclude such episodes."
            ) from None


def wrap_rewards(
    reward_funcs: list, agents: list[str], executor: Callable[[], CodeExecutor], timeout: float | None
) -> list[Any]:
    """
    Wraps reward functions for TRL. Reward models stay as they are.

    Raises:
        ValueError: If there is a `timeout`, but no coroutine function.
    """
    if timeout is not None and not any(is_async_callable(func) for func in reward_funcs):
        raise ValueError(
            f"reward_timeout={timeout} limits only coroutine functions, and there is none. Write the reward as `async def`, or "
            "limit its time inside the function. Rewards that run tests have execution_timeout."
        )

    def wrap(index: int, func: Any) -> Any:
        if is_reward_model(func):
            return func
        kind = AsyncRewardFunction if is_async_callable(func) else RewardFunction
        return kind(index, func, agents, executor, timeout)

    return [wrap(index, func) for index, func in enumerate(reward_funcs)]


def reward_functions(given: Any, optional: bool = False) -> list[Any]:
    """Returns the reward functions of a trainer as a list, with this package's rewards in place of their names."""
    given = given if isinstance(given, list) else [given] if given else []
    if not given and not optional:
        raise ValueError("reward_funcs is missing. Pass 'execution_reward', or a function that takes completions.")
    return [named_reward(func) for func in given]


def named_reward(reward_func):
    """
    Returns the reward of this package with a name. Hub ids, paths and functions are returned unchanged.

    Raises:
        ValueError: If a name without a slash is neither a reward of this package nor a model.
    """
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


def is_reward_model(reward_func: Any) -> bool:
    """Whether it is a reward model, or TRL loads one from it."""
    return isinstance(reward_func, torch.nn.Module | str)


def _parameters(reward_func: Callable) -> set[str] | None:
    """Returns the names of a reward function's arguments, or `None` if it has `**kwargs`."""
    parameters = inspect.signature(reward_func).parameters.values()
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def check_rewards(name: str, output: Any, expected: int, agents: list[str]) -> list[float | dict[str, float] | None]:
    """
    Checks a reward function's output: per episode a float, a dict (agent -> float), an [`InfrastructureFailure`] or `None`. NaN is
    `None`, as in TRL: the reward does not apply.

    Raises:
        ValueError: If the output is something else, has another length, or contains infinity, or NaN for one of the agents.
    """
    if not isinstance(output, Iterable):
        raise ValueError(f"reward function {name!r} returned {output!r}. It must return a list of {expected} rewards.")
    rewards = list(output)
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} returned {len(rewards)} rewards for {expected} episodes. It must return one per "
            "episode."
        )
    checked: list[float | dict[str, float] | None] = []
    for i, reward in enumerate(rewards):
        if reward is None or isinstance(reward, InfrastructureFailure):
            checked.append(reward)
            continue
        try:
            if isinstance(reward, str):
                raise TypeError
            numbers = {agent: float(reward[agent]) for agent in agents} if isinstance(reward, dict) else float(reward)
        except (KeyError, TypeError, ValueError):
            numbers = None
        if numbers is None or (isinstance(reward, dict) and len(reward) != len(agents)):
            raise ValueError(
                f"reward function {name!r} returned {reward!r} for episode {i}. Return a float, None, or a dict with a float "
                f"for each of {agents}."
            )
        if isinstance(numbers, float) and math.isnan(numbers):
            numbers = None
        for number in numbers.values() if isinstance(numbers, dict) else [numbers or 0.0]:
            if not math.isfinite(number):
                shown = "NaN" if math.isnan(number) else number
                raise ValueError(
                    f"reward function {name!r} returned {shown} for episode {i}. Return None if the reward does not apply."
                )
        checked.append(numbers)
    return checked
