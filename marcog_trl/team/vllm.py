"""
Serves the agents of a team from a colocated vLLM engine, with one LoRA adapter per agent over one base model.

The engine loads the base model from `model.name_or_path` once. Afterwards only the adapters change. This module handles
adapters only; the caller computes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from marcog_trl.team.lending import lent
from marcog_trl.team.modules import ATTRIBUTE


# Fields of `LoraConfig` that a LoRA request does not support. vLLM below 0.32, which TRL does not support yet, ignores patterns
NOT_SERVED = (
    "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "rank_pattern", "alpha_pattern"
)  # fmt: skip


def check_served_adapter(config: LoraConfig) -> None:
    """
    Refuses an adapter that a LoRA request does not support.

    Args:
        config ([`~peft.LoraConfig`]): The adapter's configuration.

    Raises:
        ValueError: If the adapter trains more than LoRA's A and B of one rank and scale.
    """
    options = config.to_dict()
    for field in NOT_SERVED:
        if options[field]:
            raise ValueError(
                f"use_vllm=True does not support peft_config.{field}={options[field]!r}: vLLM gets only LoRA's A and B, "
                f"of one rank and scale. Leave {field} out, or set use_vllm=False."
            )
    if config.bias != "none":
        raise ValueError(
            f"use_vllm=True does not support peft_config.bias={config.bias!r}: vLLM gets only LoRA's A and B. Set bias='none'."
        )


def write_adapters(adapters: Sequence[tuple[dict[str, torch.Tensor], LoraConfig]], paths: Sequence[Path]) -> None:
    """
    Writes the adapters to the folders that the engine of this process reads.

    Args:
        adapters (`Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]`): State and configuration per agent. The
            configuration is written the first time only.
        paths (`Sequence[Path]`): One folder per agent.
    """
    for (state, config), path in zip(adapters, paths, strict=True):
        if not path.exists():
            config.save_pretrained(str(path))
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path / "adapter_model.safetensors")


class LanguageModelGeneration(VLLMGeneration):
    """
    TRL's vLLM backend without the team's modules, which vLLM does not have.

    Remove it once TRL lets trainers choose the class of the backend, or the parameters to send.

    Args:
        backend ([`~trl.generation.vllm_generation.VLLMGeneration`]): The backend that TRL made. Shares its state.
    """

    def __init__(self, backend: VLLMGeneration):
        self.__dict__ = vars(backend)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in super()._iter_named_params() if not pair[0].startswith(f"{ATTRIBUTE}."))


class AgentGeneration(VLLMGeneration):
    """
    TRL's vLLM backend with one LoRA adapter per agent instead of merged weights.

    Args:
        num_agents (`int`): N, number of agents.
        rank (`int`): Rank of an agent's adapter.
        revision (`str`, *optional*): Revision of the base model on the Hub.
        refresh (`Callable[[], None]`):
            Called before a generation if the engine's adapters are out of date. It must call `load`.
        **kwargs: Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`], with `mode="colocate"`.

    Attributes:
        row_agents (`list[int]`): Agent index of each prompt of the next generation. Set it before `generate`.
        stale (`bool`): Whether the engine's adapters are out of date.
    """

    def __init__(
        self, *, num_agents: int, rank: int, revision: str | None, refresh: Callable[[], None], **kwargs: Any
    ):
        self.row_agents: list[int] = []
        self.stale = True
        self._rank = rank
        self._revision = revision
        self._refresh = refresh
        self._folder = tempfile.TemporaryDirectory(prefix="marcog-trl-vllm-")
        self._paths = [Path(self._folder.name) / str(agent) for agent in range(num_agents)]
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        # Remove the patch once TRL's `VLLMGeneration` takes keyword arguments for the engine, such as `enable_lora`. With
        # `create`, TRL raises its own error if vLLM is not installed
        with patch.object(vllm_generation, "LLM", self._make_engine, create=True):
            super()._init_vllm()

    def _make_engine(self, **kwargs: Any):
        from vllm import LLM
        from vllm.config.lora import MaxLoRARanks

        served = [rank for rank in get_args(MaxLoRARanks) if rank >= self._rank]
        if not served:
            raise ValueError(
                f"use_vllm=True does not support peft_config.r={self._rank}. Set r to at most {get_args(MaxLoRARanks)[-1]}."
            )
        # The trainer's precision; vLLM would default to half precision
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, self.model.dtype)
        return LLM(
            **kwargs,
            revision=self._revision,
            dtype=dtype,
            enable_lora=True,
            max_loras=len(self._paths),
            max_lora_rank=min(served),
        )

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields nothing, because base weights do not change."""
        return iter(())

    def sync_weights(self) -> None:
        """Marks the adapters as out of date. TRL calls it after an update; the next generation refreshes them."""
        super().sync_weights()
        self.stale = True

    def load(self, adapters: Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]) -> None:
        """
        Writes the agents' current adapters, and loads them into the engine.

        Args:
            adapters (`Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]`): State and configuration per agent.
        """
        write_adapters(adapters, self._paths)
        self.reload()

    def reload(self) -> None:
        """Loads the written adapters into the engine."""
        for agent in range(len(self._paths)):
            self.llm.llm_engine.add_lora(self._request(agent, load_inplace=True))
        # The prefix cache was computed with the previous adapters, which have the same names
        self.llm.reset_prefix_cache()

    def _request(self, agent: int, load_inplace: bool = False):
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"agent-{agent}", agent + 1, str(self._paths[agent]), load_inplace=load_inplace)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Generates as TRL does, with the adapter of agent `row_agents[i]` for prompt i."""
        if self.stale:
            self._refresh()
            self.stale = False
        requests = [self._request(agent) for agent in self.row_agents]
        with lent(self, llm=_WithAdapters(self.llm, requests)):
            return super().generate(prompts, images, num_generations, profiler)


class _WithAdapters:
    """Wraps a vLLM engine. Its `generate` adds the adapter of each prompt, which TRL's backend does not pass."""

    def __init__(self, engine: Any, requests: list[Any]):
        self._engine = engine
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.generate(*args, lora_request=self._requests, **kwargs)
