"""Trains the team's own modules beside the adapter: parameter groups and clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from marcog_trl.team.modules import ATTRIBUTE, TeamModule
from marcog_trl.trainers.argument_checks import held_by
from marcog_trl.trainers.modules_checkpoints import ModulesCheckpoints
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


POLICY = "policy"


class ModulesTrainer(ModulesCheckpoints, MultiAgentTrainer):
    """
    A [`MultiAgentTrainer`] of a team that has modules of its own, such as a value head.

    Every module has its learning rate and is clipped by its own norm, under DeepSpeed ZeRO too.

    Args: see [`MultiAgentTrainer`].
    """

    def __init__(self, *args, **kwargs):
        # Under ZeRO, of the last step: gradient norms by group, one per part that the optimizer stepped on
        self._clips_shards = False
        self._shard_norms: dict[str, list[torch.Tensor]] = defaultdict(list)
        super().__init__(*args, **kwargs)
        if self.use_vllm:
            self._keep_modules_from_vllm()

    def _build_modules(self) -> TeamModule:
        """The team's modules, before they are attached to the model."""
        raise NotImplementedError

    def _grouped_modules(self) -> dict[str, nn.Module | None]:
        """The modules whose parameters are a group, by the group's name."""
        raise NotImplementedError

    def _learning_rates(self) -> dict[str, float]:
        """Learning rates of the groups that do not have the policy's."""
        raise NotImplementedError

    @property
    def modules(self) -> TeamModule:
        """The team's own modules."""
        assert self.team.modules is not None
        return self.team.modules

    def _make_modules(self) -> TeamModule:
        if self.is_fsdp_enabled:
            raise ValueError("FSDP cannot shard the team's modules beside the model. Use DeepSpeed ZeRO or DDP.")
        modules = self._build_modules()
        adapter = next(p for p in self.model.parameters() if p.requires_grad)
        # ZeRO-3 wants one dtype, and keeps float32 copies itself. Elsewhere small steps would be lost in the bfloat16 that TRL
        # gives the adapter of a quantized model
        dtype = adapter.dtype if self.is_deepspeed_enabled else torch.promote_types(adapter.dtype, torch.float32)
        modules.to(device=self.accelerator.device, dtype=dtype)
        modules.attach(self._causal_lm)
        self._check_optimizer_of(modules)
        return modules

    def _keep_modules_from_vllm(self) -> None:
        """vLLM has the language model only: what TRL sends it after an update must leave the team's modules out."""
        named_params = self.vllm_generation._iter_named_params

        def without_modules() -> Iterator[tuple[str, torch.Tensor]]:
            return (pair for pair in named_params() if not pair[0].startswith(f"{ATTRIBUTE}."))

        self.vllm_generation._iter_named_params = without_modules  # type: ignore[method-assign]

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Initialises the team's modules without moving the random state that the policy sees."""
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            yield

    def _check_optimizer_of(self, modules: TeamModule) -> None:
        held = held_by(self.optimizer)
        missing = [name for name, p in modules.named_parameters() if held is not None and id(p) not in held]
        if missing:
            networks = sorted({name.partition(".")[0] for name in missing})
            raise ValueError(
                f"The optimizer lacks the team's {', '.join(networks)}, which the trainer makes. Leave optimizers out and set "
                "optim, learning_rate and critic_learning_rate, or set trainer.optimizer before train() to one made of the "
                "trainable parameters of trainer.model."
            )

    def _parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by group; each group has its learning rate and its gradient norm."""
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
            self._clips_shards = self._can_clip_shards()
            if self._clips_shards:
                self.accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
                optimizer.register_step_pre_hook(self._clip_shards)
        return optimizer

    def _can_clip_shards(self) -> bool:
        """Whether the optimizer's own step, in this process, sees its shard of each group's gradients."""
        if not self.is_deepspeed_enabled or not self.args.max_grad_norm:
            return False
        plugin = self.accelerator.deepspeed_plugin
        return plugin.zero_stage > 0 and not plugin.hf_ds_config.is_offload()

    @torch.no_grad()
    def _clip_shards(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """`_clip_grad_norm` under ZeRO, which steps group by group on flat shards of the gradients."""
        for group in optimizer.param_groups:
            shards = [p.grad for p in group["params"] if p.grad is not None]
            if shards:
                square = torch.stack([shard.float().square().sum() for shard in shards]).sum()
                norm = self._sum_over_processes(square).sqrt()
                for shard in shards:
                    shard.mul_((self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
                self._shard_norms[group["group"]].append(norm)

    def _clip_grad_norm(self, model):
        """Clips each group by its own norm: one joint norm would let a value loss throttle the policy."""
        if self.is_deepspeed_enabled and not self._clips_shards:
            return super()._clip_grad_norm(model)  # DeepSpeed's joint norm
        if self.is_deepspeed_enabled:
            norms = {name: torch.stack(parts).norm() for name, parts in self._shard_norms.items()}
            self._shard_norms.clear()
        else:
            groups = self._parameter_groups()
            # The policy's first: with a gradient scaler (fp16) accelerate unscales the gradients of all groups, once
            norms = {POLICY: super()._clip_grad_norm(nn.ParameterList(groups.pop(POLICY)))}
            for name, params in groups.items():
                norms[name] = nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
        for name, norm in norms.items():
            if name != POLICY:
                self._metric(f"grad_norm/{name}", float(norm))
        return norms.get(POLICY)
