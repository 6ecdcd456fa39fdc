"""Saves a team before any training: what a first round begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoTokenizer

from marcog_trl.agents import Workflow
from marcog_trl.heterogeneity import CoreDecoder, LatentNet, LoraCores, check_peft_config, stack_config
from marcog_trl.team.description import MODULES_FILE, TeamDescription
from marcog_trl.team.loading import load_base_model
from marcog_trl.team.settings import TeamSettings
from marcog_trl.trainers.adapter_targets import resolve_all_linear
from marcog_trl.trainers.config import SHPPOConfig


def save_untrained_team(
    path: str | Path,
    model: str,
    settings: TeamSettings | None = None,
    peft_config: LoraConfig | None = None,
    workflow: Workflow | str | None = None,
    rewards: tuple[str, ...] = ("execution_reward",),
    init_core_scale: float = SHPPOConfig.init_core_scale,
    seed: int = 0,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """
    Saves a team on an untrained model, with an adapter that changes nothing yet.

    [`Team.from_pretrained`] and [`MADPOTrainer`] load it. Call it on one process.

    Args:
        path (`str` or `Path`): Folder to write.
        model (`str`): Name or path of the base model.
        settings ([`TeamSettings`], *optional*): Workflow, generation, and what agents share. The default workflow is `"single"`.
        peft_config ([`~peft.LoraConfig`], *optional*): Defaults to LoRA of rank 16 on all linear layers.
        workflow ([`Workflow`] or `str`, *optional*): The team's workflow, if it is not a built-in one.
        rewards (`tuple[str, ...]`, *optional*, defaults to `("execution_reward",)`): Names of the team's rewards.
        init_core_scale (`float`, *optional*, defaults to `0.3`): As in [`SHPPOConfig`].
        seed (`int`, *optional*, defaults to `0`): Seed of the adapter and of the team's networks.
        model_init_kwargs (`Mapping`, *optional*): Keyword arguments for the base model's `from_pretrained`.

    Raises:
        ValueError: If the settings do not fit the workflow, or the adapter does not support `settings.parameter_sharing`.
    """
    path, settings = Path(path), settings or TeamSettings()
    played = settings.make_workflow(workflow)
    config = peft_config or LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    sharing = settings.parameter_sharing
    if sharing != "shared":
        check_peft_config(config)
    base = load_base_model(model, None, model_init_kwargs or {}, "cpu")
    if config.target_modules == "all-linear":
        config = dataclasses.replace(config, target_modules=resolve_all_linear(base, experts=sharing == "shared"))
    if sharing == "separate":
        config = stack_config(config, len(played.agents))
    described: dict[str, Any] = {"parameter_sharing": sharing}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: PeftModel = get_peft_model(base, config)
        if settings.has_latents:
            described |= {"latent_scope": settings.latent_scope, "latent_size": settings.latent_size}
            starts_at_zero = config.init_lora_weights in (True, "gaussian")
            size = 2 * base.config.get_text_config().hidden_size
            networks = {
                "core_decoder": CoreDecoder(
                    settings.latent_size, LoraCores(adapted).ranks, init_core_scale * starts_at_zero
                ),
                "latent_net": LatentNet(size, settings.latent_size, sigma_min=settings.sigma_min),
            }
            path.mkdir(parents=True, exist_ok=True)
            weights = {f"{name}.{key}": x for name, net in networks.items() for key, x in net.state_dict().items()}
            save_file(weights, path / MODULES_FILE, metadata={"format": "pt"})
    adapted.save_pretrained(str(path))
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    TeamDescription.of("", adapted, played, rewards, settings, described).write(path)
