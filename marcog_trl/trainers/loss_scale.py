"""Factors and normalizers of TRL's loss terms, so that unused rows do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from marcog_trl.algorithms.advantages import agent_weights
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def share_of_live_rows(loss_type: str, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    """
    Returns the factor of a micro-batch's policy and KL terms, so that unused rows do not dilute them. `None` if they do not.
    """
    if loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):  # means over the rows of the micro-batch
        return inputs["rows_per_live_row"]
    if loss_type == "bnpo":  # a mean over the live tokens of the micro-batch, however few they are
        return mask.any(1).float().mean() * inputs["rows_per_trained_row"]
    return None


def loss_window(trainer: MultiAgentTrainer, count: torch.Tensor) -> torch.Tensor:
    """
    Returns TRL's normalizer of sums over a micro-batch. With it, an optimizer step averages over its share of the `count`
    items of the generation batch.
    """
    normalizer = count.clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        normalizer = normalizer * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return normalizer


def rows_to_train(trainer: MultiAgentTrainer, output: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
    """
    Returns the batch of the update: the rows of trained agents, and the number of these rows per live row and per row in the
    loss, over all processes. The other agents' rows would cost a forward and a backward pass for nothing.
    """
    keep = rollout.learns.clone()
    # TRL splits the batch into equal parts, so a few rows that the loss ignores may have to stay
    parts = cast(int, trainer.args.steps_per_generation) if trainer.model.training else 1
    keep[(~keep).nonzero()[: -int(keep.sum()) % parts]] = True
    if not keep.all():
        output = {
            name: value[keep] if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in output.items()
        }
    learning, trained, total = trainer._sum_over_processes(
        torch.stack([rollout.learning.sum(), rollout.trained.sum(), keep.sum()])
    )
    counts = {
        "rows_per_live_row": total / learning.clamp(min=1),
        "rows_per_trained_row": total / trained.clamp(min=1),
    }
    return output | counts


def row_weights(trainer: MultiAgentTrainer, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Returns the weight of each row in the loss, `(B,)`: the weight of its agent times that of its turn."""
    weights = _agent_weights(trainer, mask, rollout)
    if trainer.args.turn_weights is not None:
        weights = weights * torch.tensor(trainer.args.turn_weights, device=mask.device)[rollout.turn]
    return weights


def _agent_weights(trainer: MultiAgentTrainer, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Returns weights that count all agents equally, or 1, `(B,)`."""
    if trainer.args.agent_loss_weighting == "token" or len(trainer.agents) == 1:
        return torch.ones(mask.size(0), device=mask.device)
    unit = "row" if trainer.loss_type == "grpo" else "token"
    return agent_weights(mask, rollout.agent, len(trainer.agents), unit=unit, reduce=trainer._sum_over_processes)
