"""Credit by replies in the same context, in every trainer: what rows earn, what is logged, and what is refused."""

import pytest
import teams
import torch

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer


def branching(model, path, trainer=MultiAgentGRPOTrainer, fanout=(2, 2), leaves=None, **options):
    """A trainer of a chain of two agents, whose reward function returns the given numbers, turn by turn."""
    remaining = iter(leaves or ())
    size = options.pop("per_device_train_batch_size", 6)
    reward = teams.letters if leaves is None else lambda completions, **kwargs: next(remaining)
    options = {"workflow": teams.Chain(), "data": teams.dataset(2), "fanout": fanout and list(fanout), **options}
    options.setdefault("num_generations", int(torch.tensor(options["fanout"] or [4]).prod()))
    return teams.make(
        model, path, trainer, reward=options.pop("reward", reward), credit="counterfactual",
        agent_loss_weighting=options.pop("agent_loss_weighting", "token"), per_device_train_batch_size=size, **options,
    )  # fmt: skip


class TestAdvantages:
    def test_replies_are_compared_in_the_same_context(self, tiny_model, tmp_path):
        trainer = branching(tiny_model, tmp_path, leaves=[[1.0, 0.0, 0.0, 0.0]])
        calls = teams.script(trainer)
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [2, 4]
        assert output["advantages"].tolist() == [0.5, -0.5, 1.0, -1.0, 0.0, 0.0]
        assert output["agent"].tolist() == [0, 0, 1, 1, 1, 1]
        said = [trainer._tokenizer.decode(reply, skip_special_tokens=True) for reply in calls[0][1]]
        read = [trainer._tokenizer.decode(prompt) for prompt in calls[1][0]]
        assert read == [f"def f0(x): b0 {said[i]}" for i in (0, 0, 1, 1)]

    def test_what_a_reply_earns_includes_later_turns(self, tiny_model, tmp_path):
        first, second = [1.0, 3.0, 0.0, 2.0], [4.0, 0.0, 2.0, 2.0, 0.0, 0.0, 2.0, 6.0]
        trainer = branching(
            tiny_model, tmp_path, fanout=(2, 2, 1, 2), leaves=[first, second], workflow=teams.Chain(num_turns=2),
            gamma_turn=0.5, per_device_train_batch_size=18,
        )  # fmt: skip
        teams.script(trainer)
        found = teams.generation_batch(trainer)["advantages"].tolist()
        # Returns from the first turn: 1 + 1, 3 + 1, 0 + 0, 2 + 2
        assert found == [1.0, -1.0, -2.0, 2.0, -4.0, 4.0, 0, 0, 0, 0, 4.0, -4.0, 0, 0, 0, 0, -4.0, 4.0]

    def test_an_episode_that_earned_enough_ends_alone(self, tiny_model, tmp_path):
        """So that what a reply is compared with does not depend on it."""
        for earned in (3.0, 100.0):
            trainer = branching(
                tiny_model, tmp_path / str(earned), fanout=(2, 2, 1, 2), workflow=teams.Chain(num_turns=2),
                leaves=[[1.0, earned, 0.0, 2.0], [4.0, 0.0, 0.0, 0.0, 2.0, 6.0]], early_termination_threshold=2.5,
                per_device_train_batch_size=18,
            )  # fmt: skip
            teams.script(trainer)
            found = teams.generation_batch(trainer)["advantages"].tolist()
            # Returns from the first turn: 1 + 2, what it earned, 0 + 0, 2 + 4
            assert found[2:6] == [3.0 - earned, earned - 3.0, -6.0, 6.0]
            assert found[10:] == [4.0, -4.0, 0, 0, 0, 0, -4.0, 4.0]

    @pytest.mark.parametrize("trainer_class", [MultiAgentPPOTrainer, SHPPOTrainer])
    def test_the_critic_is_a_part_of_the_baseline(self, tiny_model, tmp_path, trainer_class):
        trainer = branching(
            tiny_model, tmp_path, trainer_class, leaves=[[1.0, 0.0, 0.0, 0.0]], critic_mix=0.5,
            advantage_normalization="none",
        )  # fmt: skip
        teams.script(trainer)
        teams.hold_critic(trainer, 0.4)
        output = teams.generation_batch(trainer)
        mask = output["completion_mask"] * output["tool_mask"]
        for row, expected in enumerate([0.3, -0.45, 0.8, -0.7, -0.2, -0.2]):
            own = output["advantages"][row][mask[row].bool()]
            torch.testing.assert_close(own, torch.full_like(own, expected))
            assert torch.equal(output["returns"][row] != 0, (mask[row] != 0) & (row in (0, 2)))

    def test_without_a_live_sibling_there_is_only_the_critic(self, tiny_model, tmp_path):
        for share, alone in ((0.0, 0.0), (0.5, 0.6)):
            trainer = branching(
                tiny_model, tmp_path / str(share), MultiAgentPPOTrainer, leaves=[[1.0, None, 0.0, 0.0]],
                critic_mix=share, advantage_normalization="none",
            )  # fmt: skip
            teams.script(trainer)
            teams.hold_critic(trainer, 0.4)
            output = teams.generation_batch(trainer)
            assert output["advantages"][2, 0].item() == pytest.approx(alone)
            assert not (output["completion_mask"] * output["tool_mask"])[3].any()

    def test_without_a_critic_the_siblings_are_the_baseline(self, tiny_model, tmp_path):
        trainer = branching(
            tiny_model, tmp_path, MultiAgentPPOTrainer, leaves=[[1.0, 0.0, 0.0, 0.0]], critic="none",
            advantage_normalization="none",
        )  # fmt: skip
        teams.script(trainer)
        assert teams.generation_batch(trainer)["advantages"][:, 0].tolist() == [0.5, -0.5, 1.0, -1.0, 0.0, 0.0]

    def test_auto_learns_the_share_from_earlier_batches(self, tiny_model, tmp_path):
        trainer = branching(
            tiny_model, tmp_path, MultiAgentPPOTrainer, (2, 3), leaves=[[0.8, 0.4, 0.0, 0.4, 0.0, 0.8]] * 2,
            critic_mix="auto", advantage_normalization="none", per_device_train_batch_size=8,
        )  # fmt: skip
        teams.script(trainer)
        teams.hold_critic(trainer, 0.5)
        first = teams.generation_batch(trainer)["advantages"]
        assert first[2, 0].item() == pytest.approx(0.6)  # .8 - mean(.4, 0)
        known = trainer.state.stateful_callbacks["critic_mix"]
        variance = 0.16
        assert known[1] == pytest.approx([variance, 0.1**2 - variance / 3, 1.0], abs=1e-6)
        assert known[0] == pytest.approx([0.0, 0.01, 1.0], abs=1e-6)
        known[1] = [0.08, 0.01, 1.0]
        second = teams.generation_batch(trainer)["advantages"]
        assert second[2, 0].item() == pytest.approx(0.8 - 0.2 * 0.2 - 0.8 * 0.5)


