"""
Calls of reward functions that are given up after a while.

Knows nothing about what rewards are, nor about what becomes of an episode without any.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
