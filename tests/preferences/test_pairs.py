"""Pairs that real teams play: what they hold, that they are reproducible, and that they can be saved."""

import json

import pytest
import teams
import torch

from marcog_trl import collect_preferences
from marcog_trl.preferences.pairs import read_pairs, write_pairs


def length(completions, **kwargs):
    return [len(text) / 10 for text in completions]


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def collect(team, count=3, reward=length, **options):
    return collect_preferences(team, teams.dataset(count), **{"num_candidates": 4, "reward_funcs": reward} | options)


@pytest.fixture(scope="module")
def pairs(load_team):
    return collect(load_team("latent"), pairs_per_problem=2)


def test_rows_hold_what_was_played(load_team, pairs):
    team = load_team("latent")
    assert len(pairs) == 6
    for pair in pairs:
        assert pair["chosen_score"] > pair["rejected_score"]
        assert pair["chosen_score"] == pytest.approx(sum(pair["chosen_agent_scores"]) / 2)
        assert pair["turn"] == 0 and pair["history"] == []
        for side in ("chosen", "rejected"):
            assert [(row["agent"], row["turn"], row["act"]) for row in pair[side]] == [("a", 0, 0), ("b", 0, 0)]
            texts = [team.tokenizer.decode(row["completion_ids"], skip_special_tokens=True) for row in pair[side]]
            assert pair[f"{side}_score"] == pytest.approx(len("|".join(texts)) / 10)
            for row in pair[side]:
                prompt = team.tokenizer.decode(row["prompt_ids"])
                assert f"{pair['prompt']} {row['agent']}0" in prompt
                assert 0 < len(row["completion_ids"]) <= team.settings.max_completion_length
    identity = json.loads(pairs[0]["team"])
    assert identity["agents"] == ["a", "b"] and identity["workflow"] == "Pair" and identity["latents"]


def test_latents_are_the_means_that_evaluation_uses(load_team, pairs):
    team = load_team("latent")
    for row in (*pairs[0]["chosen"], *pairs[-1]["rejected"]):
        inputs = {"input_ids": torch.tensor([row["prompt_ids"]])}
        with team.use_agent(row["agent"], inputs):
            z = team.modules.context.z
        assert torch.allclose(z[0], torch.tensor(row["latent"]), atol=1e-6)
        assert len(row["latent"]) == team.settings.latent_size


def test_the_same_call_gives_the_same_pairs(load_team, pairs):
    team = load_team("latent")
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert collect(team, pairs_per_problem=2, batch_size=1).to_list() == pairs.to_list()
    assert torch.equal(torch.get_rng_state(), state) and not team.model.training
    assert collect(team, pairs_per_problem=2, seed=1).to_list() != pairs.to_list()


def test_pairs_can_be_written_and_read(pairs, tmp_path):
    write_pairs(pairs, tmp_path / "pairs.jsonl")
    read = read_pairs(tmp_path / "pairs.jsonl")
    assert read.to_list() == pairs.to_list() and read.features == pairs.features


class TestTrees:
    def test_siblings_share_their_history_and_differ_in_their_turn(self, load_team):
        pairs = collect(load_team(num_turns=2), 2, num_candidates=3, pairing="all")
        assert set(pairs["turn"]) == {0, 1}
        for pair in pairs:
            for side in ("chosen", "rejected"):
                assert {row["turn"] for row in pair[side]} == {pair["turn"]}
            assert [row["turn"] for row in pair["history"]] == [0, 0] * pair["turn"]
            assert [r["prompt_ids"] for r in pair["chosen"]] == [r["prompt_ids"] for r in pair["rejected"]]
        # 3 first moves per problem, and 3 children of each: at most 3 pairs at each of 8 nodes
        assert 0 < len(pairs) <= 24

    def test_replies_do_not_depend_on_the_batch(self, load_team):
        team = load_team(num_turns=2)
        options = {"num_candidates": 2, "pairing": "all", "unit": "turn"}
        assert collect(team, batch_size=4, **options).to_list() == collect(team, **options).to_list()


class TestBadInput:
    def test_equal_returns_give_an_empty_dataset(self, load_team):
        pairs = collect(load_team(), 2, constant)
        assert len(pairs) == 0 and "chosen" in pairs.column_names

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_candidates": 1}, "num_candidates=1 must be at least 2"),
            ({"pairing": "worst"}, "pairing='worst' is unknown"),
            ({"pairs_per_problem": 0}, "pairs_per_problem=0 must be at least 1"),
            ({"min_gap": -1.0}, "min_gap=-1.0 must be at least 0"),
            ({"unit": "token"}, "unit='token' is unknown"),
            ({"gamma_turn": 2.0}, "gamma_turn=2.0 must be at least 0 and at most 1"),
            ({"count": 0}, "problems is empty"),
        ],
    )
    def test_arguments_are_checked_before_anything_is_played(self, load_team, options, message):
        with pytest.raises(ValueError, match=message):
            collect(load_team(), **options)
