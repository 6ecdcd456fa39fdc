"""Positions of tokens in rows that are padded on the left."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def positions(decoder: nn.Module, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Returns the inputs that make the positions of a forward pass those of `generate`, which counts tokens and not columns.

    Without them, models with learned or sinusoidal positions, such as GPT-2, count the padding on the left, so that a reply would
    have other log-probabilities beside a longer prompt. Rotary positions and ALiBi are relative, and need no inputs.

    Args:
        decoder (`torch.nn.Module`): The language model without its head.
        mask (`torch.Tensor` of shape `(R, T)`): 1 on tokens, 0 on padding.

    Returns:
        `dict`: `position_ids` of shape `(R, T)`, or nothing.
    """
    if _rotary(decoder) or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return {}
    return {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}


def depends_on_width(decoder: nn.Module) -> bool:
    """Whether positions depend on the length of the longest row, so that columns of padding must stay."""
    parameters = _rotary(decoder)
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # by kind of layer
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _rotary(decoder: Any) -> dict[str, Any]:
    return getattr(decoder.config.get_text_config(), "rope_parameters", None) or {}
