"""Credit of a generation batch: advantages of rows over their siblings."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import torch

from marcog_trl.agents import Slot
from marcog_trl.algorithms.advantages import SumOverProcesses, group_advantages
from marcog_trl.algorithms.counterfactual import critic_share, influence, sibling_moments
from marcog_trl.rollout.tree import Level
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def is_counterfactual(trainer: MultiAgentTrainer) -> bool:
    """Whether siblings are replies in exactly the same context. Evaluation never branches."""
    return trainer.model.training and trainer.args.credit == "counterfactual"


def over_siblings(trainer: MultiAgentTrainer, rollout: Rollout, **options: Any) -> torch.Tensor:
    """
    Calls [`group_advantages`] with these options, `(B,)`. Siblings may be on other processes. Counterfactual credit has the mean
    of the other siblings as its baseline.
    """
    if is_counterfactual(trainer):
        options["kind"] = "rloo"
    rows = rollout.row_returns(), rollout.learning, rollout.agent
    here, sums = slice(0, len(rollout.rows)), cast(SumOverProcesses | None, trainer._sum_over_processes)
    siblings: int | list[int] = rollout.siblings
    if trainer._splits_groups(trainer.model.training):
        begin = trainer.accelerator.process_index * len(rollout.rows)
        here, sums = slice(begin, begin + len(rollout.rows)), None
        siblings = trainer._tree(trainer.model.training).siblings[0]
        rows = tuple(trainer.accelerator.gather(x) for x in rows)
    returns, live, agents = rows
    return group_advantages(returns, siblings, mask=live, agents=agents, sums=sums, **options)[here]


_MOMENTS = "counterfactual_critic"
_NEWEST = 0.1  # least weight of the newest batch in running means


def critic_shares(trainer: MultiAgentTrainer, rollout: Rollout, values: torch.Tensor) -> torch.Tensor:
    """
    Returns the share of the critic in the baseline of each row, `(B,)`. `"auto"` estimates it for each slot from earlier batches,
    and keeps what it knows in the trainer's state, which checkpoints have.

    Args:
        trainer ([`MultiAgentPPOTrainer`]): The trainer.
        rollout ([`Rollout`]): The batch.
        values (`torch.Tensor` of shape `(B,)`): The critic's value of the context of each row.
    """
    sizes, slots = rollout.siblings, trainer.workflow.slots
    variance, error, count = sibling_moments(rollout.row_returns(), values, rollout.live, sizes)
    first = torch.tensor([0, *itertools.accumulate(sizes)][:-1], device=count.device)
    slot = torch.tensor([slots.index(slot) for slot in rollout.tree.slots], device=count.device)
    slot = slot[first % len(slot)]
    share = torch.full_like(count, trainer.args.critic_share or 0.0)
    if trainer.args.critic_share is None:
        # Sums of σ² and δ² over the batches so far, by slot, and their number
        state = cast(dict, trainer.state.stateful_callbacks)
        known = torch.tensor(state.get(_MOMENTS, [[0.0] * 3] * len(slots)), device=count.device)
        share = critic_share(known[slot, 0], known[slot, 1], count) * (known[slot, 2] > 0)
        new = torch.stack([variance, error, torch.ones_like(count)], dim=1) * (count > 1)[:, None]
        new = trainer._sum_over_processes(torch.zeros_like(known).index_add(0, slot, new))
        found = new[:, 2] > 0
        known[found, 2] += 1
        weight = (1 / known[:, 2:].clamp(min=1)).clamp(min=_NEWEST)
        mean = new[:, :2] / new[:, 2:].clamp(min=1)
        known[:, :2] = torch.where(found[:, None], known[:, :2] + weight * (mean - known[:, :2]), known[:, :2])
        state[_MOMENTS] = known.tolist()
    alone = float(trainer.args.critic_share != 0)
    return torch.where(count > 1, share, alone).repeat_interleave(torch.tensor(sizes, device=count.device))


def measures_influence(trainer: MultiAgentTrainer) -> bool:
    """Whether the influence of the agents on each other is measured in this step."""
    every = trainer.args.influence_steps
    return every is not None and is_counterfactual(trainer) and trainer.state.global_step % every == 0


@torch.no_grad()
def log_influence(trainer: MultiAgentTrainer, output: dict[str, Any], rollout: Rollout) -> None:
    """
    Logs how much what each agent says changes what the next one says: `influence/<agent>/<next agent>`, in nats.

    Every reply is scored in the contexts that its agent has after the siblings of the reply before it.
    """
    tree, mask = rollout.tree, output["completion_mask"]
    begin = torch.arange(0, len(rollout.rows), len(tree.slots))[:, None, None, None]
    # Rows of each slot after another level, (problem, context of that level, its reply, own reply)
    rows: dict[tuple[Level, Slot], torch.Tensor] = {}
    for level, later in itertools.pairwise(tree.levels):
        for slot in later.slots if level.replies > 1 else ():
            places = torch.tensor([place for place, of_row in enumerate(tree.slots) if of_row == slot])
            rows[level, slot] = begin + places.view(-1, level.replies, later.replies)
    logps = []
    for shift in range(max((level.replies for level, _ in rows), default=0)):
        contexts = torch.arange(len(rollout.rows))
        for index in rows.values():
            contexts[index] = index.roll(shift, dims=2)
        logps.append((_logps_in(trainer, output, contexts.to(mask.device)) * mask).sum(1))
    sums: dict[str, torch.Tensor] = {}
    for (level, slot), index in rows.items():
        known = rollout.live[index].all(2, keepdim=True).expand(index.shape)
        found = influence(torch.stack(logps[: level.replies], dim=1)[index[known.to(index.device)]])
        name = f"influence/{' and '.join(earlier.agent for earlier in level.slots)}/{slot.agent}"
        pair = torch.stack([found.sum(), known.sum().to(found)])
        sums[name] = sums[name] + pair if name in sums else pair
    totals = trainer._sum_over_processes(torch.stack(list(sums.values()))) if sums else torch.zeros(0, 2)
    for name, (total, count) in zip(sums, totals.tolist(), strict=True):
        if count:
            trainer._metric(name, total / count)


def _logps_in(trainer: MultiAgentTrainer, output: dict[str, Any], contexts: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each row's tokens, `(B, T)`, after the prompts of these rows, `(B,)`."""
    own = trainer._row_tensors
    trainer._row_tensors = None if own is None else {name: tensor[contexts] for name, tensor in own.items()}
    logps = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([output["prompt_ids"][contexts], output["completion_ids"]], dim=1),
        torch.cat([output["prompt_mask"][contexts], output["completion_mask"]], dim=1),
        output["completion_ids"].size(1),
        batch_size=trainer.args.per_device_train_batch_size,
    )[0]
    trainer._row_tensors = own
    return logps
