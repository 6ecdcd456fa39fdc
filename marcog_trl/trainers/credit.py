"""Credit of a generation batch: advantages of rows over their siblings, their weights in the loss, and what it is divided by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from marcog_trl.algorithms.advantages import agent_weights, group_advantages
from marcog_trl.algorithms.counterfactual import critic_share, sibling_moments
from marcog_trl.processes import equally_many, gather_rows, sum_over_processes, this_process
from marcog_trl.trainers.batch import TeamBatch


def over_siblings(
    batch: TeamBatch, returns: torch.Tensor | None = None, counted: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """
    Calls [`group_advantages`] with these options, `(B,)`. Siblings may be on other processes. Counterfactual credit has the mean
    of the other siblings as its baseline.

    Args:
        batch ([`TeamBatch`]): The batch.
        returns (`torch.Tensor` of shape `(B,)`, *optional*): Defaults to the returns of the rows.
        counted (`torch.Tensor` of shape `(B,)`, *optional*): The rows to compare. Defaults to those in statistics.
    """
    if batch.is_counterfactual:
        options["kind"] = "rloo"
    siblings, here, (values, mask, agents) = _with_siblings(
        batch,
        batch.row_returns() if returns is None else returns,
        batch.in_statistics if counted is None else counted,
        batch.agent,
    )
    sums = None if batch.spread_siblings else sum_over_processes
    return group_advantages(values, siblings, mask=mask, agents=agents, sums=sums, **options)[here]


def _with_siblings(batch: TeamBatch, *rows: torch.Tensor) -> tuple[list[int], slice, list[torch.Tensor]]:
    """
    Returns the sizes of the groups of siblings, where the rows of this process are among them, and these values of the rows of
    each group.
    """
    if batch.spread_siblings is None:
        return batch.siblings, slice(None), list(rows)
    here, everywhere = gather_rows(*rows)
    return [batch.spread_siblings] * (len(everywhere[0]) // batch.spread_siblings), here, everywhere


def normalized_by_function(batch: TeamBatch, weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """
    Advantages with `multi_objective_aggregation="normalize_then_sum"`, `(B,)`, for episodes of one turn.

    The rewards of each function are normalised over siblings, then weighted and summed, and the sums are normalised over the
    batch, as in TRL. A function does not count for rows to which it does not apply.

    Args:
        batch ([`TeamBatch`]): The batch.
        weights (`Sequence[float]` of length F): Weight of each reward function.

    Source: GDPO (https://huggingface.co/papers/2601.05242).
    """
    none = [math.nan] * len(weights)
    scores = [episode.turns[0].score for episode in batch.episodes]
    parts = torch.tensor(  # (E, N, F)
        [[none if s is None else s.by_agent.get(agent, none) for agent in batch.agents] for s in scores],
        device=batch.device,
    )
    total = torch.zeros_like(parts[batch.first_episode, 0, 0])
    for weight, part in zip(torch.as_tensor(weights).to(parts), parts.unbind(2), strict=True):
        values = batch.of_agent(part[:, :, None])
        known = batch.in_statistics & ~values.isnan()
        total += weight * over_siblings(batch, values, known, kind="mean", scale="group")
    here, (everywhere, counted) = gather_rows(total, batch.in_statistics)
    return group_advantages(everywhere, len(everywhere), mask=counted, scale="batch")[here]


_NEWEST = 0.1  # least weight of the newest batch in running means


def critic_shares(
    batch: TeamBatch, values: torch.Tensor, share: float | None, moments: list[list[float]] | None
) -> tuple[torch.Tensor, list[list[float]] | None]:
    """
    Returns the share of the critic in the baseline of each row.

    Args:
        batch ([`TeamBatch`]): The batch.
        values (`torch.Tensor` of shape `(B,)`): The critic's value of the context of each row.
        share (`float`, *optional*): The share, in [0, 1]. By default it is estimated for each slot from earlier batches.
        moments (`list[list[float]]` of shape `(S, 3)`, *optional*): What is known from earlier training batches: running means of σ²
            and δ² of each slot, and the number of batches.

    Returns:
        `tuple`: The shares, `(B,)`, and the moments with this batch, if it is of training.
    """
    own = torch.tensor([batch.slots.index(slot) for slot in batch.tree.slots], device=values.device)
    own = own.repeat(len(values) // len(own))
    sizes, here, (returns, value, used, slot_of_row) = _with_siblings(
        batch, batch.row_returns(), values, batch.is_used, own
    )
    variance, error, count = sibling_moments(returns, value, used, sizes)
    first = torch.tensor([0, *itertools.accumulate(sizes)][:-1], device=count.device)
    slot = slot_of_row[first]
    shares = torch.full_like(count, share or 0.0)
    if share is None:
        known = torch.tensor(moments or [[0.0] * 3] * len(batch.slots), device=count.device)
        shares = critic_share(known[slot, 0], known[slot, 1], count) * (known[slot, 2] > 0)
        if batch.training:
            new = torch.stack([variance, error, torch.ones_like(count)], dim=1) * (count > 1)[:, None]
            new = torch.zeros_like(known).index_add(0, slot, new)
            if batch.spread_siblings is None:
                new = sum_over_processes(new)
            found = new[:, 2] > 0
            known[found, 2] += 1
            weight = (1 / known[:, 2:].clamp(min=1)).clamp(min=_NEWEST)
            mean = new[:, :2] / new[:, 2:].clamp(min=1)
            known[:, :2] = torch.where(found[:, None], known[:, :2] + weight * (mean - known[:, :2]), known[:, :2])
            moments = known.tolist()
    alone = float(share != 0)
    shares = torch.where(count > 1, shares, alone).repeat_interleave(torch.tensor(sizes, device=count.device))
    return shares[here], moments


def row_weights(
    batch: TeamBatch,
    mask: torch.Tensor,
    weighting: str,
    unit: Literal["token", "row"],
    turn_weights: Sequence[float] | None,
) -> torch.Tensor:
    """
    Returns the weight of each row in the loss, `(B,)`: the weight of its agent times that of its turn.

    Args:
        batch ([`TeamBatch`]): The batch.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on tokens in the loss.
        weighting (`str`): `"agent"` gives all agents the same weight, `"token"` leaves them as they are.
        unit (`str`): See [`agent_weights`].
        turn_weights (`Sequence[float]` of length K, *optional*): Weight of each turn. Defaults to 1.
    """
    weights = torch.ones(mask.size(0), device=mask.device)
    if weighting == "agent" and len(batch.agents) > 1:
        weights = agent_weights(mask, batch.agent, len(batch.agents), unit=unit, reduce=sum_over_processes)
    if turn_weights is not None:
        weights = weights * torch.tensor(turn_weights, device=mask.device)[batch.turn]
    return weights


# The rows of an agent, one after the other


def next_rows(batch: TeamBatch) -> torch.Tensor:
    """
    Returns the index of the same agent's next row in the loss in the same episode, or -1, `(B,)`. With counterfactual credit, what a
    row earns includes everything after it.
    """
    if batch.is_counterfactual:
        return torch.full_like(batch.turn, -1)
    rows = batch.row_of[batch.first_episode]  # (B, S)
    own = rows == torch.arange(len(rows), device=rows.device)[:, None]
    later = own.cumsum(1).bool() & ~own & batch.in_loss[rows] & (batch.agent[rows] == batch.agent[:, None])
    following = rows.gather(1, later.int().argmax(1, keepdim=True)).squeeze(1)
    return torch.where(batch.in_loss & later.any(1), following, -1)


def discounts(batch: TeamBatch, following: torch.Tensor, gamma_turn: float) -> torch.Tensor:
    """
    Returns the discount from each row to its agent's next one, `(B,)`: `gamma_turn` to the power of the number of turns between them.

    Args:
        batch ([`TeamBatch`]): The batch.
        following (`torch.Tensor` of shape `(B,)`): See [`next_rows`].
        gamma_turn (`float`): Discount per turn, in [0, 1].
    """
    turns = torch.where(following >= 0, batch.turn[following.clamp(min=0)] - batch.turn, 0)
    return gamma_turn ** turns.float()


def row_rewards(batch: TeamBatch, gamma_turn: float = 1.0) -> torch.Tensor:
    """
    Returns the reward of each row, `(B,)`: the discounted sum of the rewards from its turn up to the agent's next row. Rows that are
    not the agent's last one in a turn have 0.
    """
    returns, following = batch.row_returns(), next_rows(batch)
    # R_k + γ R_{k+1} + ... up to the next row's turn = return at k - γ^(next - k) · return at the next row
    later = torch.where(following >= 0, returns[following.clamp(min=0)], torch.zeros_like(returns))
    return returns - discounts(batch, following, gamma_turn) * later


# Factors and normalizers of TRL's loss terms, so that unused rows do not count


def share_of_counted_rows(loss_type: str, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    """
    Returns the factor of a micro-batch's policy and KL terms, so that unused rows do not dilute them. `None` if they do not.
    """
    if loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):  # means over the rows of the micro-batch
        return inputs["rows_per_counted_row"]
    if loss_type == "bnpo":  # a mean over the live tokens of the micro-batch, however few they are
        return mask.any(1).float().mean() * inputs["rows_per_row_in_loss"]
    return None


def loss_window(count: torch.Tensor, accumulation: int = 1, parts: int = 1) -> torch.Tensor:
    """
    Returns TRL's normalizer of sums over a micro-batch. With it, an optimizer step averages over its share of the `count` items of
    the generation batch.

    Args:
        count (`torch.Tensor`): Number of items of the generation batch, over all processes.
        accumulation (`int`, *optional*, defaults to `1`): Number of micro-batches of an optimizer step.
        parts (`int`, *optional*, defaults to `1`): Number of micro-batches of the generation batch.
    """
    return count.clamp(min=1.0) / this_process().num_processes * accumulation / parts


def rows_to_train(batch: TeamBatch, output: dict[str, Any], parts: int) -> dict[str, Any]:
    """
    Returns the batch of the update: the used rows of trained agents, and the number of these rows per row in statistics and per row
    in the loss, over all processes. The other rows would cost a forward and a backward pass for nothing.

    Args:
        batch ([`TeamBatch`]): The batch.
        output (`dict`): What TRL trains on.
        parts (`int`): Number of equal parts that TRL splits it into. So a few rows that the loss ignores may have to stay.
    """
    keep = equally_many(batch.in_statistics, multiple_of=parts)
    output = {
        name: value[keep] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in output.items()
    }
    counted, in_loss = sum_over_processes(torch.stack([batch.in_statistics.sum(), batch.in_loss.sum()]))
    total = len(keep) * this_process().num_processes
    counts = {
        "rows_per_counted_row": total / counted.clamp(min=1),
        "rows_per_row_in_loss": total / in_loss.clamp(min=1),
    }
    return output | counts


def rows_with_signal(inputs: dict[str, Any], cuts_columns: bool) -> dict[str, Any]:
    """
    Returns a micro-batch without the rows whose advantages are all 0, and without columns that only pad the others. The sum of
    its policy loss does not change: what TRL divides it by is a number of the whole batch, or of rows, for which
    `rows_per_counted_row` makes up. A collective operation.

    For losses to which rows without an advantage add nothing. Every process runs every micro-batch, and TRL gathers values of
    rows, so all processes keep the same number of rows, at least one: further ones stay without tokens that count.

    Args:
        inputs (`dict`): The micro-batch.
        cuts_columns (`bool`): Whether to leave columns out. Positions may depend on the width of a row, and tensors of an
            algorithm's own may have as many columns as replies, of another meaning.
    """
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    advantages = inputs["advantages"]
    signal = advantages[:, None] * mask if advantages.dim() == 1 else advantages * mask
    keep = (signal != 0).any(1)
    columns = mask.size(1)
    prompt, reply = (inputs[f"{part}_mask"][keep].any(0) for part in ("prompt", "completion"))
    first = int(prompt.int().argmax()) if keep.any() else len(prompt) - 1
    last = columns - int(reply.flip(0).int().argmax()) if keep.any() else 1
    inputs = inputs | {"tool_mask": inputs["tool_mask"] * keep[:, None]}
    rows = equally_many(keep)

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        value = value[rows]
        if not cuts_columns:
            return value
        if name in ("prompt_ids", "prompt_mask"):
            return value[:, first:]
        return value[:, :last] if value.dim() > 1 and value.size(1) == columns else value

    inputs = {name: cut(name, value) for name, value in inputs.items()}
    return inputs | {"rows_per_counted_row": inputs["rows_per_counted_row"] * (len(rows) / len(keep))}
