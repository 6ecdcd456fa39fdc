import pytest
import teams
import torch

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.agents import Slot
from marcog_trl.rollout.records import Row
from marcog_trl.team import team as team_module
from marcog_trl.team.shared_prompts import contiguous_states


PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7], [8, 9], [11]]


def rows_of(prompts, agent):
    return [Row(i, Slot(agent), 0, "", list(ids)) for i, ids in enumerate(prompts)]


def watch(trainer):
    """Rows and tokens of every forward pass from now on, as the decoder's layers see them."""
    seen = []
    layer = trainer.model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append((args[0].size(0), args[0].size(1))))
    return seen


def make(tiny_model, tmp_path, trainer_class=MultiAgentGRPOTrainer, **options):
    return teams.make(tiny_model, tmp_path, trainer_class, workflow=teams.Pair(), **options)


def generated(trainer, prompts=PROMPTS, **options):
    """Replies, and rows with their states, that TRL generates for the trainer."""
    rows = rows_of(prompts, "a")
    torch.manual_seed(0)
    generate = trainer.team.engine_functions(**options)["generate"]
    return generate(rows)[0], rows


class TestReplies:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"generation": {"num_beams": 3, "do_sample": False}},
            {"generation_kwargs": {"prefill_chunk_size": 2}},
            {"repetition_penalty": 2.0},
        ],
        ids=str,
    )
    def test_are_those_of_separate_prompts(self, tiny_model, tmp_path, monkeypatch, options):
        trainer = make(tiny_model, tmp_path, **options)
        seen = watch(trainer)
        shared, _ = generated(trainer)
        prompts, _ = seen[0]
        monkeypatch.setattr(team_module, "shared_prompts", lambda model: torch.no_grad())
        seen.clear()
        separate, _ = generated(trainer)
        assert prompts == 3 < seen[0][0]
        assert shared == separate and len({repr(reply) for reply in shared}) >= 3

    def test_prompts_that_begin_with_the_padding_token_are_not_shared(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        seen = watch(trainer)
        generated(trainer, [[0, 5, 6], [5, 6], [5, 6]])
        assert seen[0] == (2, 3) and seen[1] == (3, 1)

    def test_the_critic_has_the_states_of_every_row(self, tiny_model, tmp_path, monkeypatch):
        trainer = make(tiny_model, tmp_path, MultiAgentPPOTrainer)
        replies, rows = generated(trainer, token_states=True)
        monkeypatch.setattr(team_module, "shared_prompts", lambda model: torch.no_grad())
        others, expected = generated(trainer, token_states=True)
        assert replies == others
        for row, other in zip(rows, expected, strict=True):
            assert len(row.token_states) == len(replies[row.episode])
            torch.testing.assert_close(row.token_states, other.token_states, rtol=1e-4, atol=1e-5)


class TestWhere:
    @pytest.mark.parametrize("options", [{}, {"parameter_sharing": "separate"}])
    def test_rows_with_weights_of_their_own_do_not_share(self, tiny_model, tmp_path, options):
        trainer = make(tiny_model, tmp_path, SHPPOTrainer, latent_scope="agent", **options)
        seen = watch(trainer)
        generated(trainer)
        assert (6, 3) in seen and (3, 3) not in seen

    @pytest.mark.parametrize("kwargs", [{"use_cache": False}, {"cache_implementation": "static"}])
    def test_without_a_growing_cache_nothing_is_shared(self, tiny_model, tmp_path, kwargs):
        trainer = make(tiny_model, tmp_path, generation_kwargs=kwargs)
        seen = watch(trainer)
        replies, _ = generated(trainer)
        assert seen[0] == (6, 3) and len(replies) == 6


def test_the_head_reads_states_that_are_contiguous(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    seen = []
    head = trainer.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_contiguous()))
    inputs = torch.tensor([[5, 6, 7], [8, 9, 10]])
    trainer.model(input_ids=inputs, logits_to_keep=1, use_cache=False)
    assert seen == [False]  # otherwise `contiguous_states` has no use any more
    handle.remove()
    seen.clear()
    with contiguous_states(trainer.model):
        head.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_contiguous()))
        generated(trainer)
    assert len(seen) > 1 and all(seen)
