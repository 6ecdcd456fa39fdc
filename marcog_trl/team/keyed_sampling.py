"""Sampling with a separate random seed for every reply."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from marcog_trl.rollout.records import Row


# Sampling options of `generate` that `KeyedSampler` does not support
_OTHER_WARPERS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


class KeyedSampler:
    """
    Samples each reply from its own seed, so that, up to rounding, it does not depend on the rest of the batch.

    Args:
        keys (`Sequence[str | None]` of length E, or `Callable`): Key of each episode, or a function that returns the key of
            a row. `None` decodes greedily.
        config ([`~transformers.GenerationConfig`]): Generation settings of the team.

    Raises:
        ValueError: If `config` has a sampling option that is not supported.
    """

    def __init__(self, keys: Sequence[str | None] | Callable[[Row], str | None], config: GenerationConfig):
        for name in _OTHER_WARPERS:
            if getattr(config, name, None) not in (None, 0.0, 1.0):
                raise ValueError(
                    f"sampling='keyed' does not support generation_kwargs={{{name!r}: {getattr(config, name)}}}. Set "
                    "sampling='stream'."
                )
        self.key_of = keys if callable(keys) else lambda row: keys[row.episode]
        self.length = config.max_new_tokens
        self.warpers = LogitsProcessorList()
        if config.temperature not in (None, 1.0):
            self.warpers.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            self.warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1:
            self.warpers.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            self.warpers.append(MinPLogitsWarper(config.min_p))

    def processor(self, rows: list[Row], device: torch.device) -> LogitsProcessor:
        """Makes the processor that chooses the tokens of these rows. Use it with a greedy `generate`."""
        draws = np.zeros((max(1, len(rows)), self.length))
        for draw, row in zip(draws, rows, strict=False):  # a process without rows generates a dummy row
            key = self.key_of(row)
            place: tuple = key, row.slot.agent, row.slot.turn, row.slot.act
            if row.completion_ids:  # goes on after a call of a tool
                place += (len(row.completion_ids),)
            seed = hashlib.sha256(repr(place).encode()).digest()
            draw[:] = math.nan if key is None else np.random.default_rng(list(seed)).random(draw.shape)
        return _Draw(torch.from_numpy(draws).to(device), self.warpers)


class _Draw(LogitsProcessor):
    """Masks all tokens but one: drawn from the distribution with the row's random number, or the most likely one."""

    def __init__(self, draws: torch.Tensor, warpers: LogitsProcessorList):
        self.draws = draws
        self.warpers = warpers
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.size(1)
        scores = self.warpers(cast(torch.LongTensor, input_ids), cast(torch.FloatTensor, scores))
        draw = self.draws[:, input_ids.size(1) - self.prompt_length, None]
        cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
        token = torch.where(draw.isnan(), scores.argmax(-1, keepdim=True), drawn)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)
