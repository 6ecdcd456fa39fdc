"""Counts the bytes of tensors that are alive, by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


WEIGHTS, ADAPTER, MODULES = "base weights", "adapter", "critic and latent networks"
GRADIENTS, OPTIMIZER, CACHE, LOGITS, ACTIVATIONS = "gradients", "optimizer", "KV cache", "logits", "activations"
STATES, REFERENCE = "states for the critic", "reference model"


class Ledger(TorchDispatchMode):
    """
    Counts the bytes of the tensors that are made inside the context and are alive, by kind. Views count once.

    Attributes:
        kind (`str`): The kind of the tensors that are made now.
        live (`Counter`): Bytes by kind, now.
        peaks (`dict[str, Counter]`): The same when their sum was largest since the last `forget_peaks`, for each kind of tensor
            that was being made then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = ACTIVATIONS
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._known: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.add(tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, torch.Tensor))
        return output

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that were made outside, or are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = self.kind, storage.nbytes()
                self._change(self.kind, storage.nbytes())
                weakref.finalize(storage, self._drop, key)

    def made_gradient(self, parameter: nn.Parameter) -> None:
        """Counts the gradient of a parameter as such."""
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        kind, size = self._known[key]
        self._known[key] = GRADIENTS, size
        self.live[kind] -= size
        self.live[GRADIENTS] += size

    def _drop(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self._change(kind, -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] += size
        if size > 0 and self.live.total() > self.peaks.get(self.kind, Counter()).total():
            self.peaks[self.kind] = self.live.copy()

    @property
    def peak(self) -> Counter[str]:
        """The largest of the peaks."""
        return max(self.peaks.values(), key=Counter.total)

    def forget_peaks(self) -> None:
        """Starts to look for new peaks from what is alive now."""
        self.peaks = {self.kind: self.live.copy()}

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Tensors made inside are of this kind."""
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer
