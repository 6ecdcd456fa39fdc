"""Factors and normalizers of TRL's loss terms, so that unused rows do not count."""

from __future__ import annotations

from typing import Any

import torch

from marcog_trl.processes import sum_over_processes, this_process
from marcog_trl.trainers.batch import TeamBatch


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
    Returns the batch of the update: the rows of trained agents, and the number of these rows per row in statistics and per row in
    the loss, over all processes. The other agents' rows would cost a forward and a backward pass for nothing.

    Args:
        batch ([`TeamBatch`]): The batch.
        output (`dict`): What TRL trains on.
        parts (`int`): Number of equal parts that TRL splits it into. So a few rows that the loss ignores may have to stay.
    """
    keep = batch.agent_is_trained.clone()
    keep[(~keep).nonzero()[: -int(keep.sum()) % parts]] = True
    if not keep.all():
        output = {
            name: value[keep] if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in output.items()
        }
    counted, in_loss, total = sum_over_processes(
        torch.stack([batch.in_statistics.sum(), batch.in_loss.sum(), keep.sum()])
    )
    counts = {
        "rows_per_counted_row": total / counted.clamp(min=1),
        "rows_per_row_in_loss": total / in_loss.clamp(min=1),
    }
    return output | counts


def rows_with_signal(inputs: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a micro-batch without the rows whose advantages are all 0, and without columns that only pad the others. The sum of
    its policy loss does not change: what TRL divides it by is a number of the whole batch, or of rows, for which
    `rows_per_counted_row` makes up.

    For losses to which rows without an advantage add nothing. Every process runs every micro-batch, so where no row has an
    advantage, one with one token stays, which does not count in metrics.
    """
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    advantages = inputs["advantages"]
    signal = advantages[:, None] * mask if advantages.dim() == 1 else advantages * mask
    keep = (signal != 0).any(1)
    rows, columns = len(keep), mask.size(1)
    prompt, reply = (inputs[f"{part}_mask"][keep].any(0) for part in ("prompt", "completion"))
    first = int(prompt.int().argmax()) if keep.any() else len(prompt) - 1
    last = columns - int(reply.flip(0).int().argmax()) if keep.any() else 1
    if not keep.any():
        keep[0] = True
        inputs = inputs | {"tool_mask": torch.zeros_like(mask)}

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        value = value[keep]
        if name in ("prompt_ids", "prompt_mask"):
            return value[:, first:]
        return value[:, :last] if value.dim() > 1 and value.size(1) == columns else value

    inputs = {name: cut(name, value) for name, value in inputs.items()}
    return inputs | {"rows_per_counted_row": inputs["rows_per_counted_row"] * (len(inputs["advantages"]) / rows)}
