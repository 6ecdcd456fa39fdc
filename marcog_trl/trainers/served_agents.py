"""Serves the agents of an SHPPO team with vLLM: one LoRA adapter per agent, updated when weights or latents change."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from trl.extras.profiling import profiling_context

from marcog_trl.heterogeneity import fold_adapters, split_adapter
from marcog_trl.rollout.records import Row
from marcog_trl.team.vllm import AgentGeneration
from marcog_trl.trainers.argument_checks import TOOLS_WITHOUT_VLLM


if TYPE_CHECKING:
    from marcog_trl.trainers.shppo_trainer import SHPPOTrainer


class ServedAgents:
    """
    Replaces TRL's vLLM backend in a trainer.

    Args:
        trainer ([`SHPPOTrainer`]): The trainer, created without a backend.
    """

    def __init__(self, trainer: SHPPOTrainer):
        if trainer.team.tools is not None:
            raise ValueError(TOOLS_WITHOUT_VLLM)
        self._trainer = trainer
        self._noise: torch.Tensor | None = None  # noise of the latents in the engine
        args, config = trainer.args, trainer.model.peft_config["default"]
        blocks = len(trainer.agents) if args.parameter_sharing == "separate" else 1
        self._generation = AgentGeneration(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            num_agents=len(trainer.agents),
            rank=max([config.r, *config.rank_pattern.values()]) // blocks,
            revision=cast(dict, args.model_init_kwargs or {}).get("revision"),
            refresh=self._refresh,
            mode=args.vllm_mode,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * cast(int, args.steps_per_generation),
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            repetition_penalty=trainer.repetition_penalty,
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k,
            min_p=trainer.min_p,
            max_completion_length=trainer.max_completion_length,
            logprobs=0,
            generation_kwargs=args.generation_kwargs,
        )
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = self._generation

    def prepare(self, rows: list[Row]) -> None:
        """Sets the agents of the next prompts, and marks the engine's adapters as stale if the latents have changed."""
        trainer = self._trainer
        self._generation.row_agents = [trainer.agents.index(row.slot.agent) for row in rows] or [0]
        noise = trainer._agent_noise if trainer.model.training else None
        if noise is None:
            noise = torch.zeros(len(trainer.agents), trainer.args.latent_size, device=trainer.accelerator.device)
        if self._noise is None or not torch.equal(self._noise, noise):
            self._generation.stale, self._noise = True, noise

    @torch.no_grad()
    def _refresh(self) -> None:
        """Loads the current adapters of the agents into vLLM."""
        trainer = self._trainer
        with profiling_context(trainer, "refresh_agents"):
            if trainer.args.parameter_sharing == "separate":
                self._generation.load(split_adapter(trainer.model, len(trainer.agents)))
                return
            assert self._noise is not None
            mu, sigma = trainer.modules.latents(trainer.team.role_observations)
            cores = trainer.modules.cores(mu + sigma * self._noise)
            config = trainer.model.peft_config["default"]
            self._generation.load([(state, config) for state in fold_adapters(trainer.model, cores)])
