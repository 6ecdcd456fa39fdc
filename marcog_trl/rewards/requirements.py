"""What workflows and reward functions ask of a dataset and of the trainer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable


def needs_tests(function: Callable) -> Callable:
    """Marks a reward function that executes the tests of a problem: a dataset without them is refused before training."""
    function.needs_tests = True  # type: ignore[attr-defined]
    return function


def needs_entry_point(function: Callable) -> Callable:
    """Marks a reward function that looks for the function asked for: a dataset that does not name it is refused."""
    function.needs_entry_point = True  # type: ignore[attr-defined]
    return function


def unwrap(func: Callable) -> Callable:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def needs(reader, what: str) -> bool:
    """Whether a workflow or a reward function needs the `"tests"`, or the `"entry_point"`, of every problem."""
    return bool(getattr(unwrap(reader), f"needs_{what}", False))


def wants_executor(reward_func: Callable) -> bool:
    """Whether a reward function is called with `executor`: where it runs tests, or has a parameter of that name."""
    return needs(reward_func, "tests") or "executor" in inspect.signature(reward_func).parameters
