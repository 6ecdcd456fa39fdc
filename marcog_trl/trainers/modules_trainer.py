"""Trains the team's modules together with the adapter: parameter groups and clipping."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from marcog_trl.team.modules import ATTRIBUTE, TeamModule
from marcog_trl.team.vllm import LanguageModelGeneration
from marcog_trl.trainers.argument_checks import held_by
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


POLICY = "policy"


class ModulesTrainer(MultiAgentTrainer):
    """
    A [`MultiAgentTrainer`] for teams with their own modules, such as a value head.

    Every module has its own learning rate and is clipped by its own gradient norm, also with DeepSpeed ZeRO.

    Args: see [`MultiAgentTrainer`].
    """

    # With ZeRO, gradient norms of the last step by group, one per part that the optimizer steps on; else `None`
    _shard_norms: dict[str, list[torch.Tensor]] | None = None

    def _build_modules(self) -> TeamModule:
        """Creates the team's modules, without attaching them to the model."""
        raise NotImplementedError

    def _grouped_modules(self) -> dict[str, nn.Module | None]:
        """Returns the module of each parameter group, by the group's name."""
        raise NotImplementedError

    def _learning_rates(self) -> dict[str, float]:
        """Returns the learning rates of the groups that do not use the policy's."""
        raise NotImplementedError

    @property
    def modules(self) -> TeamModule:
        """The team's modules."""
        assert self.team.modules is not None
        return self.team.modules

    def _make_modules(self) -> TeamModule:
        if self.is_fsdp_enabled:
            raise ValueError("FSDP is not supported: it cannot shard the team's modules. Use DeepSpeed ZeRO or DDP.")
        modules = self._build_modules()
        adapter = next(p for p in self.model.parameters() if p.requires_grad)
        # ZeRO-3 needs one dtype, and keeps float32 copies itself. Otherwise, small updates would be lost in bfloat16, which TRL
        # uses for the adapter of a quantized model
        dtype = adapter.dtype if self.is_deepspeed_enabled else torch.promote_types(adapter.dtype, torch.float32)
        modules.to(device=self.accelerator.device, dtype=dtype)
        modules.attach(self._causal_lm)
        if (
            self.ref_model is not None and self.args.sync_ref_model
        ):  # TRL's callback pairs the parameters of both models
            reference = self.accelerator.unwrap_model(self.ref_model)
            reference.add_module(ATTRIBUTE, copy.deepcopy(modules).requires_grad_(False))
        self._check_optimizer_of(modules)
        if self.use_vllm:
            self.vllm_generation = LanguageModelGeneration(self.vllm_generation)
        return modules

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Initialises the team's modules without changing the random state of the policy."""
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            yield

    def _check_optimizer_of(self, modules: TeamModule) -> None:
        held = held_by(self.optimizer)
        missing = [name for name, p in modules.named_parameters() if held is not None and id(p) not in held]
        if missing:
            networks = sorted({name.partition(".")[0] for name in missing})
            raise ValueError(
                f"The optimizer lacks the team's {', '.join(networks)}, which the trainer creates. Leave optimizers out and set "
                "optim, learning_rate and critic_learning_rate. Or, before train(), set trainer.optimizer to one that has the "
                "trainable parameters of trainer.model."
            )

    def _parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns the trainable parameters of each group."""
        groups = {
            name: [p for p in module.parameters() if p.requires_grad]
            for name, module in self._grouped_modules().items()
            if module is not None
        }
        own = {id(p) for group in groups.values() for p in group}
        policy = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        return {POLICY: policy, **groups}

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if created:
            group_of = {id(p): name for name, params in self._parameter_groups().items() for p in params}
            rates = self._learning_rates()
            split: dict[tuple[str, float], dict[str, Any]] = {}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    name = group_of[id(p)]
                    options = {**group, "params": [], "lr": rates.get(name, group["lr"]), "group": name}
                    split.setdefault((name, group["weight_decay"]), options)["params"].append(p)
            optimizer.param_groups.clear()
            for group in split.values():
                optimizer.add_param_group(group)
            if self._can_clip_shards():
                self._shard_norms = defaultdict(list)
                self.accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
                optimizer.register_step_pre_hook(self._clip_shards)
        return optimizer

    def _can_clip_shards(self) -> bool:
        """Whether the optimizer's step on this process has its shard of each group's gradients."""
        if not self.is_deepspeed_enabled or not self.args.max_grad_norm:
            return False
        plugin = self.accelerator.deepspeed_plugin
        return plugin.zero_stage > 0 and not plugin.hf_ds_config.is_offload()

    @torch.no_grad()
    def _clip_shards(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Does the work of `_clip_grad_norm` with ZeRO, which steps on flat shards of the gradients, group by group."""
        for group in optimizer.param_groups:
            shards = [p.grad for p in group["params"] if p.grad is not None]
            if shards:
                square = torch.stack([shard.float().square().sum() for shard in shards]).sum()
                norm = self._sum_over_processes(square).sqrt()
                for shard in shards:
                    shard.mul_((self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
                cast(dict, self._shard_norms)[group["group"]].append(norm)

    def _clip_grad_norm(self, model):
        """Clips each group by its own norm. With one joint norm, a large value loss would shrink the policy's gradient."""
        if self.is_deepspeed_enabled and self._shard_norms is None:
            return super()._clip_grad_norm(model)  # DeepSpeed's joint norm
        if self._shard_norms is not None:
            norms = {name: torch.stack(parts).norm() for name, parts in self._shard_norms.items()}
            self._shard_norms.clear()
        else:
            groups = self._parameter_groups()
            # The policy first: with fp16, accelerate unscales the gradients of all groups in the first call
            norms = {POLICY: super()._clip_grad_norm(nn.ParameterList(groups.pop(POLICY)))}
            for name, params in groups.items():
                norms[name] = nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
        for name, norm in norms.items():
            if name != POLICY:
                self._metric(f"grad_norm/{name}", float(norm))
        return norms.get(POLICY)
