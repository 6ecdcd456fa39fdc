"""Merges an adapter into the base model's weights, or leaves it out, temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def without_adapter(model: Any) -> AbstractContextManager[Any]:
    """Makes a model act as before training. One that is trained as a whole does not change."""
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()


@contextmanager
def merged_adapter(model: Any) -> Iterator[None]:
    """
    Merges the active adapter into copies of the adapted weights, so that a forward pass is as fast as the base model's.

    On exit, the original weights are restored, bit for bit. Inside the context, the copies need as much memory as the
    adapted layers.

    Args:
        model ([`~peft.PeftModel`]): The policy. Do not train it inside the context.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    kept: list[tuple[nn.Parameter, Any]] = [
        (parameter, parameter.data) for layer in layers for parameter in layer.get_base_layer().parameters()
    ]
    try:
        model.merge_adapter(safe_merge=True)  # `safe_merge` writes to a copy
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()
