"""Credit of a generation batch: advantages of rows over their siblings."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from marcog_trl.algorithms.advantages import SumOverProcesses, group_advantages
from marcog_trl.algorithms.counterfactual import critic_share, sibling_moments
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def is_counterfactual(trainer: MultiAgentTrainer) -> bool:
    """Whether siblings are replies in exactly the same context. Evaluation never branches."""
    return trainer.model.training and trainer.args.credit == "counterfactual"


def over_siblings(
    trainer: MultiAgentTrainer,
    rollout: Rollout,
    returns: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """
    Calls [`group_advantages`] with these options, `(B,)`. Siblings may be on other processes. Counterfactual credit has the mean
    of the other siblings as its baseline.

    Args:
        trainer ([`MultiAgentTrainer`]): The trainer.
        rollout ([`Rollout`]): The batch.
        returns (`torch.Tensor` of shape `(B,)`, *optional*): Defaults to the returns of the rows.
        live (`torch.Tensor` of shape `(B,)`, *optional*): The rows to compare. Defaults to those that learn.
    """
    if is_counterfactual(trainer):
        options["kind"] = "rloo"
    siblings, here, (values, mask, agents) = _with_siblings(
        trainer,
        rollout,
        rollout.row_returns() if returns is None else returns,
        rollout.learning if live is None else live,
        rollout.agent,
    )
    sums = None if here else cast(SumOverProcesses, trainer._sum_over_processes)
    advantages = group_advantages(values, siblings, mask=mask, agents=agents, sums=sums, **options)
    return advantages[here] if here else advantages


def _with_siblings(
    trainer: MultiAgentTrainer, rollout: Rollout, *rows: torch.Tensor
) -> tuple[list[int], slice | None, list[torch.Tensor]]:
    """
    Returns the sizes of the groups of siblings, where the rows of this process are among them (`None`: they are all), and
    these values of the rows of each group.
    """
    if not trainer._splits_groups(trainer.model.training):
        return rollout.siblings, None, list(rows)
    here, everywhere = _on_all_processes(trainer, *rows)
    size = trainer._tree(trainer.model.training).siblings[0]
    return [size] * (len(everywhere[0]) // size), here, everywhere


def _on_all_processes(trainer: MultiAgentTrainer, *rows: torch.Tensor) -> tuple[slice, list[torch.Tensor]]:
    """Gathers tensors of rows. Also returns where the rows of this process are."""
    begin = trainer.accelerator.process_index * len(rows[0])
    return slice(begin, begin + len(rows[0])), [trainer.accelerator.gather(x) for x in rows]


def normalized_by_function(trainer: MultiAgentTrainer, rollout: Rollout) -> torch.Tensor:
    """
    Advantages with `multi_objective_aggregation="normalize_then_sum"`, `(B,)`, for episodes of one turn.

    The rewards of each function are normalised over siblings, then weighted and summed, and the sums are normalised over the
    batch, as in TRL. A function does not count for rows to which it does not apply.

    Source: GDPO (https://huggingface.co/papers/2601.05242).
    """
    none = [math.nan] * len(trainer.reward_funcs)
    scores = [episode.turns[0].score for episode in rollout.episodes]
    parts = torch.tensor(  # (E, N, F)
        [[none if s is None else s.by_agent.get(agent, none) for agent in trainer.agents] for s in scores],
        device=rollout.live.device,
    )
    total = torch.zeros_like(parts[rollout.first_episode, 0, 0])
    for weight, part in zip(trainer.reward_weights.to(parts), parts.unbind(2), strict=True):
        values = rollout.of_agent(part[:, :, None])
        known = rollout.learning & ~values.isnan()
        total += weight * over_siblings(trainer, rollout, values, known, kind="mean", scale="group")
    here, (everywhere, learning) = _on_all_processes(trainer, total, rollout.learning)
    return group_advantages(everywhere, len(everywhere), mask=learning, scale="batch")[here]


_MOMENTS = "critic_mix"
_NEWEST = 0.1  # least weight of the newest batch in running means


def critic_shares(trainer: MultiAgentTrainer, rollout: Rollout, values: torch.Tensor) -> torch.Tensor:
    """
    Returns the share of the critic in the baseline of each row, `(B,)`. If it is not given, it is estimated for each slot from
    earlier training batches. What is known is in the trainer's state, which checkpoints have.

    Args:
        trainer ([`MultiAgentPPOTrainer`]): The trainer.
        rollout ([`Rollout`]): The batch.
        values (`torch.Tensor` of shape `(B,)`): The critic's value of the context of each row.
    """
    slots = trainer.workflow.slots
    own = torch.tensor([slots.index(slot) for slot in rollout.tree.slots], device=values.device)
    own = own.repeat(len(values) // len(own))
    sizes, here, (returns, value, live, slot_of_row) = _with_siblings(
        trainer, rollout, rollout.row_returns(), values, rollout.live, own
    )
    variance, error, count = sibling_moments(returns, value, live, sizes)
    first = torch.tensor([0, *itertools.accumulate(sizes)][:-1], device=count.device)
    slot = slot_of_row[first]
    share = torch.full_like(count, trainer.args.critic_share or 0.0)
    if trainer.args.critic_share is None:
        # Running means of σ² and δ² over the batches so far, by slot, and the number of batches
        state = cast(dict, trainer.state.stateful_callbacks)
        known = torch.tensor(state.get(_MOMENTS, [[0.0] * 3] * len(slots)), device=count.device)
        share = critic_share(known[slot, 0], known[slot, 1], count) * (known[slot, 2] > 0)
        if trainer.model.training:
            new = torch.stack([variance, error, torch.ones_like(count)], dim=1) * (count > 1)[:, None]
            new = torch.zeros_like(known).index_add(0, slot, new)
            if here is None:
                new = trainer._sum_over_processes(new)
            found = new[:, 2] > 0
            known[found, 2] += 1
            weight = (1 / known[:, 2:].clamp(min=1)).clamp(min=_NEWEST)
            mean = new[:, :2] / new[:, 2:].clamp(min=1)
            known[:, :2] = torch.where(found[:, None], known[:, :2] + weight * (mean - known[:, :2]), known[:, :2])
            state[_MOMENTS] = known.tolist()
    alone = float(trainer.args.critic_share != 0)
    shares = torch.where(count > 1, share, alone).repeat_interleave(torch.tensor(sizes, device=count.device))
    return shares[here] if here else shares
