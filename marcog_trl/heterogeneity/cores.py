"""
Adds cores to a LoRA adapter: `ΔW x = s·B (I + C) A x`, with one core C per row of the batch.

The adapter stays an ordinary `LoraConfig` adapter. Hooks on its `lora_A` layers apply the cores, if any are set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel


ADAPTER = "default"  # the name of the shared adapter, as in TRL


def check_peft_config(config: PeftConfig) -> None:
    """
    Check that the configuration of an adapter supports cores.

    Args:
        config ([`~peft.PeftConfig`]): The adapter's configuration.

    Raises:
        ValueError: If the adapter is not a plain LoRA on linear layers.
    """
    if not isinstance(config, LoraConfig) or config.peft_type != "LORA":
        raise ValueError(
            f"The heterogeneity layer does not support peft_config.peft_type="
            f"{str(config.peft_type).removeprefix('PeftType.')}. Use a LoraConfig."
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if (value and field.metadata.get("is_lora_variant")) or value in field.metadata.get("lora_variants", ()):
            raise ValueError(
                f"The heterogeneity layer does not support peft_config.{field.name}={value!r}. Leave {field.name} out."
            )
    if config.target_parameters:
        raise ValueError(
            f"The adapter acts on the expert parameters {sorted(config.target_parameters)}. (PEFT also converts names such as "
            "gate_proj, up_proj and down_proj to them.) Experts process tokens without their rows, so the agent of a token is "
            "unknown. Name other linear layers in target_modules, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj']."
        )


def adapted_layers(model: PeftModel) -> dict[str, LoraLayer]:
    """
    Get the layers of an adapter, in the order of their cores.

    Args:
        model ([`~peft.PeftModel`]): The model.

    Returns:
        `dict[str, LoraLayer]`: Name in `model` → layer.

    Raises:
        ValueError: If the model has no such adapter, or one of its layers does not support cores.
    """
    if not isinstance(model, PeftModel) or ADAPTER not in model.peft_config:
        raise ValueError(f"The model has no adapter {ADAPTER!r}. Pass a PeftModel with a LoRA adapter of that name.")
    config = model.peft_config[ADAPTER]
    check_peft_config(config)
    head = cast(PreTrainedModel, model.get_base_model()).get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        short = name.rpartition(".")[2]
        if ADAPTER in module.lora_embedding_A or (module is head and ADAPTER in module.lora_A):
            raise ValueError(
                f"peft_config.target_modules adapts {short!r}, but the heterogeneity layer does not support embeddings or the "
                "language-model head. Set target_modules='all-linear'."
            )
        if ADAPTER not in module.lora_A:
            continue
        if not isinstance(module.lora_A[ADAPTER], nn.Linear) or isinstance(
            module.get_base_layer(), nn.MultiheadAttention
        ):
            raise ValueError(
                f"peft_config.target_modules adapts {short!r}, a {type(module.get_base_layer()).__name__}, but the "
                "heterogeneity layer supports linear layers only. Set target_modules='all-linear'."
            )
        if ADAPTER in module.lora_variant:
            raise ValueError(
                f"peft_config makes {short!r} a {type(module.lora_variant[ADAPTER]).__name__}, but the heterogeneity "
                "layer supports plain LoRA only. Use a LoraConfig without variants."
            )
        layers[name] = module
    if not layers:
        raise ValueError(
            f"peft_config.target_modules={cast(LoraConfig, config).target_modules!r} adapts no layer. Set "
            "target_modules='all-linear'."
        )
    return layers


class LoraCores:
    """
    Applies the cores of the current rows between A and B in each layer of a LoRA adapter.

    Cores stay set until the next call of `set`, `set_masks` or `clear`. Gradient checkpointing (non-reentrant) runs the
    layers again in the backward pass, so do not change the cores before the backward pass has ended.

    `merge_adapter` cannot merge cores. Under `disable_adapter`, or with other adapters (such as TRL's `"ref"`), cores do
    nothing.

    Args:
        model ([`~peft.PeftModel`]): Model with a plain LoRA adapter on linear layers.

    Attributes:
        names (`list[str]`): Names of the adapted layers.
        ranks (`list[int]`): LoRA rank of each layer, in the same order.

    Raises:
        ValueError: If the adapter or one of its layers does not support cores.
    """

    def __init__(self, model: PeftModel):
        layers = adapted_layers(model)
        self.names = list(layers)
        self.ranks = [layer.r[ADAPTER] for layer in layers.values()]
        self._layers = list(layers.values())
        self._cores: list[torch.Tensor] | None = None
        self._masks: list[torch.Tensor] | None = None
        for index, layer in enumerate(self._layers):
            layer.lora_A[ADAPTER].register_forward_hook(self._hook(index))

    @property
    def acts(self) -> bool:
        """Whether forward passes use the adapter: it is not disabled, and no other adapter is active instead."""
        layer = self._layers[0]
        return not layer.disable_adapters and ADAPTER in layer.active_adapters

    def set(self, cores: Sequence[torch.Tensor]) -> None:
        """
        Set the cores for the rows of the next forward passes.

        Args:
            cores (`Sequence[torch.Tensor]`): One tensor of shape `(B, r, r)` per adapted layer, for B rows.

        Raises:
            ValueError: If the adapter is merged into the base weights.
        """
        self._check_not_merged()
        self._cores, self._masks = list(cores), None

    def set_masks(self, masks: Sequence[torch.Tensor]) -> None:
        """
        Set the blocks of the rank for the rows of the next forward passes, instead of cores.

        Args:
            masks (`Sequence[torch.Tensor]`):
                One tensor of shape `(B, r)` per adapted layer, with 1 on the ranks that a row uses. See [`block_mask`].

        Raises:
            ValueError: If the adapter is merged into the base weights.
        """
        self._check_not_merged()
        self._cores, self._masks = None, list(masks)

    def clear(self) -> None:
        """Unset cores and masks: the adapter is plain LoRA again."""
        self._cores = self._masks = None

    def _check_not_merged(self) -> None:
        if any(layer.merged for layer in self._layers):
            raise ValueError(
                "The adapter is merged into the base weights, so cores cannot be applied. Call unmerge_adapter() first."
            )

    def _hook(self, index: int) -> Callable[[nn.Module, tuple, torch.Tensor], torch.Tensor | None]:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
            rows = self._cores[index] if self._cores else self._masks[index] if self._masks else None
            if rows is None:
                return None
            if output.dim() != 3:
                raise ValueError(
                    f"{self.names[index]} was called with inputs of {output.dim()} dimensions, but cores need inputs of "
                    "shape (rows, tokens, size). Leave the layer out of target_modules, or set padding_free=False."
                )
            if len(output) != len(rows):
                raise ValueError(
                    f"{self.names[index]} was called with {len(output)} rows, but cores of {len(rows)} rows are set. Set "
                    f"cores of {len(output)} rows, or call clear()."
                )
            if self._cores:
                return output + torch.bmm(output, rows.to(output.dtype).transpose(1, 2))
            return output * rows.to(output.dtype)[:, None]

        return hook


def block_mask(agents: torch.Tensor, num_agents: int, rank: int) -> torch.Tensor:
    """
    The ranks that each row uses if each agent has its own block of the rank (`parameter_sharing="separate"`).

    Args:
        agents (`torch.Tensor` of shape `(B,)`): Index of each row's agent.
        num_agents (`int`): N, number of agents.
        rank (`int`): Rank of the whole adapter: N times that of one agent.

    Returns:
        `torch.Tensor` of shape `(B, rank)`: 1.0 on the block of the row's agent, else 0.0.
    """
    owner = torch.arange(rank, device=agents.device) // (rank // num_agents)
    return (owner == agents[:, None]).float()
