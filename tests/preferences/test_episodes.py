"""Episodes as sequences: examples of pairs, the collator, and the way through the model and back."""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from marcog_trl.preferences.episodes import EpisodeCollator, EpisodeModel, make_examples


def row(agent, turn=0, prompt=(10, 11), completion=(12, 13), latent=()):
    return {
        "agent": agent, "turn": turn, "act": 0, "prompt_ids": list(prompt), "completion_ids": list(completion),
        "latent": list(latent),
    }  # fmt: skip


def pair(chosen, rejected, scores=((1.0, 1.0), (0.0, 0.0))):
    return {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_agent_scores": scores[0],
        "rejected_agent_scores": scores[1],
    }


ONE = pair(
    [row("a", completion=[12, 13, 1]), row("b", prompt=[20], completion=[1])],
    [row("a", completion=[14]), row("b", prompt=[20], completion=[21, 22, 1])],
)


class TestExamples:
    def test_a_row_is_prompt_and_reply(self):
        examples, _ = make_examples([ONE], ["a", "b"])
        assert [r["ids"] for r in examples[0]["chosen_rows"]] == [[10, 11, 12, 13, 1], [20, 1]]
        assert [(r["prompt_length"], r["agent"]) for r in examples[0]["rejected_rows"]] == [(2, 0), (1, 1)]

    def test_later_turns_count_less(self):
        rows = [row("a"), row("a", turn=2)]
        examples, _ = make_examples([pair(rows, rows[:1])], ["a"], gamma_turn=0.5)
        assert [r["weight"] for r in examples[0]["chosen_rows"]] == [1.0, 0.25]

    def test_each_agent_prefers_its_own_winner(self):
        scores = ((1.0, 0.0), (0.0, 0.5))
        examples, _ = make_examples([pair(ONE["chosen"], ONE["rejected"], scores)], ["a", "b"], margin="agent")
        ids = [[[r["ids"] for r in e[side]] for side in ("chosen_rows", "rejected_rows")] for e in examples]
        assert ids == [[[[10, 11, 12, 13, 1]], [[10, 11, 14]]], [[[20, 21, 22, 1]], [[20, 1]]]]

    def test_long_rows_drop_their_pair(self):
        examples, too_long = make_examples(
            [ONE, pair([row("a")], [row("a", completion=[3])])], ["a", "b"], max_length=4
        )
        assert (len(examples), too_long) == (1, 1)

    def test_shared_rows_cancel_where_only_differences_count(self):
        shared = pair([row("a"), row("b")], [row("a"), row("b", completion=[9])])
        kept, _ = make_examples([shared], ["a", "b"])
        dropped, _ = make_examples([shared], ["a", "b"], drop_shared=True)
        assert [len(e["chosen_rows"]) for e in (kept[0], dropped[0])] == [2, 1]
        assert len(make_examples([pair([row("a")], [row("a")])], ["a"])[0]) == 0


def collate(*pairs, agents=("a", "b"), latent_size=0):
    examples, _ = make_examples(pairs, list(agents))
    most = max(len(e[side]) for e in examples for side in e)
    return EpisodeCollator(0, most, latent_size)(list(examples))


def test_collator_puts_the_rows_of_an_episode_side_by_side():
    batch = collate(ONE)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 1, 20, 1], [10, 11, 14, 20, 21, 22, 1]]
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1]]
    assert batch["row_lengths"].tolist() == [[5, 2], [3, 4]]
    assert batch["row_agents"].tolist() == [[0, 1], [0, 1]]


def test_collator_keeps_latents_with_their_rows():
    batch = collate(pair([row("a", latent=[1, 2]), row("b", latent=[3, 4])], [row("b", latent=[5, 6])]), latent_size=2)
    assert batch["row_latents"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]


class Decoder(torch.nn.Module):
    """Hidden states that are the token ids."""

    def forward(self, input_ids):
        return BaseModelOutputWithPast(last_hidden_state=input_ids[..., None].float())


class Words:
    """A model of `size` equally likely words, or without a size one that gives a token minus the id before it as log-probability."""

    def __init__(self, size=None):
        self.size, self.decoder, self.calls = size, Decoder(), []

    def __call__(self, input_ids, attention_mask, shift_labels, **options):
        self.calls.append(
            {"input_ids": input_ids, "attention_mask": attention_mask, "labels": shift_labels, **options}
        )
        hidden = self.decoder(input_ids).last_hidden_state.squeeze(-1)
        assert hidden.shape == shift_labels.shape
        logps = -hidden if self.size is None else torch.full_like(hidden, -math.log(self.size))
        return FusedCausalLMOutput(log_probs=logps, entropy=-logps, is_top1=shift_labels > 0)


def through(model, batch, as_rows=lambda agents, latents: nullcontext()):
    rows = {name: batch[name] for name in batch if name.startswith("row_")}
    episodes = EpisodeModel(model, model.decoder, rows, as_rows, pad_token_id=0)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    output = episodes(batch["input_ids"], batch["attention_mask"], labels, use_cache=False, fused_lm_head=True)
    return output, episodes


class TestModel:
    def test_rows_go_through_the_model_one_by_one(self):
        model = Words()
        through(model, collate(ONE))
        [call] = model.calls
        assert call["input_ids"].tolist() == [
            [10, 11, 12, 13, 1],
            [20, 1, 0, 0, 0],
            [10, 11, 14, 0, 0],
            [20, 21, 22, 1, 0],
        ]
        assert call["attention_mask"].sum(1).tolist() == [5, 2, 3, 4]
        assert call["fused_lm_head"] and call["use_cache"] is False

    def test_turns_are_discounted(self):
        rows = [row("a"), row("a", turn=1)]
        examples, _ = make_examples([pair(rows, rows[:1])], ["a"], gamma_turn=0.5)
        output, episodes = through(Words(), EpisodeCollator(0, 2)(list(examples)))
        assert output.log_probs.sum(1).tolist() == [-34.5, -23.0]
        assert episodes.row_logps.tolist() == [[-23.0, -11.5], [-23.0, 0.0]]

    def test_rows_speak_as_their_agents(self):
        seen = []

        def as_rows(agents, latents):
            seen.append((agents.tolist(), latents.tolist()))
            return nullcontext()

        mixed = pair([row("b", latent=[7]), row("a", latent=[8])], [row("a", latent=[9])])
        through(Words(4), collate(mixed, latent_size=1), as_rows)
        assert seen == [([1, 0, 0], [[7.0], [8.0], [9.0]])]

    def test_an_episode_without_rows_has_log_probability_zero(self):
        empty = pair([row("a")], [row("a"), row("b", completion=[9])])
        examples, _ = make_examples([empty], ["a", "b"], drop_shared=True)
        output, _ = through(Words(4), EpisodeCollator(0, 1)(list(examples)))
        assert output.log_probs.sum(1).tolist() == pytest.approx([0.0, -1.386294], abs=1e-6)
