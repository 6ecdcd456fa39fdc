"""
Counterfactual credit: what a reply was worth, compared with other replies that were given in the same context.

The worth Q̂ of a reply is its return, averaged over everything that was generated after it. Its baseline does not depend on the
reply: it is a mix of the mean Q̂ of its siblings and the critic's value of their context.
"""

from __future__ import annotations

import torch


def critic_share(variance: torch.Tensor, error: torch.Tensor, siblings: torch.Tensor) -> torch.Tensor:
    """
    Share α of the critic in the baseline that has the smallest error.

    The mean of the other siblings has the variance s = σ² / (f − 1), and the critic the squared error δ². If the errors are
    independent, the best α is s / (s + δ²).

    Args:
        variance (`torch.Tensor`): σ², the variance of Q̂ among siblings.
        error (`torch.Tensor`): δ², the mean squared error of the critic's value of a context, of the same shape.
        siblings (`torch.Tensor`): f, the number of siblings, of the same shape.

    Returns:
        `torch.Tensor`: α in [0, 1], of the same shape. 1 without another sibling, and 0 if siblings do not differ.
    """
    spread = variance / (siblings - 1).clamp(min=1)
    share = spread / (spread + error.clamp(min=0)).clamp(min=torch.finfo(spread.dtype).tiny)
    return torch.where(siblings > 1, share, torch.ones_like(share))


def sibling_moments(
    worth: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, siblings: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Moments from which the share of the critic is estimated, per group of siblings.

    Args:
        worth (`torch.Tensor` of shape `(B,)`): Q̂ of each row, in reward units. Siblings are contiguous.
        values (`torch.Tensor` of shape `(B,)`): The critic's value of the row's context, in reward units.
        mask (`torch.Tensor` of shape `(B,)`): 1 on live rows.
        siblings (`list[int]` of length C): Number of siblings of each group.

    Returns:
        `tuple`: Per group, each `(C,)`: the variance of Q̂ among live siblings (unbiased; 0 with fewer than two), the critic's
        squared error `(mean Q̂ − V)² − variance / f`, which may be negative, and f, the number of live siblings.
    """
    group = torch.arange(len(siblings), device=worth.device).repeat_interleave(
        torch.tensor(siblings, device=worth.device)
    )
    live = mask.to(worth.dtype)

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(siblings), dtype=worth.dtype, device=worth.device).index_add(0, group, x * live)

    count = total(torch.ones_like(worth))
    size = count.clamp(min=1)
    mean, value = total(worth) / size, total(values) / size
    variance = total((worth - mean[group]).square()) / (count - 1).clamp(min=1)
    return variance, (mean - value).square() - variance / size, count
