"""Draws tokens by the inverse distribution function, with one random number per token."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

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
from transformers.generation import BaseWatermarkingConfig
from transformers.generation.configuration_utils import GenerationMode

from marcog_trl.rollout.records import Row


# Options of `generate` that change what it samples, and that `GivenDraws` does not support, with the values that turn them off
OTHER_OPTIONS: dict[str, tuple[float | None, ...]] = {
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "watermarking_config": (None,),
    "do_sample": (True,),
    "num_beams": (None, 1),
    "penalty_alpha": (None,),
}
# `torch.multinomial` draws a random number per word. Up to this vocabulary that costs less than 0.03 ms per token, and a run has
# the tokens of TRL's trainers for the same seed.
SMALL_VOCABULARY = 1024


def unsupported_option(config: GenerationConfig) -> str | None:
    """Returns the name of an option that [`GivenDraws`] does not support, if one is set."""
    return next((name for name, off in OTHER_OPTIONS.items() if getattr(config, name) not in off), None)


def fast_draws(model: Any, config: GenerationConfig, rows: int) -> GivenDraws | None:
    """Draws random numbers for the rows of a call of `generate`, if that can replace `torch.multinomial` and is faster."""
    if model.device.type != "cpu" or model.config.get_text_config().vocab_size <= SMALL_VOCABULARY:
        return None
    if config.get_generation_mode() != GenerationMode.SAMPLE or unsupported_option(config) is not None:
        return None
    return GivenDraws(torch.rand(max(1, rows), config.max_new_tokens, dtype=torch.float64), config)


class GivenDraws(BaseWatermarkingConfig):
    """
    Makes a greedy `generate` sample with given random numbers.

    TRL's trainers pass nothing but a generation config to `generate`, and the only processor that a config holds is a
    watermark, which runs last. This class would go if they passed logits processors.

    Args:
        draws (`torch.Tensor`): Uniform random numbers in [0, 1), `(R, T)`. A row of NaN is decoded greedily.
        sampling ([`~transformers.GenerationConfig`]): Temperature, top-k, top-p and min-p.
    """

    def __init__(self, draws: torch.Tensor, sampling: GenerationConfig):
        self.draws = draws
        self.warpers = LogitsProcessorList()  # in the order of `generate`
        if sampling.temperature not in (None, 1.0):
            self.warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p is not None:
            self.warpers.append(MinPLogitsWarper(sampling.min_p))

    def validate(self) -> None:
        """There is nothing to validate."""

    def construct_processor(self, vocab_size: int, device: torch.device | None = None) -> LogitsProcessor:
        return _Draw(self.draws.to(device), self.warpers)


class _Draw(LogitsProcessor):
    """Masks all tokens but the one that is drawn."""

    def __init__(self, draws: torch.Tensor, warpers: LogitsProcessorList):
        self.draws = draws
        self.warpers = warpers
        self.has_greedy_rows = bool(draws.isnan().any())
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.size(1)
        scores = self.warpers(cast(torch.LongTensor, input_ids), cast(torch.FloatTensor, scores))
        draw = self.draws[:, input_ids.size(1) - self.prompt_length, None]
        probabilities = scores.softmax(-1)
        if scores.device.type == "cpu":  # adds from left to right, so rounded sums do not decrease
            cumulative = probabilities.cumsum_(-1)
        else:
            cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        if scores.device.type == "cpu" and not total.isfinite().all():
            raise ValueError(
                "The model's scores of the next token contain NaN or infinity. Check its weights, or lower learning_rate."
            )
        # A number below the total lies in the interval of a token whose probability is not 0
        draw = draw.to(total.dtype) * total.nextafter(torch.zeros_like(total))
        token = torch.searchsorted(cumulative, draw, right=True)
        if self.has_greedy_rows:
            token = torch.where(draw.isnan(), scores.argmax(-1, keepdim=True), token)
        return cumulative.fill_(-math.inf).scatter_(1, token, 0.0)


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
        name = unsupported_option(config)
        if name is not None:
            raise ValueError(
                f"sampling='keyed' does not support generation_kwargs={{{name!r}: {getattr(config, name)}}}. Set "
                "sampling='stream'."
            )
        self.key_of = keys if callable(keys) else lambda row: keys[row.episode]
        self.config = config

    def draws(self, rows: list[Row]) -> GivenDraws:
        """Returns the random numbers of these rows."""
        draws = np.zeros((max(1, len(rows)), self.config.max_new_tokens))
        for draw, row in zip(draws, rows, strict=False):  # a process without rows generates a dummy row
            key = self.key_of(row)
            place: tuple = key, row.slot.agent, row.slot.turn, row.slot.act
            if row.completion_ids:  # goes on after a call of a tool
                place += (len(row.completion_ids),)
            seed = hashlib.sha256(repr(place).encode()).digest()
            draw[:] = math.nan if key is None else np.random.default_rng(list(seed)).random(draw.shape)
        return GivenDraws(torch.from_numpy(draws), self.config)
