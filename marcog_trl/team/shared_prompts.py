"""Cheaper forward passes, of generation and of the update: a prompt runs through the model once for all rows that have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


# Inputs of the first forward pass of `generate` that have a row per prompt
_INPUTS = ("input_ids", "attention_mask", "position_ids")


@contextmanager
def shared_prompts(model: Any) -> Iterator[None]:
    """
    Makes `generate` run every prompt through the model once, and copy its cache for the other rows with that prompt. Results differ
    by rounding. Not for a model whose rows have weights of their own.
    """
    decoder = model.get_decoder()
    row_of_prompt: torch.Tensor | None = None

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal row_of_prompt
        row_of_prompt = None
        if args or not _is_shareable(kwargs):
            return None
        prompts = kwargs["input_ids"]
        if kwargs.get("attention_mask") is not None:
            prompts = prompts.masked_fill(kwargs["attention_mask"] == 0, -1)
        unique, places = prompts.unique(dim=0, return_inverse=True)
        if len(unique) == len(prompts):
            return None
        row_of_prompt = places
        rows = torch.arange(len(prompts), device=places.device)
        first = torch.zeros_like(rows[: len(unique)]).scatter_reduce(0, places, rows, "amin", include_self=False)
        return args, kwargs | {name: kwargs[name][first] for name in _INPUTS if kwargs.get(name) is not None}

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if row_of_prompt is not None:
            kwargs["past_key_values"].batch_select_indices(row_of_prompt)
            output.last_hidden_state = output.last_hidden_state[row_of_prompt]

    with _inside_other_hooks(decoder, before, after):
        yield


@contextmanager
def replies_in_line(decoder: nn.Module, start: int) -> Iterator[None]:
    """
    Makes forward passes of whole rows run every prompt once, in a line with all replies to it. A reply sees the prompt and itself.
    Results differ by rounding. Not for a model whose rows have weights of their own, or whose layers are not full attention by
    `sdpa`.

    Args:
        decoder (`torch.nn.Module`): The language model without its head.
        start (`int`): Column where the replies begin. Prompts are padded on the left.
    """
    line = place = torch.empty(0)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        nonlocal line, place
        lines, line, place = in_lines(kwargs["input_ids"], kwargs["attention_mask"].bool(), start)
        return args, kwargs | lines

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state[line, place]

    with _inside_other_hooks(decoder, before, after):
        yield


@torch.no_grad()
def computes_the_same_in_line(decoder: nn.Module) -> bool:
    """
    Whether [`replies_in_line`] changes the states of two short replies to a prompt by no more than rounding. Weights that ZeRO-3 has
    sharded cannot be tried, and count as the same.
    """
    if not all(parameter.numel() for parameter in decoder.parameters()):
        return True
    prompt, reply = 8, 8
    ids = torch.arange(1, 1 + prompt + 2 * reply, device=next(decoder.parameters()).device)
    rows = torch.stack([ids[: prompt + reply], torch.cat([ids[:prompt], ids[prompt + reply :]])])
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "use_cache": False}
    training = decoder.training
    decoder.eval()
    states = decoder(**inputs).last_hidden_state
    apart = states[1, prompt:].float()  # the second reply, which must not see the first
    try:
        with replies_in_line(decoder, start=prompt):
            together = decoder(**inputs).last_hidden_state[1, prompt:].float()
    except (RuntimeError, TypeError, ValueError):  # it does not take a mask for each pair of tokens
        return False
    finally:
        decoder.train(training)
    # The median, because rounding may send a token to another expert
    error = ((together - apart).norm(dim=-1) / apart.norm(dim=-1)).median()
    return bool(error < max(1e-4, 8 * torch.finfo(states.dtype).eps))


def in_lines(
    ids: torch.Tensor, mask: torch.Tensor, start: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """
    Puts the replies to each of L prompts in a line after it.

    Args:
        ids (`torch.Tensor` of shape `(R, T)`): Prompts and replies.
        mask (`torch.Tensor` of shape `(R, T)`): True on tokens, False on padding.
        start (`int`): Column where the replies begin.

    Returns:
        `tuple`: inputs of the decoder, of shape `(L, W)` and `(L, 1, W, W)`; the line of each row, `(R, 1)`; and the place of each
        token in it, `(R, T)`, that of another token for padding.
    """
    prompts, line = ids[:, :start].masked_fill(~mask[:, :start], -1).unique(dim=0, return_inverse=True)
    live = mask.clone()
    live[:, :start] = False
    length = live.sum(1)
    earlier = (line == line[:, None]).tril(-1)  # rows of the same line, (R, R)
    column = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    offset = start + (earlier * length).sum(1)
    place = torch.where(column < start, column, offset[:, None] + live.cumsum(1) - 1).where(mask, 0)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    width, line = int(place.max()) + 1, line[:, None]

    def arranged(values: torch.Tensor, padding: int) -> torch.Tensor:
        lines = values.new_full((len(prompts), width), padding)
        lines[line.expand_as(ids)[mask], place[mask]] = values[mask]
        return lines

    owner = arranged(row.where(column >= start, -1), -2)
    sees = (owner[:, :, None] == owner[:, None]) | (owner[:, None] == -1)
    sees = sees.tril() | torch.eye(width, dtype=torch.bool, device=ids.device)  # padding sees itself
    given = {"input_ids": arranged(ids, 0), "position_ids": arranged(column, 0), "attention_mask": sees[:, None]}
    return given, line, place


@contextmanager
def _inside_other_hooks(decoder: nn.Module, before: Callable, after: Callable) -> Iterator[None]:
    """Calls `before` after other hooks, and `after` before them: they see all rows."""
    handles = (
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def contiguous_states(model: Any) -> Iterator[None]:
    """
    Makes the last states of prompts contiguous before they enter the head. `generate` slices them out of all states, and for such
    a slice of R rows, `torch.nn.functional.linear` on CPU copies the weights of the head R times: 8.7 GB for 32 rows and 152,000
    words in bfloat16.
    """

    def before(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0].contiguous(),)

    handle = model.get_output_embeddings().register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def _is_shareable(kwargs: Mapping[str, Any]) -> bool:
    """Whether these are the inputs of a first forward pass, with a cache that can be copied by row."""
    cache = kwargs.get("past_key_values")
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length() > 0:
        return False
    if not {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    if isinstance(kwargs.get("attention_mask"), Mapping):  # masks that were prepared for every kind of layer
        return False
    shapes = {name: value.shape for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    return "input_ids" in shapes and shapes.keys() <= {*_INPUTS} and len({*shapes.values()}) == 1
