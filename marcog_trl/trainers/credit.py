"""Credit of a generation batch: advantages of rows over their siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from marcog_trl.algorithms.advantages import SumOverProcesses, group_advantages
from marcog_trl.trainers.layout import Rollout


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def over_siblings(trainer: MultiAgentTrainer, rollout: Rollout, **options: Any) -> torch.Tensor:
    """Calls [`group_advantages`] with these options, `(B,)`. Siblings may be on other processes."""
    rows = rollout.row_returns(), rollout.learning, rollout.agent
    here, sums = slice(0, len(rollout.rows)), cast(SumOverProcesses | None, trainer._sum_over_processes)
    siblings: int | list[int] = rollout.tree.siblings * (len(rollout.rows) // len(rollout.tree.slots))
    if trainer._splits_groups(trainer.model.training):
        begin = trainer.accelerator.process_index * len(rollout.rows)
        here, sums = slice(begin, begin + len(rollout.rows)), None
        siblings = trainer._tree(trainer.model.training).siblings[0]
        rows = tuple(trainer.accelerator.gather(x) for x in rows)
    returns, live, agents = rows
    return group_advantages(returns, siblings, mask=live, agents=agents, sums=sums, **options)[here]
