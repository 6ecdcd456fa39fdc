"""
Converts the heterogeneity layer to ordinary LoRA adapters: one per latent, or one per block of the rank.

The conversion is exact: `B (I + C) A` is a LoRA of the same rank with `B' = B (I + C)`, and a block of the rank is a LoRA of
a smaller rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.utils.integrations import gather_params_ctx
from safetensors.torch import save_file
from transformers import PreTrainedModel

from marcog_trl.heterogeneity.cores import ADAPTER, adapted_layers


Adapters = list[tuple[dict[str, torch.Tensor], LoraConfig]]
"""State and configuration of the adapter of each agent."""


def fold_adapters(
    model: PeftModel,
    cores: Sequence[torch.Tensor],
    save_embedding_layers: bool | Literal["auto"] = False,
) -> Adapters:
    """
    Fold the cores of each agent into an adapter: `B' = B (I + C)` in each layer.

    Under ZeRO-3 all processes must call this function, because it gathers the adapter.

    Args:
        model ([`~peft.PeftModel`]): Model with the shared adapter.
        cores (`Sequence[torch.Tensor]`): Cores of the N agents, one tensor of shape `(N, r, r)` per adapted layer.
        save_embedding_layers (`bool` or `str`, *optional*, defaults to `False`):
            Whether to include the embeddings. `"auto"` includes them if the vocabulary was resized, which PEFT reads
            from the files of the base model.

    Returns:
        `Adapters`: The tensors of an ordinary LoRA adapter per agent, with the keys of its file, and its configuration. They are
        copies, except that agents share tensors that are the same for all of them.
    """
    num_agents, state = len(cores[0]), _adapter_state(model, save_embedding_layers)
    states = [dict(state) for _ in range(num_agents)]
    with torch.no_grad():
        for name, core in zip(adapted_layers(model), cores, strict=True):
            key = f"{name}.lora_B.weight"
            up = state[key].to(torch.promote_types(state[key].dtype, torch.float32))
            folded = torch.baddbmm(up.expand(num_agents, *up.shape), up.expand(num_agents, *up.shape), core.to(up))
            for agent, own in enumerate(folded.to(state[key].dtype)):
                states[agent][key] = own
    return [(own, _config(model)) for own in states]


def save_adapters(
    model: PeftModel, adapters: Adapters, paths: Sequence[str | Path | None], is_main_process: bool = True
) -> None:
    """
    Save the adapters of [`fold_adapters`] or [`split_adapter`] in the format of PEFT.

    Args:
        model ([`~peft.PeftModel`]): Model with the shared adapter.
        adapters (`Adapters`): State and configuration of each agent.
        paths (`Sequence[str]` or `Sequence[Path]`): One directory per agent, for `adapter_config.json` and
            `adapter_model.safetensors`; `None` for one whose adapter is not saved.
        is_main_process (`bool`, *optional*, defaults to `True`): Whether this process writes.
    """
    for path, (state, config) in zip(paths, adapters, strict=True):
        if path is not None and is_main_process:
            _write(state, config, model, path)


def stack_config(config: LoraConfig, num_agents: int) -> LoraConfig:
    """
    Make the configuration of one adapter that holds the adapters of N agents, for `parameter_sharing="separate"`.

    Args:
        config ([`~peft.LoraConfig`]): Configuration of the adapter of one agent.
        num_agents (`int`): N, number of agents.

    Returns:
        [`~peft.LoraConfig`]: A copy with N times the rank and the same scaling of `B A`, also in rank and alpha patterns.
    """
    return _rescale(config, lambda rank: rank * num_agents, num_agents)


def split_adapter(
    model: PeftModel,
    num_agents: int,
    save_embedding_layers: bool | Literal["auto"] = False,
) -> Adapters:
    """
    Split an adapter of rank N·r into N ordinary adapters of rank r, with the same scaling.

    Under ZeRO-3 all processes must call this function, because it gathers the adapter.

    Args:
        model ([`~peft.PeftModel`]): Model with an adapter made with [`stack_config`].
        num_agents (`int`): N, number of agents.
        save_embedding_layers (`bool` or `str`, *optional*, defaults to `False`): As in [`fold_adapters`].

    Returns:
        `Adapters`: State and configuration of each agent. Agent i has the i-th block of the rank of each layer.
    """
    layers = adapted_layers(model)
    config = _rescale(_config(model), lambda rank: rank // num_agents, 1 / num_agents)
    whole = _adapter_state(model, save_embedding_layers)
    adapters = []
    for agent in range(num_agents):
        state = {key: tensor.clone() for key, tensor in whole.items()}
        for name in layers:
            down, up = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            state[down] = state[down].chunk(num_agents, dim=0)[agent].clone()
            state[up] = state[up].chunk(num_agents, dim=1)[agent].clone()
        adapters.append((state, copy.deepcopy(config)))
    return adapters


def _config(model: PeftModel) -> LoraConfig:
    return cast(LoraConfig, model.peft_config[ADAPTER])


def _adapter_state(model: PeftModel, save_embedding_layers: bool | Literal["auto"]) -> dict[str, torch.Tensor]:
    """Copies of the tensors that PEFT saves for the adapter, gathered under ZeRO-3."""
    parameters = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or ADAPTER in name.split(".")
    ]
    with gather_params_ctx(parameters, modifier_rank=None):
        state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=save_embedding_layers)
        return {key: tensor.detach().clone() for key, tensor in state.items()}


def _rescale(config: LoraConfig, rank: Callable[[int], int], factor: float) -> LoraConfig:
    """A copy of `config` with all ranks times `factor` (which `rank` computes) and the same scaling: alpha / r or alpha / √r."""
    alpha_factor = math.sqrt(factor) if config.use_rslora else factor

    def alpha(value: float) -> float:
        scaled = value * alpha_factor
        return round(scaled) if math.isclose(scaled, round(scaled)) else scaled

    config = copy.deepcopy(config)
    config.r = rank(config.r)
    config.lora_alpha = alpha(config.lora_alpha)  # type: ignore[assignment]  # may be a fraction with rsLoRA
    config.rank_pattern = {key: rank(value) for key, value in (config.rank_pattern or {}).items()}
    config.alpha_pattern = {key: alpha(value) for key, value in (config.alpha_pattern or {}).items()}
    return config


def _write(state: dict[str, torch.Tensor], config: LoraConfig, model: PeftModel, path: str | Path) -> None:
    config = copy.deepcopy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = cast(PreTrainedModel, model.get_base_model()).name_or_path or None
    Path(path).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(path))
    tensors = {key: tensor.cpu().contiguous() for key, tensor in state.items()}
    save_file(tensors, Path(path) / "adapter_model.safetensors", metadata={"format": "pt"})
