"""Parameter groups: the policy and the team's modules have their own learning rates and gradient norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from marcog_trl.processes import sum_over_processes


POLICY = "policy"


def parameters_by_group(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
    """
    Returns the trainable parameters of each group, the policy's first.

    Args:
        model (`torch.nn.Module`): The model, with the team's modules.
        modules (`Mapping[str, torch.nn.Module]`): The module of each group beside the policy.
    """
    groups = {name: [p for p in module.parameters() if p.requires_grad] for name, module in modules.items()}
    own = {id(p) for group in groups.values() for p in group}
    return {POLICY: [p for p in model.parameters() if p.requires_grad and id(p) not in own], **groups}


def split_groups(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, list[nn.Parameter]], rates: Mapping[str, float]
) -> None:
    """
    Splits the groups of a new optimizer, which differ in options such as weight decay or GaLore's rank, by these groups.

    Args:
        optimizer (`torch.optim.Optimizer`): The optimizer.
        groups (`Mapping[str, list[torch.nn.Parameter]]`): See [`parameters_by_group`].
        rates (`Mapping[str, float]`): Learning rates of the groups that do not use the optimizer's.
    """
    group_of = {id(p): name for name, params in groups.items() for p in params}
    split: dict[tuple[str, str], dict[str, Any]] = {}
    for group in optimizer.param_groups:
        own = repr({option: value for option, value in group.items() if option != "params"})
        for p in group["params"]:
            name = group_of.get(id(p), POLICY)  # GaLore's groups have frozen parameters, too
            options = {**group, "params": [], "lr": rates.get(name, group["lr"]), "group": name}
            split.setdefault((name, own), options)["params"].append(p)
    optimizer.param_groups.clear()
    for group in split.values():
        optimizer.add_param_group(group)


class ShardClipping:
    """
    Clips each group by its own norm where ZeRO steps on flat shards of the gradients, group by group.

    Args:
        optimizer (`torch.optim.Optimizer`): The optimizer, split by [`split_groups`].
        max_norm (`float`): Largest norm of a group's gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float):
        self._max_norm = max_norm
        self._parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        optimizer.register_step_pre_hook(self._clip)

    @torch.no_grad()
    def _clip(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups:
            shards = [p.grad for p in group["params"] if p.grad is not None]
            if shards:
                norm = sum_over_processes(torch.stack([shard.float().square().sum() for shard in shards]).sum()).sqrt()
                for shard in shards:
                    shard.mul_((self._max_norm / (norm + 1e-6)).clamp(max=1.0))
                self._parts[group["group"]].append(norm)

    def norms(self) -> dict[str, torch.Tensor]:
        """Returns the norm of each group before it was clipped, of the steps since the last call."""
        norms = {name: torch.stack(parts).norm() for name, parts in self._parts.items()}
        self._parts.clear()
        return norms