class TestRuns:
    def test_branches_cost_less_than_lines(self, tiny_model, tmp_path):
        lines = teams.make(
            tiny_model, tmp_path / "lines", MultiAgentGRPOTrainer, workflow=teams.Chain(), num_generations=8,
            per_device_train_batch_size=16, generation={"min_new_tokens": 6},
        )  # fmt: skip
        tree = branching(
            tiny_model, tmp_path / "tree", fanout=(2, 4), per_device_train_batch_size=10,
            generation={"min_new_tokens": 6},
        )  # fmt: skip
        for trainer in (lines, tree):
            trainer.train()
        assert teams.logged(lines, "ledger/evaluations") == teams.logged(tree, "ledger/evaluations") == [8.0]
        [expected], [found] = (teams.logged(trainer, "ledger/generated_tokens") for trainer in (lines, tree))
        assert found == expected * 10 / 16

    def test_evaluation_never_branches(self, tiny_model, tmp_path):
        trainer = branching(tiny_model, tmp_path, eval_dataset=teams.dataset(3), num_generations_eval=2)
        calls = teams.script(trainer)
        metrics = trainer.evaluate()
        assert [len(prompts) for prompts, _ in calls] == [4, 4, 2, 2]
        assert metrics["eval_ledger/evaluations"] == 3.0  # per batch: 4 and 2


class TestBadInput:
    def test_a_stage_without_siblings_warns(self, tiny_model, tmp_path):
        with pytest.warns(UserWarning, match=r"fanout=\[4, 1\] gives b one reply in each context"):
            branching(tiny_model, tmp_path, fanout=None, num_generations=4, per_device_train_batch_size=8)
