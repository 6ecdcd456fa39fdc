"""
From rewards and values to advantages and returns: pure tensor functions.

Knows torch only: nothing about agents' names, models, trainers or processes. Where a statistic is global, the caller
passes the function that sums a tensor over the processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


SumOverProcesses = Callable[[torch.Tensor], torch.Tensor]


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
    Generalised advantage estimation over the tokens that the policy wrote, from row to row of one agent.

    Positions where `mask` is 0 are skipped, not filled with zeros: the token after a gap follows the token before it.
    At a row's last live token the recursion goes on at the first live token of `next_row`, with `gamma_turn` and
    `lam_turn` in place of `gamma` and `lam`. After the last row of a chain the value is 0, truncated or not.

    Args:
        rewards (`torch.Tensor` of shape `(B, T)`): Reward at the token that earned it, in reward units.
        values (`torch.Tensor` of shape `(B, T)`): Critic's estimate before each token, in reward units.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on tokens the policy wrote; other positions are skipped.
        gamma (`float`, *optional*, defaults to `1.0`): Discount per token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`): Bias-variance trade-off within a row, in [0, 1].
        next_row (`torch.Tensor` of shape `(B,)`, *optional*):
            Index of the same agent's next row of the same episode, or -1 after the last. Rows are not chained by
            default. The link of a row without live tokens is ignored.
        gamma_turn (`float` or `torch.Tensor` of shape `(B,)`, *optional*, defaults to `1.0`):
            Discount from a row to its next, in [0, 1], or of each row to its own next.
        lam_turn (`float`, *optional*, defaults to `lam`): Bias-variance trade-off from a row to its next, in [0, 1].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: advantages and returns (advantages plus values), both `(B, T)`, zero where
        `mask` is 0.

    Raises:
        ValueError: If the shapes differ, if `next_row` leads from a live row to one without live tokens, or in a
            circle.

    Source: Schulman et al. 2016 (https://huggingface.co/papers/1506.02438), eq. 16.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards, values and mask have shapes {tuple(rewards.shape)}, {tuple(values.shape)} and "
            f"{tuple(mask.shape)}; all must be (B, T)"
        )
    live = mask.bool()
    length = live.sum(dim=1)
    steps = torch.arange(mask.shape[1], device=mask.device)
    # The live tokens of a row move to its front, in order, so that the token after a gap is a neighbour.
    order = torch.argsort((~live).int(), dim=1, stable=True)
    front = steps < length[:, None]
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    value = torch.where(front, values.gather(1, order), zero)
    reward = torch.where(front, rewards.to(values.dtype).gather(1, order), zero)

    delta = reward + gamma * F.pad(value[:, 1:], (0, 1)) - value
    advantage = _discounted_sum(delta, gamma * lam)
    if next_row is not None:
        # What follows the row is worth `tail` at its last live token, and decays from there to the row's start.
        tail = _tails(
            value, advantage, length, gamma * lam, next_row, gamma_turn, lam if lam_turn is None else lam_turn
        )
        tokens_after = (length[:, None] - 1 - steps).clamp(min=0)
        advantage = advantage + (gamma * lam) ** tokens_after.to(value.dtype) * tail[:, None]

    def restore(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).scatter(1, order, torch.where(front, x, zero))

    return restore(advantage), restore(advantage + value)


def _discounted_sum(x: torch.Tensor, discount: float) -> torch.Tensor:
    """`y_t = x_t + discount · y_{t+1}` along the last dimension, by doubling the span: log2(T) operations."""
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
    """What every row's last live token gets from the rows after it, `(B,)`: one pass per row of the longest chain."""
    linked = (next_row >= 0) & (length > 0)
    target = next_row.clamp(min=0)
    if bool((linked & (length[target] == 0)).any()):
        row = int((linked & (length[target] == 0)).nonzero()[0])
        raise ValueError(
            f"next_row[{row}]={int(next_row[row])} has no live tokens; the next row that has some, or -1, works"
        )
    depth, reached = 0, torch.where(linked, target, -1)
    while bool((reached >= 0).any()):
        depth += 1
        if depth > len(next_row):
            raise ValueError("next_row leads in a circle; every chain of rows must end in -1")
        following = reached.clamp(min=0)
        reached = torch.where((reached >= 0) & linked[following], target[following], -1)

    first_value, first_advantage = value[:, 0], advantage[:, 0]
    first_decay = trace ** (length - 1).clamp(min=0).to(value.dtype)
    tail = torch.zeros_like(first_value)
    for _ in range(depth):
        ahead = first_value + lam_turn * (first_advantage + first_decay * tail)
        tail = torch.where(linked, gamma_turn * ahead[target], torch.zeros_like(tail))
    return tail


