"""What TRL's loss terms are multiplied with and divided by, so that rows that nobody played do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from marcog_trl.algorithms.advantages import agent_weights
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def share_of_live_rows(loss_type: str, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    """
    What the policy and KL terms of a micro-batch are multiplied by so that rows that nobody played do not dilute them;
    `None` where they do not.
    """
    if loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):  # means over the rows of the micro-batch
        return inputs["rows_per_live_row"]
    if loss_type == "bnpo":  # a mean over its live tokens: only micro-batches with fewer of them count too much
        return mask.any(1).float().mean() * inputs["rows_per_trained_row"]
    return None


def loss_window(trainer: MultiAgentTrainer, count: torch.Tensor) -> torch.Tensor:
    """
    What a sum over a micro-batch is divided by, so that an optimizer step averages over the `count` items of the
    generation batch's share that it uses: TRL's own normaliser.
    """
    normalizer = count.clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        normalizer = normalizer * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return normalizer


def rows_per_used_row(trainer: MultiAgentTrainer, rollout: Rollout) -> dict[str, torch.Tensor]:
    """Rows of the generation batch per live one, and per one that the loss sees, over all processes."""
    live, trained, total = trainer._sum_over_processes(
        torch.stack([rollout.live.sum(), rollout.trained.sum(), torch.ones_like(rollout.live).sum()])
    )
    per_live_row = total / live.clamp(min=1)
    per_trained_row = total / trained.clamp(min=1)
    return {"rows_per_live_row": per_live_row, "rows_per_trained_row": per_trained_row}


def row_weights(trainer: MultiAgentTrainer, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Weight of each row in the loss, `(B,)`: its agent's times its turn's."""
    weights = _agent_weights(trainer, mask, rollout)
    if trainer.args.turn_weights is not None:
        weights = weights * torch.tensor(trainer.args.turn_weights, device=mask.device)[rollout.turn]
    return weights


def _agent_weights(trainer: MultiAgentTrainer, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Equal for all agents, or 1, `(B,)`."""
    if trainer.args.agent_loss_weighting == "token" or len(trainer.agents) == 1:
        return torch.ones(mask.size(0), device=mask.device)
    unit = "row" if trainer.loss_type == "grpo" else "token"
    return agent_weights(mask, rollout.agent, len(trainer.agents), unit=unit, reduce=trainer._sum_over_processes)
