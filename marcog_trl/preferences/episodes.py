"""
Pairs as batches of TRL's DPO trainer, in which one sequence is one episode: its rows, one after the other.

[`EpisodeModel`] stands between TRL's loss and the language model: it takes episodes apart into rows, calls the model once, and
puts what comes out back where TRL looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from trl.trainer.utils import pad

from marcog_trl.preferences.pairs import PairRow
from marcog_trl.trainers.head import PER_TOKEN, only


_ROW = {
    "ids": List(Value("int64")),
    "prompt_length": Value("int64"),
    "agent": Value("int64"),
    "weight": Value("float32"),
    "latent": List(Value("float32")),
}
EXAMPLE = Features({"chosen_rows": List(_ROW), "rejected_rows": List(_ROW)})
# Of every row of every episode of a batch: what TRL's loss does not know, by name
ROW_KEYS = ("row_lengths", "row_agents", "row_weights", "row_latents", "ref_row_logps")


# Examples


def make_examples(
    pairs: Iterable[Mapping[str, Any]],
    agents: Sequence[str],
    margin: str = "joint",
    gamma_turn: float = 1.0,
    max_length: int | None = None,
    drop_shared: bool = False,
) -> tuple[Dataset, int]:
    """
    Makes the examples that a trainer is given of pairs.

    Args:
        pairs (`Iterable[Mapping]`): Rows of [`collect_preferences`].
        agents (`Sequence[str]`): Names of the agents, by index.
        margin (`str`, *optional*, defaults to `"joint"`): `"joint"`: one example per pair. `"agent"`: one per agent whose
            returns differ, of its own rows.
        gamma_turn (`float`, *optional*, defaults to `1.0`): Weight of each later turn.
        max_length (`int`, *optional*): Maximum number of tokens of a row, prompt included.
        drop_shared (`bool`, *optional*, defaults to `False`): Whether to leave rows out that both sides have.

    Returns:
        `tuple[Dataset, int]`: The examples, and the number of pairs that were dropped because a row is too long.
    """
    examples, too_long = [], 0
    for pair in pairs:
        rows = [*pair["chosen"], *pair["rejected"]]
        if max_length is not None and any(len(r["prompt_ids"]) + len(r["completion_ids"]) > max_length for r in rows):
            too_long += 1
            continue
        for chosen, rejected in _sides(pair, agents, margin):
            if drop_shared:
                shared = [row for row in chosen if row in rejected]
                chosen, rejected = ([row for row in side if row not in shared] for side in (chosen, rejected))
            if chosen == rejected:  # nothing to learn
                continue
            examples.append(
                {
                    "chosen_rows": [_example_row(row, agents, gamma_turn) for row in chosen],
                    "rejected_rows": [_example_row(row, agents, gamma_turn) for row in rejected],
                }
            )
    return Dataset.from_dict({name: [e[name] for e in examples] for name in EXAMPLE}, features=EXAMPLE), too_long


def _sides(
    pair: Mapping[str, Any], agents: Sequence[str], margin: str
) -> Iterable[tuple[list[PairRow], list[PairRow]]]:
    """The preferred and the other rows of every loss that a pair has."""
    if margin == "joint":
        yield pair["chosen"], pair["rejected"]
        return
    scores = zip(pair["chosen_agent_scores"], pair["rejected_agent_scores"], strict=True)
    for agent, (of_chosen, of_rejected) in zip(agents, scores, strict=True):
        gap = round(of_chosen - of_rejected, 9)
        sides = [[row for row in pair[side] if row["agent"] == agent] for side in ("chosen", "rejected")]
        if gap > 0:
            yield sides[0], sides[1]
        elif gap < 0:
            yield sides[1], sides[0]


def _example_row(row: PairRow, agents: Sequence[str], gamma_turn: float) -> dict[str, Any]:
    return {
        "ids": [*row["prompt_ids"], *row["completion_ids"]],
        "prompt_length": len(row["prompt_ids"]),
        "agent": agents.index(row["agent"]),
        "weight": gamma_turn ** row["turn"],
        "latent": row["latent"],
    }


@dataclass
class EpisodeCollator:
    """
    Collates B examples into 2B sequences, the preferred episodes first.

    Gives TRL's `input_ids`, `attention_mask` and `completion_mask` of shape `(2B, L)`, where a sequence is an episode's rows one
    after the other, and of these rows `row_lengths`, `row_agents` and `row_weights` of shape `(2B, S)`, and `row_latents` of
    shape `(2B, S, d)`; a row of length 0 is none. Log-probabilities under the reference, where the examples have them:
    `ref_chosen_logps` and `ref_rejected_logps` of shape `(B,)`, and `ref_row_logps` of shape `(2B, S)`.

    Args:
        pad_token_id (`int`): Token for padding.
        latent_size (`int`, *optional*, defaults to `0`): d.
        num_rows (`int`, *optional*, defaults to `0`): S, at least the most rows that an episode has, so that all processes have
            tensors of the same shape. It may grow.
    """

    pad_token_id: int
    latent_size: int = 0
    num_rows: int = 0

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        episodes = [e[side] for side in ("chosen_rows", "rejected_rows") for e in examples]
        ids = [torch.tensor([token for row in rows for token in row["ids"]], dtype=torch.long) for rows in episodes]
        completions = [
            torch.cat([torch.arange(len(row["ids"])) >= row["prompt_length"] for row in rows] or [torch.zeros(0)])
            for rows in episodes
        ]
        batch = {
            "input_ids": pad(ids, padding_value=self.pad_token_id),
            "attention_mask": pad([torch.ones_like(x) for x in ids], padding_value=0),
            "completion_mask": pad([x.long() for x in completions], padding_value=0),
            "row_lengths": self._of_rows([[len(row["ids"]) for row in rows] for rows in episodes]),
            "row_agents": self._of_rows([[row["agent"] for row in rows] for rows in episodes]),
            "row_weights": self._of_rows([[row["weight"] for row in rows] for rows in episodes]).float(),
        }
        batch["row_latents"] = torch.zeros(len(episodes), self.num_rows, self.latent_size)
        for e, rows in enumerate(episodes):
            for s, row in enumerate(rows if self.latent_size else ()):
                batch["row_latents"][e, s] = torch.tensor(row["latent"])
        if "ref_chosen_logps" in examples[0]:
            for name in ("ref_chosen_logps", "ref_rejected_logps"):
                batch[name] = torch.tensor([e[name] for e in examples])
            rows = [e[f"ref_{side}_row_logps"] for side in ("chosen", "rejected") for e in examples]
            batch["ref_row_logps"] = self._of_rows(rows)
        return batch

    def _of_rows(self, values: list[list[Any]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (self.num_rows - len(row))] for row in values])


# Forward passes


class EpisodeModel:
    """
    The language model as TRL's loss calls it, on episodes in place of single replies.

    The language model's head sees only the hidden states that predict tokens of replies.

    Args:
        model: The model, as TRL passes it: it may be wrapped by DDP or DeepSpeed.
        decoder (`torch.nn.Module`): Its decoder, which gives hidden states to the head.
        rows (`Mapping[str, torch.Tensor]`): `ROW_KEYS` of the batch, as [`EpisodeCollator`] gives them.
        as_rows (`Callable`): `as_rows(agents, latents)` returns a context in which the model speaks as these rows, `(R,)` and
            `(R, d)`.
        pad_token_id (`int`): Token for padding.

    Attributes:
        row_logps (`torch.Tensor` of shape `(2B, S)`): After a call, the log-probability of every row, times its weight.
    """

    def __init__(
        self,
        model: Any,
        decoder: torch.nn.Module,
        rows: Mapping[str, torch.Tensor],
        as_rows: Callable[[torch.Tensor, torch.Tensor], AbstractContextManager],
        pad_token_id: int,
    ):
        self._model = model
        self._decoder = decoder
        self._rows = rows
        self._as_rows = as_rows
        self._pad_token_id = pad_token_id
        self.row_logps = torch.zeros_like(rows["row_weights"])

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> Any:
        """Returns the model's output with per-token tensors of shape `(2B, L - 1)`, 0 where no token of a reply is predicted."""
        lengths, weights = self._rows["row_lengths"], self._rows["row_weights"]
        present = lengths > 0
        of_row = lengths[present]  # (R,), episode by episode
        inside = torch.arange(int(of_row.max()), device=of_row.device) < of_row[:, None]  # (R, T)
        in_episode = attention_mask.bool()

        def apart(tensor: torch.Tensor, filler: int) -> torch.Tensor:
            """`(2B, L)` to `(R, T)`."""
            return torch.full(inside.shape, filler, device=tensor.device).masked_scatter(inside, tensor[in_episode])

        targets = apart(labels, -100)[:, 1:]
        predicts = targets != -100  # (R, T - 1), where M positions predict a token of a reply
        speaking = self._as_rows(self._rows["row_agents"][present], self._rows["row_latents"][present])
        with speaking, only(self._decoder, predicts):
            output = self._model(
                input_ids=apart(input_ids, self._pad_token_id),
                attention_mask=inside.long(),
                shift_labels=targets[predicts][None],
                **options,
            )
        row = predicts.nonzero()[:, 0]  # of each of the M positions
        weighted = output.log_probs[0] * weights[present][row]
        sums = torch.zeros_like(weights[present]).index_add(0, row, weighted.detach().to(weights.dtype))
        self.row_logps = torch.zeros_like(weights).masked_scatter(present, sums)
        output.log_probs = weighted[None]
        # A reply follows its prompt, so that both layouts have the same M positions in the same order
        in_trl = labels[:, 1:] != -100
        for name in PER_TOKEN:
            if name in output:  # the reference's has the first alone
                values = output[name]
                output[name] = torch.zeros_like(in_trl, dtype=values.dtype).masked_scatter(in_trl, values)
        return output
