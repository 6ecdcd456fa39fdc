"""
Advantages, returns and the critic's loss, as pure tensor functions.

For statistics over all processes, the caller passes a function that sums a tensor over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


SumOverProcesses = Callable[[torch.Tensor], torch.Tensor]
Baseline = Literal["mean", "rloo", "max", "none"]


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    next_row: torch.Tensor | None = None,
    gamma_turn: float | torch.Tensor = 1.0,
    lam_turn: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalised advantage estimation over the tokens that the policy wrote, across the rows of an agent.

    Positions where `mask` is 0 are skipped. After the last live token of a row, the recursion continues at the first live
    token of `next_row`, with `gamma_turn` and `lam_turn` instead of `gamma` and `lam`. The value after the last row of a
    chain is 0, even if the row is truncated.

    Args:
        rewards (`torch.Tensor` of shape `(B, T)`): Reward of each token, in reward units.
        values (`torch.Tensor` of shape `(B, T)`): Estimate of the critic before each token, in reward units.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens, which the policy wrote.
        gamma (`float`, *optional*, defaults to `1.0`): Discount per token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`): λ of GAE within a row, in [0, 1].
        next_row (`torch.Tensor` of shape `(B,)`, *optional*): Index of the agent's next row with live tokens in the same
            episode, or -1. Rows are not chained by default. Ignored for rows without live tokens.
        gamma_turn (`float` or `torch.Tensor` of shape `(B,)`, *optional*, defaults to `1.0`): Discount from a row to the
            next, in [0, 1].
        lam_turn (`float`, *optional*, defaults to `lam`): λ of GAE from a row to the next, in [0, 1].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: advantages and returns (advantages plus values), both `(B, T)`, zero where
        `mask` is 0.

    Raises:
        ValueError: If `next_row` leads in a circle.

    Source: Schulman et al. 2016 (https://huggingface.co/papers/1506.02438), eq. 16.
    """
    length = mask.bool().sum(dim=1)
    # Move the live tokens of a row to its front, so that the token after a gap is a neighbour
    order = torch.argsort((~mask.bool()).int(), dim=1, stable=True)
    front = torch.arange(mask.shape[1], device=mask.device) < length[:, None]
    zero = values.new_zeros(())
    value = torch.where(front, values.gather(1, order), zero)
    reward = torch.where(front, rewards.to(values.dtype).gather(1, order), zero)
    delta = reward + gamma * F.pad(value[:, 1:], (0, 1)) - value
    advantage = _discounted_sum(delta, gamma * lam)
    if next_row is not None:
        lam_turn = lam if lam_turn is None else lam_turn
        tail = _tails(value, advantage, length, gamma * lam, next_row, gamma_turn, lam_turn)
        tokens_after = (length[:, None] - 1 - torch.arange(mask.shape[1], device=mask.device)).clamp(min=0)
        advantage = advantage + (gamma * lam) ** tokens_after.to(values.dtype) * tail[:, None]

    def restore(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).scatter(1, order, torch.where(front, x, zero))

    return restore(advantage), restore(advantage + value)


def _discounted_sum(x: torch.Tensor, discount: float) -> torch.Tensor:
    """`y_t = x_t + discount · y_{t+1}` along the last dimension, in log2(T) steps that double the span."""
    span = 1
    while span < x.shape[-1]:
        x = x + discount**span * F.pad(x[..., span:], (0, span))
        span *= 2
    return x


def _tails(
    value: torch.Tensor,
    advantage: torch.Tensor,
    length: torch.Tensor,
    trace: float,
    next_row: torch.Tensor,
    gamma_turn: float | torch.Tensor,
    lam_turn: float,
) -> torch.Tensor:
    """Contribution of later rows to the last live token of each row, `(B,)`, in one pass per row of the longest chain."""
    linked = (next_row >= 0) & (length > 0)
    target = next_row.clamp(min=0)
    depth, reached = 0, torch.where(linked, target, -1)
    while bool((reached >= 0).any()):
        depth += 1
        if depth > len(next_row):
            raise ValueError("next_row leads in a circle. End every chain of rows with -1.")
        following = reached.clamp(min=0)
        reached = torch.where((reached >= 0) & linked[following], target[following], -1)

    first_value, first_advantage = value[:, 0], advantage[:, 0]
    first_decay = trace ** (length - 1).clamp(min=0).to(value.dtype)
    tail = torch.zeros_like(first_value)
    for _ in range(depth):
        ahead = first_value + lam_turn * (first_advantage + first_decay * tail)
        tail = torch.where(linked, gamma_turn * ahead[target], torch.zeros_like(tail))
    return tail


