"""Calls a language model so that its head, which may have 152,000 words, sees only the states that predict tokens of replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from marcog_trl.team.positions import positions
from marcog_trl.team.shared_prompts import replies_in_line


# What TRL's fused head returns per token
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class HeadOnReplies:
    """
    A language model with TRL's fused head, as TRL's losses call it. On a GPU the fused head itself leaves out what has no label;
    elsewhere it scores prompts and padding too.

    Args:
        model: The model, as TRL passes it: it may be wrapped by DDP or DeepSpeed.
        unwrapped (`torch.nn.Module`): The model in it, with or without an adapter.
        shares_prompts (`bool`): Whether prompts run once for all rows that have them.
    """

    def __init__(self, model: Any, unwrapped: Any, shares_prompts: bool):
        self._model = model
        self._shares_prompts = shares_prompts
        self._decoder = (unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped).get_decoder()

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **inputs: Any
    ) -> Any:
        """Returns the model's output with per-token tensors of shape `(B, L - 1)`, 0 where the label is -100."""
        targets = labels[:, 1:]
        predicts = targets != -100
        in_line: AbstractContextManager[None] = nullcontext()
        if self._shares_prompts:  # replies begin in the same column in all rows
            in_line = replies_in_line(self._decoder, start=1 + int(predicts.any(0).int().argmax()))
        inputs |= positions(self._decoder, attention_mask)
        with in_line, only(self._decoder, predicts):
            output = self._model(
                input_ids=input_ids, attention_mask=attention_mask, shift_labels=targets[predicts][None], **inputs
            )
        for name in PER_TOKEN:
            if name in output:
                values = output[name]
                output[name] = torch.zeros_like(predicts, dtype=values.dtype).masked_scatter(predicts, values)
        return output


@contextmanager
def only(decoder: nn.Module, predicts: torch.Tensor) -> Iterator[None]:
    """Lets the decoder return the hidden states of M positions alone, `(1, M, H)`; `predicts` `(R, T - 1)` chooses them."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, :-1][predicts][None]
        return output

    handle = decoder.register_forward_hook(choose)
    try:
        yield
    finally:
        handle.remove()
