"""
Serves the agents of a team from a colocated vLLM engine: each is a LoRA request of its own over one base model.

Knows adapters, and nothing of latents or of how adapters come about. The engine loads the base model itself, from
`model.name_or_path`, and never gets other base weights: only adapters change.
"""

from __future__ import annotations

import functools
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


# Fields of `LoraConfig` that make more of an adapter than what a LoRA request carries.
NOT_SERVED = ("modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias")
# Names of initialisations that leave the base weights as they are on disk.
BASE_KEPT = ("gaussian", "eva", "orthogonal")


def check_served_adapter(config: LoraConfig) -> None:
    """
    Refuse an adapter that a LoRA request cannot carry.

    Args:
        config ([`~peft.LoraConfig`]): The adapter's configuration.

    Raises:
        ValueError: If the adapter trains something else than LoRA's A and B, or changes the base weights.
    """
    options = config.to_dict()
    for field in NOT_SERVED:
        if options[field]:
            raise ValueError(
                f"peft_config.{field}={options[field]!r} with use_vllm=True: vLLM is sent LoRA's A and B alone; "
                f"use_vllm=False, or leaving {field} out, works"
            )
    if config.bias != "none":
        raise ValueError(
            f"peft_config.bias={config.bias!r} with use_vllm=True: vLLM is sent LoRA's A and B alone; 'none' works"
        )
    start = config.init_lora_weights
    if isinstance(start, str) and start not in BASE_KEPT:
        raise ValueError(
            f"peft_config.init_lora_weights={start!r} with use_vllm=True: it changes the base weights, which vLLM reads "
            "from the model's files; True works"
        )


def write_adapters(adapters: Sequence[tuple[dict[str, torch.Tensor], LoraConfig]], paths: Sequence[Path]) -> None:
    """
    Write adapters that the engine of this process reads, again and again.

    Args:
        adapters (`Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]`): State and configuration per agent; configurations
            are those of the first time.
        paths (`Sequence[Path]`): One folder per agent.
    """
    for (state, config), path in zip(adapters, paths, strict=True):
        if not path.exists():  # only tensors change
            config.save_pretrained(str(path))
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path / "adapter_model.safetensors")


class AgentGeneration(VLLMGeneration):
    """
    TRL's vLLM backend with one LoRA adapter per agent in place of merged weights.

    Args:
        num_agents (`int`): N, number of agents.
        rank (`int`): Highest rank of an agent's adapter.
        revision (`str`, *optional*): Revision of the base model on the Hub.
        refresh (`Callable[[], None]`):
            Called before a generation if the adapters that the engine has are out of date; calls `load`.
        **kwargs: Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`], with `mode="colocate"`.

    Attributes:
        row_agents (`list[int]`): Index of the agent of each prompt of the next generation.
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
        # Created where vLLM is missing, so that TRL says so
        with patch.object(vllm_generation, "LLM", self._make_engine, create=True):
            super()._init_vllm()

    def _make_engine(self, **kwargs: Any):
        from vllm import LLM
        from vllm.config.lora import MaxLoRARanks

        served = [rank for rank in get_args(MaxLoRARanks) if rank >= self._rank]
        if not served:
            raise ValueError(
                f"peft_config.r={self._rank} is more than vLLM serves; {get_args(MaxLoRARanks)[-1]} works"
            )
        # What the trainer computes in: vLLM's own choice would be half precision
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
        """Nothing: base weights do not change, and adapters are never merged into them."""
        return iter(())

    def sync_weights(self) -> None:
        """What TRL calls after an update; adapters are refreshed by the next generation, which may draw new latents."""
        super().sync_weights()
        self.stale = True

    def load(self, adapters: Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]) -> None:
        """
        Give the engine the agents' adapters of now.

        Args:
            adapters (`Sequence[tuple[dict[str, torch.Tensor], LoraConfig]]`): State and configuration per agent.
        """
        write_adapters(adapters, self._paths)
        self.reload()

    def reload(self) -> None:
        """Let the engine read the adapters that were written."""
        for agent in range(len(self._paths)):
            self.llm.llm_engine.add_lora(self._request(agent, load_inplace=True))
        # Cached prompts were read with the adapters of before, which had the same names
        self.llm.reset_prefix_cache()

    def _request(self, agent: int, load_inplace: bool = False):
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"agent-{agent}", agent + 1, str(self._paths[agent]), load_inplace=load_inplace)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As TRL's; prompt i is answered by agent `row_agents[i]`."""
        if self.stale:
            self._refresh()
            self.stale = False
        requests = [self._request(agent) for agent in self.row_agents]
        with patch.object(self.llm, "generate", functools.partial(self.llm.generate, lora_request=requests)):
            return super().generate(prompts, images, num_generations, profiler)