def tree_returns(
    rewards: torch.Tensor,
    played: torch.Tensor,
    counted: torch.Tensor,
    branches: Sequence[int],
    gamma_turn: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return of each node of trees of turns: its reward plus the discounted mean return of its children.

    With J_k branches in turn k, its nodes are the first P · J_0 · … · J_k entries of the first dimension, siblings next to
    each other. The children of node e are the nodes e·J to e·J + J − 1 of the next turn, which has J = J_{k+1}.

    Args:
        rewards (`torch.Tensor` of shape `(E, N, K)`): Reward of each agent at each node, in reward units; E is the number of
            nodes of the last turn.
        played (`torch.Tensor` of shape `(E, K)`): Whether the node exists.
        counted (`torch.Tensor` of shape `(E, K)`): Whether the node counts: it exists and is not masked.
        branches (`Sequence[int]` of length K): J_k. All 1 after the first turn if episodes are lines.
        gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn, in [0, 1].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: returns, `(E, N, K)`, 0 at nodes that do not count, and whether the node
        counts, `(E, K)`. A node whose children are all masked does not count.

    Source: MAGRPO (https://huggingface.co/papers/2508.04652), as turn trees of CoMLRL.
    """
    returns, known = torch.zeros_like(rewards), counted.clone()
    last = rewards.shape[2] - 1
    returns[:, :, last] = rewards[:, :, last] * counted[:, None, last]
    size = len(rewards)
    for k in range(last - 1, -1, -1):
        children, width = slice(0, size), branches[k + 1]
        size //= width
        live = known[children, k + 1].view(size, width)
        below = (returns[children, :, k + 1] * known[children, None, k + 1]).view(size, width, -1).sum(1)
        below = below / live.sum(1, keepdim=True).clamp(min=1)
        has_children = played[children, k + 1].view(size, width).any(1)
        known[:size, k] &= ~has_children | live.any(1)
        returns[:size, :, k] = (rewards[:size, :, k] + gamma_turn * below) * known[:size, None, k]
    return returns, known


def normalize_advantages(
    advantages: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    least_variance: torch.Tensor,
    sums: SumOverProcesses | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Normalise the advantages of each group: the mean over its live tokens becomes 0, and their variance 1, or less where they hardly
    vary.

    The variance is the mean over rows of each row's mean square, in which a long row counts as much as a short one. Over tokens,
    a long row with the rarer outcome would enlarge its own divisor more than a short one does: with a reward that is mostly 1
    whatever the text is, replies would grow, and with one that is mostly 0 they would shrink.

    Args:
        advantages (`torch.Tensor` of shape `(B, T)`): The advantages.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens. Other tokens do not count.
        groups (`torch.Tensor` of shape `(B,)`): Index of each row's group, for example its agent.
        least_variance (`torch.Tensor` of shape `(G,)`):
            Advantages of a group that vary less are divided by the root of this, so that what is nearly equal stays so.
        sums (`Callable`, *optional*): Sums a tensor over the processes. One process by default.

    Returns:
        `tuple`: Normalised advantages, `(B, T)`, zero where `mask` is 0 and for a group with one live token, and the variance of
            each group, `(G,)`, in squared reward units, NaN without live tokens.
    """
    live = mask.bool()
    advantages = torch.where(live, advantages, torch.zeros_like(advantages))

    def total(x: torch.Tensor) -> torch.Tensor:
        per_group = torch.zeros(len(least_variance), dtype=x.dtype, device=x.device).index_add(0, groups, x)
        return per_group if sums is None else sums(per_group)

    length = live.sum(dim=1).to(advantages.dtype)
    centred = advantages - (total(advantages.sum(dim=1)) / total(length))[groups, None]
    centred = torch.where(live, centred, 0)
    # Two passes: the difference of two large sums would be inaccurate for advantages with a large mean
    mean_square = centred.square().sum(dim=1) / length.clamp(min=1)
    variance = total(mean_square) / total(length.clamp(max=1))
    scale = torch.rsqrt(variance.clamp(min=least_variance) + 1e-8)
    return torch.where(live, centred * scale[groups, None], 0), variance


def agent_weights(
    mask: torch.Tensor,
    agents: torch.Tensor,
    num_agents: int,
    unit: Literal["token", "row"] = "token",
    reduce: SumOverProcesses | None = None,
) -> torch.Tensor:
    """
    Weights that give each agent the same share of a loss that averages over tokens or rows.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens.
        agents (`torch.Tensor` of shape `(B,)`): Index of each row's agent.
        num_agents (`int`): Number of agents of the team.
        unit (`str`, *optional*, defaults to `"token"`):
            What the loss averages over: `"token"` (loss type `dapo`) or `"row"` (`grpo`).
        reduce (`Callable`, *optional*): Sums a tensor over the processes. One process by default.

    Returns:
        `torch.Tensor` of shape `(B,)`: `n / (N · n_i)`, where `n_i` is the number of live units of the row's agent, `n`
        the sum over agents, and `N` the number of agents with live units; 0 for agents without any.

    Source: the imbalance is described in https://huggingface.co/papers/2605.24202.
    """
    tokens = mask.bool().sum(dim=1)
    units = tokens if unit == "token" else tokens.clamp(max=1)
    # float32 is exact up to 16.7 million units per agent
    count = torch.zeros(num_agents, device=mask.device).index_add(0, agents, units.float())
    if reduce is not None:
        count = reduce(count)
    present = count > 0
    weight = count.sum() / (present.sum() * count).clamp(min=1)
    return torch.where(present, weight, torch.zeros_like(weight))[agents]


def group_advantages(
    returns: torch.Tensor,
    siblings: int | list[int],
    kind: Baseline = "mean",
    mask: torch.Tensor | None = None,
    scale: Literal["none", "group", "batch", "agent"] = "none",
    agents: torch.Tensor | None = None,
    sums: SumOverProcesses | None = None,
) -> torch.Tensor:
    """
    Advantage of each row relative to its siblings.

    Args:
        returns (`torch.Tensor` of shape `(B,)`): Return of each row. The siblings of a group are contiguous.
        siblings (`int` or `list[int]`): Number of siblings of every group, or of each.
        kind (`str`, *optional*, defaults to `"mean"`):
            Baseline: `"mean"` of the siblings (MAGRPO), `"rloo"`, mean of the other siblings (MARLOO), `"max"` of the
            siblings (MAReMax), or `"none"` (MAREINFORCE).
        mask (`torch.Tensor` of shape `(B,)`, *optional*): 1 on live rows. Other rows do not count.
        scale (`str`, *optional*, defaults to `"none"`):
            Divide by the standard deviation of the returns of the siblings (`"group"`), of all live rows (`"batch"`) or
            of the live rows of the same agent (`"agent"`), or do not divide (`"none"`). With `kind="none"`, returns are
            not divided if their standard deviation is less than 1 % of their root mean square.
        agents (`torch.Tensor` of shape `(B,)`, *optional*): Index of each row's agent, for `scale="agent"`.
        sums (`Callable`, *optional*): Sums a tensor over the processes, for `"batch"` and `"agent"`.

    Returns:
        `torch.Tensor` of shape `(B,)`: The advantages, zero where `mask` is 0, and for `"rloo"` also zero for rows without
        another live sibling.

    Raises:
        KeyError: If `kind` or `scale` is none of these.

    Source: GRPO (https://huggingface.co/papers/2402.03300), RLOO (https://huggingface.co/papers/2402.14740), ReMax
    (https://huggingface.co/papers/2310.10505), and MAGRPO (https://huggingface.co/papers/2508.04652).
    """
    sizes = [siblings] * (len(returns) // siblings) if isinstance(siblings, int) else siblings
    live = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask.bool()
    returns = torch.where(live, returns, torch.zeros_like(returns))
    # One line per group, filled up with rows that are not live
    group, present, filled = (
        pad_sequence(x.split(sizes), batch_first=True) for x in (returns, live, torch.ones_like(live))
    )
    advantages = torch.where(present, _over_baseline(group, present, kind), torch.zeros_like(group))[filled]
    if scale == "none":
        return advantages
    index = {
        "group": torch.arange(len(group), device=returns.device).repeat_interleave(filled.sum(1)),
        "batch": torch.zeros(len(returns), dtype=torch.long, device=returns.device),
        "agent": agents,
    }[scale]
    assert index is not None
    # A group lies within one process
    std, size = (of_index[index] for of_index in _spread(returns, live, index, None if scale == "group" else sums))
    scaled = advantages / (std + 1e-4)  # 1e-4 as in TRL
    # Returns without a baseline would become huge if they hardly differ
    return torch.where(std > 1e-2 * size, scaled, advantages) if kind == "none" else scaled


def _over_baseline(group: torch.Tensor, present: torch.Tensor, kind: Baseline) -> torch.Tensor:
    """Returns `(groups, G)` minus their baseline."""
    count = present.sum(dim=1, keepdim=True).to(group.dtype)
    mean = group.sum(dim=1, keepdim=True) / count.clamp(min=1)
    highest = group.masked_fill(~present, -torch.inf).amax(dim=1, keepdim=True)
    lowest = group.masked_fill(~present, torch.inf).amin(dim=1, keepdim=True)
    # Where all are equal, advantages are 0 and not what is left of rounding: the update skips such rows
    mean = torch.where(highest == lowest, highest, mean)
    if kind == "mean":
        return group - mean
    if kind == "rloo":
        # ret - (sum - ret) / (n - 1) = (ret - mean) · n / (n - 1)
        return (group - mean) * count / (count - 1).clamp(min=1)
    return {"max": group - highest, "none": group}[kind]


def _spread(
    x: torch.Tensor, live: torch.Tensor, index: torch.Tensor, sums: SumOverProcesses | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Standard deviation (Bessel-corrected, 0 for one element) and root mean square of the live elements of `x`, for each
    value of `index`.
    """
    size = int(index.max()) + 1 if len(index) else 1

    def total(y: torch.Tensor) -> torch.Tensor:
        y = torch.where(live, y, torch.zeros_like(y))
        per_index = torch.zeros(size, dtype=y.dtype, device=y.device).index_add(0, index, y)
        return per_index if sums is None else sums(per_index)

    count = total(torch.ones_like(x))
    mean = total(x) / count.clamp(min=1)
    std = (total((x - mean[index]).square()) / (count - 1).clamp(min=1)).sqrt()
    return std, (total(x.square()) / count.clamp(min=1)).sqrt()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, cliprange: float
) -> torch.Tensor:
    """
    Clipped squared error of the critic per token, without reduction.

    Args:
        values (`torch.Tensor` of shape `(B, T)`): Current estimates of the critic, in reward units or standard deviations.
        old_values (`torch.Tensor` of shape `(B, T)`): Estimates of the critic at rollout, in the same unit.
        returns (`torch.Tensor` of shape `(B, T)`): Targets, in the same unit.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens.
        cliprange (`float`): Distance from `old_values` beyond which a value has no gradient, in their unit.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `0.5 · max((V − ret)², (clip(V, V_old ± cliprange) − ret)²)`, zero where
        `mask` is 0.

    Source: Schulman et al. 2017 (https://huggingface.co/papers/1707.06347), as in OpenAI baselines. MAPPO
    (https://huggingface.co/papers/2103.01955) clips values in the same way.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    loss = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    return torch.where(mask.bool(), loss, torch.zeros_like(loss))
