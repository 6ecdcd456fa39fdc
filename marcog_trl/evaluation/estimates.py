"""Estimators that metrics share. Nothing here imports `evaluate`."""

import math
import numbers
from collections.abc import Iterable
from typing import Any


def estimate_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """
    Probability that at least one of k samples solves a problem, without bias: `1 - C(n - c, k) / C(n, k)`.

    Whole numbers are subtracted and divided once, so that nothing is lost to rounding, however many samples there are.

    Args:
        num_samples (`int`): n, samples of the problem.
        num_correct (`int`): c, those that solve it.
        k (`int`): Samples that one may choose from, from 1 to n.

    Returns:
        `float`: pass@k of the problem, in [0, 1].

    Raises:
        ValueError: If k is not in 1 to n, or c not in 0 to n.

    Source: Chen et al. 2021 (https://huggingface.co/papers/2107.03374), eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} is not in 1 to {num_samples}, the number of samples; k={max(1, num_samples)} works")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} is not in 0 to num_samples={num_samples}; {num_samples} works")
    choices = math.comb(num_samples, k)
    return (choices - math.comb(num_samples - num_correct, k)) / choices


def which_k(k: Any, most: int) -> list[int]:
    """
    Which pass@k a user asks for; by default those of 1, 5 and 10 up to `most`.

    Raises:
        ValueError: If it is no list of whole numbers.
    """
    if k is None:
        return [size for size in (1, 5, 10) if size <= most]
    sizes = list(k) if isinstance(k, Iterable) else []
    if not sizes or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ValueError(f"k={k!r} is no list of whole numbers; k=[1] works")
    return [int(size) for size in sizes]
