"""
Attaches cores to a LoRA adapter: `ΔW x = s·B (I + C) A x`, with a core C of its own for every row of the batch.

Knows PEFT's LoRA layers and nothing about latents, losses or trainers. The adapter stays an ordinary `LoraConfig`
adapter; hooks on its `lora_A` layers do the rest, and do nothing while no cores are set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel


# LoRA variants that compute something else than B(A(x)), by the field of `LoraConfig` that asks for them.
VARIANTS = (
    "use_dora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def check_peft_config(config: PeftConfig) -> None:
    """
    Refuse an adapter that cores cannot act in, as far as its configuration tells.

    Args:
        config ([`~peft.PeftConfig`]): The adapter's configuration.

    Raises:
        ValueError: If it is not a plain LoRA on linear layers.
    """
    if not isinstance(config, LoraConfig) or config.peft_type != "LORA":
        raise ValueError(
            f"peft_config.peft_type={str(config.peft_type).removeprefix('PeftType.')}: "
            "the heterogeneity layer acts in LoRA only; a LoraConfig works"
        )
    options = config.to_dict()
    for field in VARIANTS:
        if options.get(field):
            raise ValueError(
                f"peft_config.{field}={options[field]!r}: the heterogeneity layer acts in plain LoRA only; "
                f"leaving {field} out works"
            )
    if config.init_lora_weights == "mica":
        raise ValueError(
            "peft_config.init_lora_weights='mica': the heterogeneity layer acts in plain LoRA only; True works"
        )
    if config.target_parameters:
        raise ValueError(
            f"peft_config.target_parameters={config.target_parameters!r} is not supported: experts see tokens without their "
            "rows, so that agents cannot be told apart. Leave it out, and name linear layers in target_modules."
        )


def adapted_layers(model: PeftModel, adapter_name: str = "default") -> dict[str, LoraLayer]:
    """
    The layers that carry an adapter, in the order in which cores are given.

    Args:
        model ([`~peft.PeftModel`]): The model.
        adapter_name (`str`, *optional*, defaults to `"default"`): The adapter.

    Returns:
        `dict[str, LoraLayer]`: Layers by their names in `model`.

    Raises:
        ValueError: If the model has no such adapter, or if cores cannot act in one of its layers.
    """
    if not isinstance(model, PeftModel) or adapter_name not in model.peft_config:
        raise ValueError(f"adapter_name={adapter_name!r}: the model has no such adapter; a PeftModel with LoRA works")
    config = model.peft_config[adapter_name]
    if isinstance(config, LoraConfig) and config.target_parameters:
        raise ValueError(
            f"The adapter acts on the expert parameters {sorted(config.target_parameters)}, to which PEFT also turns names such "
            "as gate_proj, up_proj and down_proj. Experts see tokens without their rows, so that agents cannot be told apart. "
            "Name other linear layers in target_modules, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj']."
        )
    check_peft_config(config)
    head = cast(PreTrainedModel, model.get_base_model()).get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        short = name.rpartition(".")[2]
        if adapter_name in module.lora_embedding_A or (module is head and adapter_name in module.lora_A):
            raise ValueError(
                f"peft_config.target_modules adapts {short!r}: the heterogeneity layer cannot act on embeddings or the "
                "language-model head; target_modules='all-linear' works"
            )
        if adapter_name not in module.lora_A:
            continue
        if not isinstance(module.lora_A[adapter_name], nn.Linear) or isinstance(
            module.get_base_layer(), nn.MultiheadAttention
        ):
            raise ValueError(
                f"peft_config.target_modules adapts {short!r}, a {type(module.get_base_layer()).__name__}: the "
                "heterogeneity layer acts on linear layers only; target_modules='all-linear' works"
            )
        if adapter_name in module.lora_variant:
            raise ValueError(
                f"peft_config turns {short!r} into a {type(module.lora_variant[adapter_name]).__name__}: "
                "the heterogeneity layer acts in plain LoRA only; a LoraConfig without variants works"
            )
        layers[name] = module
    if not layers:
        raise ValueError(
            f"peft_config.target_modules={cast(LoraConfig, config).target_modules!r} adapts no layer; "
            "target_modules='all-linear' works"
        )
    return layers


class LoraCores:
    """
    Puts the cores of the rows in flight between A and B of every layer of a LoRA adapter.

    Cores stay set until the next `set`, `set_mask` or `clear`. With gradient checkpointing (non-reentrant) the backward
    pass runs the layers again: leave the cores of a forward set until its backward is over.

    `merge_adapter` cannot contain cores; `disable_adapter` and other adapters (such as TRL's `"ref"`) do not run them.

    Args:
        model ([`~peft.PeftModel`]): Model with a plain LoRA adapter on linear layers.
        adapter_name (`str`, *optional*, defaults to `"default"`): The adapter.

    Attributes:
        names (`list[str]`): Names of the adapted layers.
        ranks (`list[int]`): LoRA rank of each, in the same order.

    Raises:
        ValueError: If cores cannot act in the adapter, or in one of its layers.
    """

    def __init__(self, model: PeftModel, adapter_name: str = "default"):
        layers = adapted_layers(model, adapter_name)
        self.names = list(layers)
        self.ranks = [layer.r[adapter_name] for layer in layers.values()]
        self._layers = list(layers.values())
        self._adapter_name = adapter_name
        self._cores: list[torch.Tensor] | None = None
        self._masks: list[torch.Tensor] | None = None
        self._handles = [
            layer.lora_A[adapter_name].register_forward_hook(self._hook(index))
            for index, layer in enumerate(self._layers)
        ]

    @property
    def acts(self) -> bool:
        """Whether forward passes run the adapter: it is neither disabled nor replaced by another one."""
        layer = self._layers[0]
        return not layer.disable_adapters and self._adapter_name in layer.active_adapters

    def set(self, cores: Sequence[torch.Tensor]) -> None:
        """
        Give the rows of the next forward passes their cores.

        Args:
            cores (`Sequence[torch.Tensor]`): One `(B, r, r)` per adapted layer, B being the rows of each pass.

        Raises:
            ValueError: If number or shapes are wrong, or if the adapter is merged into the base weights.
        """
        rows = len(cores[0]) if cores else 0
        expected = [(rows, rank, rank) for rank in self.ranks]
        given = [tuple(core.shape) for core in cores]
        if given != expected:
            wrong = next((i for i, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b), None)
            raise ValueError(
                f"{len(given)} cores for {len(expected)} adapted layers; one per layer works"
                if wrong is None
                else f"the core of {self.names[wrong]} has shape {given[wrong]}; {expected[wrong]} works"
            )
        self._refuse_merged()
        self._cores, self._masks = list(cores), None

    def set_mask(self, mask: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """
        Give the rows of the next forward passes their blocks of the rank, in place of cores.

        Args:
            mask (`torch.Tensor` of shape `(B, r)`, or one such tensor per adapted layer where ranks differ):
                1 on the ranks that a row uses. See [`block_mask`].

        Raises:
            ValueError: If number or shapes are wrong, or if the adapter is merged into the base weights.
        """
        masks = [mask] * len(self.ranks) if isinstance(mask, torch.Tensor) else list(mask)
        if len(masks) != len(self.ranks):
            raise ValueError(f"{len(masks)} masks for {len(self.ranks)} adapted layers; one per layer works")
        for name, rank, layer_mask in zip(self.names, self.ranks, masks, strict=True):
            expected = (len(masks[0]), rank)
            if tuple(layer_mask.shape) != expected:
                raise ValueError(f"the mask of {name} has shape {tuple(layer_mask.shape)}; {expected} works")
        self._refuse_merged()
        self._cores, self._masks = None, masks

    def clear(self) -> None:
        """Make the adapter plain LoRA again."""
        self._cores = self._masks = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _refuse_merged(self) -> None:
        if any(layer.merged for layer in self._layers):
            raise ValueError(
                "the adapter is merged into the base weights, where cores cannot act; unmerge_adapter() works"
            )

    def _hook(self, index: int) -> Callable[[nn.Module, tuple, torch.Tensor], torch.Tensor | None]:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
            rows = self._cores[index] if self._cores else self._masks[index] if self._masks else None
            if rows is None:
                return None
            if output.dim() != 3:
                raise ValueError(
                    f"{self.names[index]} was called with inputs of {output.dim()} dimensions, in which rows cannot "
                    "be told apart; inputs of shape (rows, tokens, size) work, so leave this layer out of "
                    "target_modules, or padding_free off"
                )
            if len(output) != len(rows):
                raise ValueError(
                    f"{self.names[index]} was called with {len(output)} rows while cores of {len(rows)} rows are set; "
                    f"cores of {len(output)} rows, or clear(), work"
                )
            if self._cores:
                return output + torch.bmm(output, rows.to(output.dtype).transpose(1, 2))
            return output * rows.to(output.dtype)[:, None]

        return hook


def block_mask(agents: torch.Tensor, num_agents: int, rank: int) -> torch.Tensor:
    """
    The ranks that each row uses where every agent has a block of its own (`parameter_sharing="separate"`).

    Args:
        agents (`torch.Tensor` of shape `(B,)`): Index of each row's agent.
        num_agents (`int`): N, number of agents.
        rank (`int`): Rank of the whole adapter, N times that of one agent.

    Returns:
        `torch.Tensor` of shape `(B, rank)`: 1.0 on the agent's block.

    Raises:
        ValueError: If `rank` is not a multiple of `num_agents`.
    """
    if rank % num_agents:
        raise ValueError(
            f"rank={rank} cannot hold {num_agents} equal blocks; {num_agents * (rank // num_agents + 1)} works"
        )
    owner = torch.arange(rank, device=agents.device) // (rank // num_agents)
    return (owner == agents[:, None]).float()
