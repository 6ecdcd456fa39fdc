"""An adapter that is part of the base model's weights for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


@contextmanager
def merged_adapter(model: Any) -> Iterator[None]:
    """
    Adds the active adapter to copies of the weights below it, so that a forward pass costs what the base model's costs.

    The weights are put back afterwards, not computed back: they are the same bit for bit. Until then the copies take the
    memory of the adapted layers once more.

    Args:
        model ([`~peft.PeftModel`]): The policy; its parameters must not be trained inside the context.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    kept: list[tuple[nn.Parameter, Any]] = [
        (parameter, parameter.data) for layer in layers for parameter in layer.get_base_layer().parameters()
    ]
    try:
        model.merge_adapter(safe_merge=True)  # safe: the sum goes into a copy
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()
