"""Sampling with a separate random seed for every reply."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import GenerationConfig

from marcog_trl.rollout.records import Row
from marcog_trl.team.token_sampling import GivenDraws, unsupported_option


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
