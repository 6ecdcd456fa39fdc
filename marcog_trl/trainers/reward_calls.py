"""
Calls of reward functions: what they need and are told, what they may answer, and when a call is given up.

Knows nothing about what becomes of an episode without a reward.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from marcog_trl.rewards import make_reward
from marcog_trl.rollout import Episode


class TimedCall:
    """
    A reward function with a limit on the time that a call may take.

    A function runs in a thread of its own. Python cannot end a thread: a call that is given up runs on, what it logs is
    dropped, and until it returns further calls fail at once, so that a function that hangs holds one thread and no more. A
    call that does not release Python's lock, such as a runaway regular expression, is waited for; `signal.alarm` does not
    work outside of the main thread. An async function is cancelled at its next `await`.

    Args:
        name (`str`): What errors call the function.
        func (`Callable`): The function, or a coroutine function.
        timeout (`float`, *optional*): Seconds. `None` calls the function as it is.

    Raises:
        TimeoutError: By a call that takes longer.
    """

    def __init__(self, name: str, func: Callable, timeout: float | None):
        self.name, self.func, self.timeout = name, func, timeout
        self.given_up: Future | None = None

    def __call__(self, **kwargs: Any) -> Any:
        if self.timeout is None:
            return self.func(**kwargs)
        if self.given_up is not None and not self.given_up.done():
            raise TimeoutError(
                f"reward function {self.name!r} has not returned from a call that took longer than "
                f"reward_timeout={self.timeout} seconds, and is not called again before it has"
            )
        logged: list[tuple[Callable, tuple, dict]] = []
        for name in ("log_extra", "log_metric"):
            kwargs[name] = functools.partial(self._note, logged, kwargs[name])
        future: Future = Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                future.set_result(context.run(self.func, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        # Not of a thread pool, which the interpreter would wait for when it ends
        threading.Thread(target=run, name=f"reward-{self.name}", daemon=True).start()
        try:
            output = future.result(self.timeout)
        except TimeoutError:
            if future.done():
                raise  # the function's own
            self.given_up = future
            raise self._late() from None
        for log, args, named in logged:
            log(*args, **named)
        return output

    async def call_async(self, **kwargs: Any) -> Any:
        """As a call, for coroutine functions."""
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await self.func(**kwargs)
        except TimeoutError:
            if limit.expired():
                raise self._late() from None
            raise

    @staticmethod
    def _note(logged: list, log: Callable, *args: Any, **named: Any) -> None:
        logged.append((log, args, named))

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"reward function {self.name!r} took longer than reward_timeout={self.timeout} seconds; a longer one, or "
            "on_reward_error='mask', works"
        )


def reward_inputs(episode: Episode, turn: int) -> tuple[dict[str, Any], Any]:
    """
    What reward functions are told of a turn, as TRL takes it.

    Args:
        episode ([`Episode`]): The episode.
        turn (`int`): Turn that it had, counted from 0.

    Returns:
        `tuple`: The row: `prompt`, the problem's other columns, and what the turn adds; and the completion, which is text, or
        chat messages where the prompt is.
    """
    this, before = episode.turns[turn], episode.turns[turn - 1] if turn else None
    columns = {
        **episode.problem,
        "replies": this.replies,
        "turn": turn,
        "verdicts": this.verdicts,
        "previous_solution": None if before is None else before.solution,
        "previous_verdicts": [] if before is None else before.verdicts,
    }
    conversational = not isinstance(episode.problem["prompt"], str)
    return columns, [{"role": "assistant", "content": this.solution}] if conversational else this.solution


def named_reward(reward_func):
    """The reward function of a name of this package; everything else, Hub ids and paths included, is left to TRL."""
    if isinstance(reward_func, str) and "/" not in reward_func and not Path(reward_func).exists():
        return make_reward(reward_func)
    return reward_func


def _unwrap(func: Callable) -> Callable:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def needs(reader, what: str) -> bool:
    """Whether a workflow or a reward function needs the `"tests"`, or the `"entry_point"`, of every problem."""
    return bool(getattr(_unwrap(reader), f"needs_{what}", False))


def wants_executor(reward_func: Callable) -> bool:
    """Whether a reward function is called with `executor`: where it runs tests, or has a parameter of that name."""
    return needs(reward_func, "tests") or "executor" in inspect.signature(reward_func).parameters


def check_rewards(name: str, output: Any, expected: int, agents: list[str]) -> list[float | dict[str, float] | None]:
    """
    One reward per episode: a float, a dict agent -> float, or `None`.

    Raises:
        ValueError: If the reward function returned something else, another number of rewards, NaN or infinity.
    """
    if not isinstance(output, Iterable):
        raise ValueError(f"reward function {name!r} returned {output!r}; a list of {expected} rewards works")
    rewards = list(output)
    if len(rewards) != expected:
        raise ValueError(f"reward function {name!r} returned {len(rewards)} rewards for {expected} episodes")
    checked: list[float | dict[str, float] | None] = []
    for i, reward in enumerate(rewards):
        try:
            if reward is None:
                checked.append(None)
                continue
            if isinstance(reward, str):
                raise TypeError
            numbers = {agent: float(reward[agent]) for agent in agents} if isinstance(reward, dict) else float(reward)
        except (KeyError, TypeError, ValueError):
            numbers = None
        if numbers is None or (isinstance(reward, dict) and len(reward) != len(agents)):
            raise ValueError(
                f"reward function {name!r} returned {reward!r} for episode {i}; a float, or one for each of {agents}, works"
            )
        for number in numbers.values() if isinstance(numbers, dict) else [numbers]:
            if not math.isfinite(number):
                shown = "NaN" if math.isnan(number) else number
                raise ValueError(f"reward function {name!r} returned {shown} for episode {i}; None masks an episode")
        checked.append(numbers)
    return checked
