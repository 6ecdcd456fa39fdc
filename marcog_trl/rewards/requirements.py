"""Needs of workflows and reward functions: columns of the dataset, and arguments from the trainer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable


def needs_tests(function: Callable) -> Callable:
    """Mark a reward function that runs the tests of a problem. Datasets without tests raise an error before training."""
    function.needs_tests = True  # type: ignore[attr-defined]
    return function


def needs_hidden_tests(function: Callable) -> Callable:
    """Mark a reward function of the `coverage` workflow. Problems all of whose tests are visible raise an error before training."""
    function.needs_hidden_tests = True  # type: ignore[attr-defined]
    return function


def needs_entry_point(function: Callable) -> Callable:
    """Mark a reward function that uses `entry_point`. Datasets without it raise an error before training."""
    function.needs_entry_point = True  # type: ignore[attr-defined]
    return function


def unwrap(func: Callable) -> Callable:
    """The function inside of `functools.partial`s."""
    while isinstance(func, functools.partial):
        func = func.func
    return func


def needs(reader, what: str) -> bool:
    """
    Whether a workflow or a reward function needs `"tests"`, `"hidden_tests"` or an `"entry_point"` in each problem, or, since it
    reads token ids, its own `"tokenizer"`.
    """
    return bool(getattr(unwrap(reader), f"needs_{what}", False))


def wants_executor(reward_func: Callable) -> bool:
    """Whether to pass `executor` to a reward function: it runs tests, or has a parameter of that name."""
    return needs(reward_func, "tests") or "executor" in inspect.signature(reward_func).parameters
