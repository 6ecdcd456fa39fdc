"""Estimators shared by metrics. This module does not import `evaluate`."""

import math
import numbers
from collections.abc import Iterable
from typing import Any


def estimate_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """
    Unbiased estimate of the probability that at least one of k samples solves a problem: `1 - C(n - c, k) / C(n, k)`.

    Subtracts integers and divides once, so the result is exact up to one rounding for any number of samples.

    Args:
        num_samples (`int`): n, number of samples of the problem.
        num_correct (`int`): c, number of samples that solve it.
        k (`int`): Number of samples drawn, from 1 to n.

    Returns:
        `float`: pass@k of the problem, in [0, 1].

    Raises:
        ValueError: If k is not in 1 to n, or c is not in 0 to n.

    Source: Chen et al. 2021 (https://huggingface.co/papers/2107.03374), eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must be from 1 to num_samples={num_samples}. Set k={max(1, num_samples)}.")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"num_correct={num_correct} must be from 0 to num_samples={num_samples}. Count each sample once."
        )
    choices = math.comb(num_samples, k)
    return (choices - math.comb(num_samples - num_correct, k)) / choices


def which_k(k: Any, most: int) -> list[int]:
    """
    Returns the values of k to report. The default is 1, 5 and 10, without those above `most`.

    Raises:
        ValueError: If `k` is not a list of integers.
    """
    if k is None:
        return [size for size in (1, 5, 10) if size <= most]
    sizes = list(k) if isinstance(k, Iterable) else []
    if not sizes or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ValueError(f"k={k!r} must be a list of whole numbers. Set k=[1], for example.")
    return [int(size) for size in sizes]
