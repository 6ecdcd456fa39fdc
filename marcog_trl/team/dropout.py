"""Dropout of a model: as modules, as numbers that a forward pass reads, and in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from marcog_trl.team.lending import lent


# Probabilities of dropout and of skipped layers, and noise that experts add in training. Phi-MoE's router_jitter_noise is a
# tolerance, also outside of training
_NOISE = re.compile(r"drop|^(?!router_).*jitter")


def disable_dropout(model: nn.Module) -> None:
    """
    Makes all forward passes of a model in training mode the same.

    Args:
        model (`nn.Module`): The model. [`own_dropout`] knows what its configuration had.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        names = _noise_in(module)
        if "drop" in type(module).__name__.lower() and isinstance(getattr(module, "p", None), float):
            names["p"] = 0.0
        vars(module).update(names)
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            configs[id(config)] = config
    kept = []
    for config in configs.values():
        off = _noise_in(config)
        kept.append((config, {name: getattr(config, name) for name in off}))
        vars(config).update(off)
    if not hasattr(model, "dropout_of_configs"):  # otherwise it is off already
        model.dropout_of_configs = kept  # type: ignore[assignment]


@contextmanager
def own_dropout(model: nn.Module) -> Iterator[None]:
    """Gives the configuration of a model its own dropout back for a time, such as to save it."""
    with ExitStack() as stack:
        for config, values in getattr(model, "dropout_of_configs", ()):
            stack.enter_context(lent(config, **values))
        yield


def _noise_in(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object that are dropout, with the values that switch them off."""
    found = {name: value for name, value in vars(owner).items() if _NOISE.search(name)}
    off: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):  # of each adapter, in PEFT
            off[name] = dict.fromkeys(value, 0.0)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            off[name] = 0.0
    return off
