"""
Counts the bytes of tensors that come and go, also of fake ones, which have shapes and dtypes only. See
[`marcog_trl.trainers.plan`].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE


class MemoryTracker(TorchDispatchMode):
    """
    Counts the bytes of the tensors that are made inside the context and are alive. Views count once.

    Attributes:
        live (`int`): Bytes now.
        peak (`int`): The most bytes since the last `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

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
                self._known[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def forget_peak(self) -> None:
        """Starts to look for a new peak from what is alive now."""
        self.peak = self.live


class TritonHead(torch.autograd.Function):
    """
    Memory that TRL's log-probabilities allocate where Triton computes them: a tile of logits, and statistics of each token.

    Elsewhere TRL's own function runs on fake tensors, but Triton's kernels cannot.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        statistics = hidden.new_empty(8, hidden.size(0), dtype=torch.float32)
        _tile(hidden, weight)
        return statistics[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        summed = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _tile(hidden, weight)
        return summed.to(hidden.dtype), None if of_weight is None else of_weight.to(weight.dtype)


def _tile(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """A tile of logits, and the rows of the head that it is a product with, where these must be cast."""
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
    part = weight[:_CHUNKED_LOGPROB_CHUNK_SIZE].to(dtype)
    tile = hidden.new_empty(min(hidden.size(0), TOKEN_CHUNK_SIZE), part.size(0), dtype=dtype)
    del tile, part
