"""
Checks the adapter to train, and resolves `target_modules="all-linear"` for models with experts or with layers that PEFT refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import DeepSpeedPlugin
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from marcog_trl.team.base_models import TRAIN_FURTHER, check_no_adapter


# In models with fused experts, PEFT maps these names to parts of the experts, even if other layers have them
EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Layers of Mamba blocks: the model may read their weights without calling them, and so skip an adapter. PEFT refuses `out_proj`
MAMBA_NAMES = ("out_proj", "x_proj", "dt_proj")
NOT_TRAINED = {
    PeftType.ADALORA: "moves ranks between layers in calls of update_and_allocate, which TRL's trainers do not make",
    PeftType.XLORA: "mixes adapters by a forward pass of its own, which needs use_cache=False and so slows generation down",
    PeftType.ADAPTION_PROMPT: "adds virtual tokens inside attention layers, which PEFT does not save and load as other adapters",
    PeftType.POLY: "needs a task_id with every forward pass",
}
# Initialisations of LoRA that keep the weights of the base model. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them
BASE_KEPT = (True, False, "gaussian", "orthogonal", "mica", "eva")


def resolve_all_linear(
    model: str | PreTrainedModel, experts: bool, model_init_kwargs: dict[str, Any] | None = None
) -> str | list[str]:
    """
    Returns the `target_modules` for all linear layers of a model.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): The model, or its path or name.
        experts (`bool`):
            Whether to adapt blocks with experts, as PEFT does. Experts do not know which row a token belongs to.
        model_init_kwargs (`dict`, *optional*): Keyword arguments for loading a model by name.

    Returns:
        `str` or `list[str]`: `"all-linear"` if PEFT supports it for the model. Otherwise the names of the linear layers
        that all tokens pass.
    """
    model = _skeleton(model, model_init_kwargs or {}) if isinstance(model, str) else model
    modules = dict(model.named_modules())
    blocks = () if experts else tuple(name.removesuffix("experts") for name in modules if name.endswith(".experts"))
    mambas = tuple(
        f"{name}." for name, module in modules.items() if {"A_log", "D"} <= dict(module.named_parameters(recurse=False)).keys()
    )  # fmt: skip
    if not blocks and not mambas:
        return "all-linear"

    def supported(name: str) -> bool:
        leaf = name.rpartition(".")[2]
        if blocks and (name.startswith(blocks) or leaf in EXPERT_NAMES):
            return False
        return not (mambas and name.startswith(mambas) and leaf in MAMBA_NAMES)

    head = model.get_output_embeddings()
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head]
    wanted = {name for name in linear if supported(name)}
    others = {name.rpartition(".")[2] for name in linear if name not in wanted}
    # Use short layer names where possible, as vLLM expects
    return sorted({name if (leaf := name.rpartition(".")[2]) in others else leaf for name in wanted})


@contextmanager
def outside_zero3(plugin: DeepSpeedPlugin | None) -> Iterator[None]:
    """
    Disables ZeRO-3's model initialisation, so that transformers can build a model without weights.

    Args:
        plugin ([`~accelerate.DeepSpeedPlugin`], *optional*): The DeepSpeed plugin of the run, if it uses DeepSpeed.
    """
    if plugin is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def _skeleton(name: str, model_init_kwargs: dict[str, Any]) -> PreTrainedModel:
    """Builds a model without weights."""
    kept = ("revision", "trust_remote_code", "cache_dir", "token", "subfolder")
    options = {key: model_init_kwargs[key] for key in kept if key in model_init_kwargs}
    config = AutoConfig.from_pretrained(name, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=options.get("trust_remote_code", False))


def adapter_name(config: PeftConfig) -> str:
    """Returns what an adapter is called, with its rank, if it has one."""
    name = type(config).__name__.removesuffix("Config").replace("Lora", "LoRA").replace("Vera", "VeRA")
    rank = getattr(config, "r", None)
    return f"{name} of rank {rank}" if rank else name


def check_type(config: PeftConfig) -> None:
    """
    Refuses adapters that TRL's trainers do not train as their method says.

    Args:
        config ([`~peft.PeftConfig`]): The adapter's configuration.

    Raises:
        ValueError: If the adapter is one of them.
    """
    why = NOT_TRAINED.get(cast(PeftType, config.peft_type))
    if config.is_prompt_learning:
        why = "adds virtual tokens, which shift the tokens of a reply"
    if why is not None:
        raise ValueError(
            f"peft_config is a {type(config).__name__}, which {why}. Use an adapter of layers, such as LoraConfig or IA3Config."
        )


def check_start(config: PeftConfig, made: bool = False) -> None:
    """
    Refuses an initialisation of LoRA that changes the base model: neither a saved team nor an exported agent, which have the
    adapter alone, nor the reference of `beta` would be what was trained.

    Args:
        config ([`~peft.PeftConfig`]): The adapter's configuration.
        made (`bool`, *optional*, defaults to `False`): Whether a model has this adapter already.

    Raises:
        ValueError: If the initialisation changes the base model, or needs data before the adapter is made.
    """
    start = getattr(config, "init_lora_weights", True)
    if start not in BASE_KEPT:
        raise ValueError(
            f"peft_config.init_lora_weights={start!r} changes the weights of the base model, which a saved adapter does not have. Set "
            "init_lora_weights=True."
        )
    if start == "eva" and not made:
        raise ValueError(
            "peft_config.init_lora_weights='eva' needs data. Pass the model that get_peft_model and initialize_lora_eva_weights made, "
            "or set init_lora_weights=True."
        )


def check_adapter_of(model: Any, model_init_kwargs: dict[str, Any]) -> None:
    """
    Refuses a model with an adapter that would be replaced, ignored or not saved.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model, or its path or name.
        model_init_kwargs (`dict`): Keyword arguments for loading a model by name.

    Raises:
        ValueError: If an adapter of the model is not the one that can be trained.
    """
    if isinstance(model, str):
        check_no_adapter("model", model, **model_init_kwargs)
        return
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not isinstance(model, PeftModel):
        if layers:
            raise ValueError(
                f"model, a {type(model).__name__}, has an adapter that this trainer cannot save. To train it further, pass {TRAIN_FURTHER}. To "
                "train another one, pass the base model."
            )
        return
    if "default" not in model.peft_config:
        raise ValueError(
            f"The trainer trains the adapter 'default', but model has only the adapters {list(model.peft_config)}. Use "
            "PeftModel.from_pretrained(..., adapter_name='default')."
        )
    if any(layer.disable_adapters or layer.merged for layer in layers):
        raise ValueError(
            "model's adapter is disabled or merged. Call model.unmerge_adapter() and model.base_model.enable_adapter_layers() first."
        )
    if model.active_adapters != ["default"]:
        raise ValueError(
            f"The trainer trains and saves the adapter 'default', but model acts with {model.active_adapters}. Call "
            "model.set_adapter('default') first."
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("model's adapter is frozen. Use PeftModel.from_pretrained(..., is_trainable=True).")
    beside = [name for name in trained if "default" not in name.split(".") and not name.endswith("bias")]
    if beside:
        raise ValueError(
            f"model trains {beside[0]!r} beside the adapter 'default', which a saved team does not have. Call requires_grad_(False) on "
            "it, or name its module in modules_to_save."
        )
    check_start(model.peft_config["default"], made=True)


def adapter_config(model: Any, peft_config: PeftConfig | None, args: Any, experts: bool) -> PeftConfig | None:
    """
    Returns the configuration of the adapter to train. The default is LoRA on all linear layers.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model, or its path or name.
        peft_config ([`~peft.PeftConfig`], *optional*): Configuration given by the user.
        args ([`MultiAgentConfig`]): The trainer's configuration.
        experts (`bool`): See [`resolve_all_linear`].

    Returns:
        [`~peft.PeftConfig`], *optional*: `None` if the model already has an adapter, or all of its weights are trained.

    Raises:
        ValueError: If the adapter cannot be trained.
    """
    loading = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if peft_config is not None:
        check_type(peft_config)
    check_adapter_of(model, loading)
    if args.full_finetuning:
        return None
    if isinstance(model, str) or not is_peft_model(model):
        if peft_config is None:
            peft_config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        if peft_config.inference_mode:
            raise ValueError("peft_config.inference_mode=True freezes the adapter. Set inference_mode=False.")
        check_start(peft_config)
        if "revision" in loading:
            peft_config = dataclasses.replace(peft_config, revision=loading["revision"])
        if isinstance(peft_config, LoraConfig) and peft_config.target_modules == "all-linear":
            with outside_zero3(args.deepspeed_plugin):
                names = resolve_all_linear(model, experts, loading)
            peft_config = dataclasses.replace(peft_config, target_modules=names)
        return peft_config
    check_type(model.peft_config["default"])
    own = model.peft_config["default"]
    own.base_model_name_or_path = model.config.name_or_path  # the base may have moved
    own.revision = loading.get("revision", own.revision)
    return peft_config  # TRL raises if both are given