def turn_returns(rewards: torch.Tensor, gamma_turn: float = 1.0) -> torch.Tensor:
    """
    Return over turns: a turn's reward plus the discounted return of the next turn.

    Args:
        rewards (`torch.Tensor` of shape `(E, K)`):
            Immediate reward of every turn of every episode (or of every agent of every episode), in reward units; 0
            after an episode's last turn.
        gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn, in [0, 1].

    Returns:
        `torch.Tensor` of shape `(E, K)`: The returns, in reward units.
    """
    return _discounted_sum(rewards, gamma_turn)


def tree_returns(
    rewards: torch.Tensor,
    played: torch.Tensor,
    counted: torch.Tensor,
    num_children: int,
    gamma_turn: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return of every node of turn trees: its reward plus the discounted mean return of its children.

    The nodes of turn k stand in the first P · J^(k+1) places of the first dimension, J siblings beside each other; the
    children of node e are nodes e·J to e·J + J − 1 of the next turn.

    Args:
        rewards (`torch.Tensor` of shape `(E, N, K)`): Immediate reward of every agent at every node, in reward units; E = P · J^K.
        played (`torch.Tensor` of shape `(E, K)`): Whether there is such a node.
        counted (`torch.Tensor` of shape `(E, K)`): Whether it counts: it was played, and is not masked.
        num_children (`int`): J.
        gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn, in [0, 1].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: returns, `(E, N, K)`, 0 where nothing counts, and whether the node counts,
        `(E, K)`: one whose children all are masked does not.

    Source: MAGRPO (https://huggingface.co/papers/2508.04652), as turn trees of CoMLRL.
    """
    returns, known = torch.zeros_like(rewards), counted.clone()
    last = rewards.shape[2] - 1
    returns[:, :, last] = rewards[:, :, last] * counted[:, None, last]
    for k in range(last - 1, -1, -1):
        size = len(rewards) // num_children ** (last - k)
        children = slice(0, size * num_children)
        live = known[children, k + 1].view(size, num_children)
        below = (returns[children, :, k + 1] * known[children, None, k + 1]).view(size, num_children, -1).sum(1)
        below = below / live.sum(1, keepdim=True).clamp(min=1)
        has_children = played[children, k + 1].view(size, num_children).any(1)
        known[:size, k] &= ~has_children | live.any(1)
        returns[:size, :, k] = (rewards[:size, :, k] + gamma_turn * below) * known[:size, None, k]
    return returns, known


def normalize_advantages(
    advantages: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor | None = None,
    sums: SumOverProcesses | None = None,
    num_groups: int | None = None,
) -> torch.Tensor:
    """
    Give the live tokens of every group mean 0 and standard deviation 1.

    Args:
        advantages (`torch.Tensor` of shape `(B, T)`): The advantages.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens; the others do not count.
        groups (`torch.Tensor` of shape `(B,)`, *optional*): Index of each row's group, for example its agent. One
            group by default.
        sums (`Callable`, *optional*): Sums a tensor over the processes. One process by default.
        num_groups (`int`, *optional*, defaults to the largest index plus 1):
            Number of groups. Needed with `sums` when the processes do not all see the last group.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Normalised advantages, zero where `mask` is 0 and for a group with one live
        token.
    """
    live = mask.bool()
    advantages = torch.where(live, advantages, torch.zeros_like(advantages))
    if groups is None:
        groups = torch.zeros(len(advantages), dtype=torch.long, device=advantages.device)
    if num_groups is None:
        num_groups = int(groups.max()) + 1 if len(groups) else 1

    def total(x: torch.Tensor) -> torch.Tensor:
        per_group = torch.zeros(num_groups, dtype=x.dtype, device=x.device).index_add(0, groups, x.sum(dim=1))
        return per_group if sums is None else sums(per_group)

    count = total(live.to(advantages.dtype)).clamp(min=1)
    centred = advantages - (total(advantages) / count)[groups, None]
    centred = torch.where(live, centred, torch.zeros_like(centred))
    # Two passes: the difference of two large sums would lose the variance of advantages with a large mean.
    variance = total(centred.square()) / count
    return centred * torch.rsqrt(variance + 1e-8)[groups, None]


def agent_weights(
    mask: torch.Tensor,
    agents: torch.Tensor,
    num_agents: int,
    unit: str = "token",
    reduce: SumOverProcesses | None = None,
) -> torch.Tensor:
    """
    Weights that give every agent the same share of a loss that averages over tokens or rows.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens.
        agents (`torch.Tensor` of shape `(B,)`): Index of each row's agent.
        num_agents (`int`): Number of agents of the team.
        unit (`str`, *optional*, defaults to `"token"`):
            What the loss averages over: `"token"` (loss type `dapo`) or `"row"` (`grpo`).
        reduce (`Callable`, *optional*): Sums a tensor over the processes. One process by default.

    Returns:
        `torch.Tensor` of shape `(B,)`: `n / (N · n_i)` with `n_i` the live units of the row's agent, `n` their sum and
        `N` the number of agents that have any; 0 for an agent without live units.

    Raises:
        ValueError: If `unit` is unknown.

    Source: the imbalance is described in https://huggingface.co/papers/2605.24202.
    """
    if unit not in ("token", "row"):
        raise ValueError(f"unit={unit!r} is unknown; 'token' or 'row' works")
    tokens = mask.bool().sum(dim=1)
    units = tokens if unit == "token" else tokens.clamp(max=1)
    # Counts are summed as float32, which is exact up to 16.7 million units per agent.
    count = torch.zeros(num_agents, device=mask.device).index_add(0, agents, units.float())
    if reduce is not None:
        count = reduce(count)
    present = count > 0
    weight = count.sum() / (present.sum() * count).clamp(min=1)
    return torch.where(present, weight, torch.zeros_like(weight))[agents]


def group_advantages(
    returns: torch.Tensor,
    num_generations: int,
    kind: str = "mean",
    mask: torch.Tensor | None = None,
    scale: str = "none",
    agents: torch.Tensor | None = None,
    sums: SumOverProcesses | None = None,
) -> torch.Tensor:
    """
    Advantage of each row over its siblings.

    Args:
        returns (`torch.Tensor` of shape `(B,)`): Return of each row; the G siblings of a group are contiguous.
        num_generations (`int`): G, the number of siblings.
        kind (`str`, *optional*, defaults to `"mean"`):
            Baseline: `"mean"` of the siblings (MAGRPO), `"rloo"`, mean of the other siblings (MARLOO), `"max"` of the
            siblings (MAReMax), or `"none"` (MAREINFORCE).
        mask (`torch.Tensor` of shape `(B,)`, *optional*): 1 on live rows, which alone make up the statistics.
        scale (`str`, *optional*, defaults to `"none"`):
            Standard deviation of the returns that divides: `"none"`, `"group"` (siblings), `"batch"` (all live rows)
            or `"agent"` (live rows of the same agent). Divides only, never re-centres. With `kind="none"`, returns
            that spread by less than 1 % of their root mean square are not divided.
        agents (`torch.Tensor` of shape `(B,)`, *optional*): Index of each row's agent, for `scale="agent"`.
        sums (`Callable`, *optional*): Sums a tensor over the processes, for `"batch"` and `"agent"`.

    Returns:
        `torch.Tensor` of shape `(B,)`: The advantages, zero where `mask` is 0, and for `"rloo"` zero without a live
        sibling to compare with.

    Raises:
        ValueError: If `kind` or `scale` is unknown, the rows do not fill whole groups, or agents are missing.

    Source: GRPO (https://huggingface.co/papers/2402.03300), RLOO (https://huggingface.co/papers/2402.14740), ReMax
    (https://huggingface.co/papers/2310.10505), and MAGRPO (https://huggingface.co/papers/2508.04652).
    """
    if len(returns) % num_generations:
        raise ValueError(f"{len(returns)} rows do not fill groups of num_generations={num_generations}")
    live = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask.bool()
    returns = torch.where(live, returns, torch.zeros_like(returns))
    group, present = returns.view(-1, num_generations), live.view(-1, num_generations)
    count = present.sum(dim=1, keepdim=True).to(returns.dtype)
    mean = group.sum(dim=1, keepdim=True) / count.clamp(min=1)
    if kind == "mean":
        advantages = group - mean
    elif kind == "rloo":
        # ret - (sum - ret) / (n - 1) = (ret - mean) · n / (n - 1)
        advantages = (group - mean) * count / (count - 1).clamp(min=1)
    elif kind == "max":
        advantages = group - group.masked_fill(~present, -torch.inf).amax(dim=1, keepdim=True)
    elif kind == "none":
        advantages = group
    else:
        raise ValueError(f"kind={kind!r} is unknown; 'mean', 'rloo', 'max' or 'none' works")
    advantages = torch.where(present, advantages, torch.zeros_like(group)).view(-1)

    if scale == "none":
        return advantages
    index = torch.zeros(len(returns), dtype=torch.long, device=returns.device)
    if scale == "group":
        index = torch.arange(len(group), device=returns.device).repeat_interleave(num_generations)
        sums = None  # a group lies within one process
    elif scale == "agent":
        if agents is None:
            raise ValueError("scale='agent' needs agents, the index of each row's agent")
        index = agents
    elif scale != "batch":
        raise ValueError(f"scale={scale!r} is unknown; 'none', 'group', 'batch' or 'agent' works")
    std, size = (of_index[index] for of_index in _spread(returns, live, index, sums))
    scaled = advantages / (std + 1e-4)  # 1e-4 as in TRL
    # Returns that were not centred stay large where there is nothing to divide by
    return torch.where(std > 1e-2 * size, scaled, advantages) if kind == "none" else scaled


def _spread(
    x: torch.Tensor, live: torch.Tensor, index: torch.Tensor, sums: SumOverProcesses | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Standard deviation (Bessel-corrected, 0 for one element) and root mean square of the live elements of `x`, one entry
    for each value of `index`.
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
    Clipped squared error of the critic, per token and not reduced.

    Args:
        values (`torch.Tensor` of shape `(B, T)`): Critic's estimates now, in reward units.
        old_values (`torch.Tensor` of shape `(B, T)`): Critic's estimates at rollout, in reward units.
        returns (`torch.Tensor` of shape `(B, T)`): Targets, in reward units.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on live tokens.
        cliprange (`float`): How far a value may move from `old_values` before its gradient stops, in reward units.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `0.5 · max((V − ret)², (clip(V, V_old ± cliprange) − ret)²)`, zero where
        `mask` is 0.

    Source: Schulman et al. 2017 (https://huggingface.co/papers/1707.06347), as implemented in OpenAI baselines; MAPPO
    (https://huggingface.co/papers/2103.01955) clips values in the same way.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    loss = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    return torch.where(mask.bool(), loss, torch.zeros_like(loss))
