"""Estimators shared by metrics. This module does not import `evaluate`."""

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any


_Z = 1.959964  # of a normal distribution's 95 %


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
        ValueError: If `k` is not a list of integers from 1 to `most`.
    """
    if k is None:
        return [size for size in (1, 5, 10) if size <= most]
    sizes = list(k) if isinstance(k, Iterable) else []
    if not sizes or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ValueError(f"k={k!r} must be a list of whole numbers. Set k=[1], for example.")
    for size in sizes:
        if not 1 <= size <= most:
            raise ValueError(
                f"k={sizes} has {size}, which is not in 1 to {most}, the number of samples. Set k={[most]}, for example."
            )
    return [int(size) for size in sizes]


def share_interval(values: Sequence[float], num_samples: int | None = None) -> tuple[float, float]:
    """
    Wilson's interval at 95 % of a share that was measured on independent problems, each with one or several samples.

    Samples of a problem are alike, so the interval is that of as many independent samples as have the same standard error:
    `n_eff = p (1 − p) / SE²`, with the standard error over problems. It is at least the number of problems, which it also is
    where no sample or every sample succeeds, and at most the number of samples.

    Args:
        values (`Sequence[float]` of length P): Share of every problem, in [0, 1]; P at least 1.
        num_samples (`int`, *optional*): Number of samples of all problems. Defaults to one per problem.

    Returns:
        `tuple[float, float]`: Lower and upper bound, in [0, 1].

    Source: Wilson 1927 (https://doi.org/10.1080/01621459.1927.10502953), with the effective sample size as in Franco et al. 2019
    (https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503).
    """
    problems = len(values)
    share = sum(values) / problems
    variance = share * (1 - share)
    squared_error = sum((value - share) ** 2 for value in values) / max(problems - 1, 1) / problems
    most = problems if num_samples is None else num_samples
    count: float = problems
    if variance:  # otherwise nothing tells how samples of a problem differ
        count = min(max(variance / squared_error if squared_error else math.inf, problems), most)
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(variance / count + _Z**2 / (4 * count**2))
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))
