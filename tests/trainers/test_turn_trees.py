"""Trees of turns and joint actions that share replies: which rows there are, what they earn, and what is refused."""

import pytest
import teams
import torch

from marcog_trl import Agent, MultiAgentGRPOTrainer, Workflow
from marcog_trl.algorithms.advantages import tree_returns


class Memory(Workflow):
    """Agents that are reminded of their own reply."""

    agents = (Agent("a", "You are a."), Agent("b", "You are b."))
    num_turns = 2

    def play(self, problem):
        replies = yield {agent.name: f"{problem['prompt']} {agent.name}" for agent in self.agents}
        yield {agent.name: f"{problem['prompt']} {agent.name} said {replies[agent.name]}" for agent in self.agents}

    def solution(self, problem, replies):
        return "|".join(replies.values())


# Two problems, two generations: rewards of the joint actions of the first turn, and of the second
FIRST, SECOND = [1.0, 3.0, 0.0, 6.0], [4.0, 0.0, 2.0, 2.0, 1.0, 1.0, 5.0, 9.0]
RETURNS = [[2.0, 4.0, 0.5, 9.5], SECOND]  # with gamma_turn=0.5


def tree(model, path, rewards, **options):
    """A trainer whose reward function returns the given numbers, turn by turn, and what its replies are."""
    remaining = iter(rewards)
    options = {"workflow": Memory(), "turn_tree": True, "per_device_train_batch_size": 24, **options}
    trainer = teams.make(
        model, path, MultiAgentGRPOTrainer, reward=lambda completions, **kwargs: next(remaining), data=teams.dataset(2),
        gamma_turn=0.5, agent_loss_weighting="token", **options,
    )  # fmt: skip
    return trainer, teams.script(trainer)


class TestTree:
    def test_every_joint_action_branches_and_a_depth_is_one_call(self, tiny_model, tmp_path):
        trainer, calls = tree(tiny_model, tmp_path, [FIRST, SECOND])
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [2 * 2 * 2, 2 * 2 * 2 * 2]
        first = [trainer._tokenizer.decode(reply, skip_special_tokens=True) for reply in calls[0][1]]
        second = [trainer._tokenizer.decode(prompt) for prompt in calls[1][0]]
        # Episodes are joint actions: problem, generation, agent. Both children of one see what it said, and nothing else
        said = [text for e in range(4) for _ in range(2) for text in first[2 * e : 2 * e + 2]]
        assert len(second) == 16
        for i, prompt in enumerate(second):
            problem, agent = i // 8, "ab"[i % 2]
            assert prompt == f"def f{problem}(x): {agent} said {said[i]}"
        assert len(set(first)) == 8
        # Rows: problem, then groups (turn 0: a, b; turn 1, node 0: a, b; node 1: a, b), then generations
        assert output["agent"].tolist() == [0, 0, 1, 1] * 6
        assert output["turn"].tolist() == ([0] * 4 + [1] * 8) * 2
        texts = trainer._tokenizer.batch_decode(output["completion_ids"], skip_special_tokens=True)
        prompts = trainer._tokenizer.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        assert texts[:4] == [first[0], first[2], first[1], first[3]]
        assert prompts[4:12] == [
            f"def f0(x): {agent} said {first[2 * node + 'ab'.index(agent)]}" for node in (0, 1) for agent in "aabb"
        ]

    @pytest.mark.parametrize(
        ("kind", "first", "second"),
        [
            ("none", RETURNS[0], RETURNS[1]),
            ("mean", [-1.0, 1.0, -4.5, 4.5], [2.0, -2.0, 0.0, 0.0, 0.0, 0.0, -2.0, 2.0]),
            ("rloo", [-2.0, 2.0, -9.0, 9.0], [4.0, -4.0, 0.0, 0.0, 0.0, 0.0, -4.0, 4.0]),
            ("max", [-2.0, 0.0, -9.0, 0.0], [0.0, -4.0, 0.0, 0.0, 0.0, 0.0, -4.0, 0.0]),
        ],
    )
    def test_returns_go_back_up_and_siblings_share_a_node(self, tiny_model, tmp_path, kind, first, second):
        trainer, _ = tree(tiny_model, tmp_path, [FIRST, SECOND], advantage=kind)
        found = teams.generation_batch(trainer)["advantages"].view(2, 6, 2)
        for agent in range(2):
            torch.testing.assert_close(found[:, agent].flatten(), torch.tensor(first))
            torch.testing.assert_close(found[:, [2 + agent, 4 + agent]].flatten(), torch.tensor(second))

    def test_a_joint_action_that_earned_enough_has_no_children(self, tiny_model, tmp_path):
        """Each by itself: what its siblings earned, which is their baseline, does not depend on it."""
        trainer, calls = tree(
            tiny_model, tmp_path, [FIRST, SECOND[:4]], early_termination_threshold=2.0, advantage="none"
        )
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [8, 8]
        live = (output["completion_mask"] * output["tool_mask"]).any(1).view(2, 6, 2)
        assert live[:, :4].all() and not live[:, 4:].any()
        found = output["advantages"].view(2, 6, 2)
        assert found[:, 0].tolist() == found[:, 1].tolist() == [[1.0 + 0.5 * 2.0, 3.0], [0.0 + 0.5 * 2.0, 6.0]]

    def test_a_masked_node_has_no_children_and_no_weight(self, tiny_model, tmp_path):
        first = [1.0, None, 0.0, 6.0]
        second = [4.0, 0.0, None, None, 5.0, None]  # of the three nodes that have children
        trainer, calls = tree(tiny_model, tmp_path, [first, second], advantage="none")
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [8, 12]
        found = output["advantages"].view(2, 6, 2)
        live = (output["completion_mask"] * output["tool_mask"]).any(1).view(2, 6, 2)
        for agent in range(2):
            assert found[0, agent].tolist() == [2.0, 0.0] and live[0, agent].tolist() == [True, False]
            # All children of the first node are masked, so that its return is not known
            assert found[1, agent].tolist() == [0.0, 8.5] and live[1, agent].tolist() == [False, True]
            assert live[1, 2 + agent].tolist() == [False, False] and live[1, 4 + agent].tolist() == [True, False]

    def test_evaluation_plays_lines(self, tiny_model, tmp_path):
        trainer, calls = tree(
            tiny_model, tmp_path, [[1.0, 2.0], [3.0, 4.0]], eval_dataset=teams.dataset(2),
            per_device_eval_batch_size=8,
        )  # fmt: skip
        metrics = trainer.evaluate()
        assert [len(prompts) for prompts, _ in calls] == [4, 4]
        assert metrics["eval_agents/a/return"] == pytest.approx((2.5 + 3.0 + 4.0 + 4.0) / 4)


class TestCross:
    def test_a_reply_earns_the_mean_over_its_joint_actions(self, tiny_model, tmp_path):
        # Joint actions of a problem: (a0, b0), (a0, b1), (a1, b0), (a1, b1)
        rewards = [1.0, 3.0, 5.0, 9.0, 0.0, 2.0, 2.0, 4.0]
        trainer, calls = tree(
            tiny_model, tmp_path, [rewards], workflow=teams.Pair(), turn_tree=False, joint_mode="cross",
            advantage="none", per_device_train_batch_size=8,
        )  # fmt: skip
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [8]
        assert output["advantages"].view(2, 2, 2).tolist() == [[[2.0, 7.0], [3.0, 6.0]], [[1.0, 3.0], [1.0, 3.0]]]

    def test_evaluates_every_combination_of_the_same_replies(self, tiny_model, tmp_path):
        seen = []

        def reward(completions, **kwargs):
            seen.extend(completions)
            return [0.0] * len(completions)

        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, reward=reward, workflow=teams.Pair(("a", "b", "c")),
            data=teams.dataset(1), joint_mode="cross", per_device_train_batch_size=6,
        )  # fmt: skip
        calls = teams.script(trainer)
        teams.generation_batch(trainer)
        [a, b, c] = [
            [trainer._tokenizer.decode(reply, skip_special_tokens=True) for reply in calls[0][1][2 * i : 2 * i + 2]]
            for i in range(3)
        ]
        assert seen == [f"{x}|{y}|{z}" for x in a for y in b for z in c]

    def test_turns_branch_by_joint_action(self, tiny_model, tmp_path):
        first = [1.0, 3.0, 5.0, 9.0] * 2
        second = [float(i) for i in range(32)]
        trainer, calls = tree(
            tiny_model, tmp_path, [first, second], joint_mode="cross", advantage="none", per_device_train_batch_size=40
        )
        output = teams.generation_batch(trainer)
        assert [len(prompts) for prompts, _ in calls] == [8, 32]
        found = output["advantages"].view(2, 10, 2)
        # A joint action is worth its reward and half the mean of its four children: 1 + .75, 3 + 2.75, 5 + 4.75, 9 + 6.75
        assert found[0, :2].tolist() == [[3.75, 12.75], [5.75, 10.75]]
        # At its first node the children earn 0 to 3
        assert found[0, 2:4].tolist() == [[0.5, 2.5], [1.0, 2.0]]

    def test_a_masked_joint_action_is_left_out_of_the_mean(self, tiny_model, tmp_path):
        rewards = [1.0, None, 5.0, 9.0, None, None, 2.0, 4.0]
        trainer, _ = tree(
            tiny_model, tmp_path, [rewards], workflow=teams.Pair(), turn_tree=False, joint_mode="cross",
            advantage="none", per_device_train_batch_size=8,
        )  # fmt: skip
        output = teams.generation_batch(trainer)
        assert output["advantages"].view(2, 2, 2).tolist() == [[[1.0, 7.0], [3.0, 9.0]], [[0.0, 3.0], [2.0, 4.0]]]
        live = (output["completion_mask"] * output["tool_mask"]).any(1).view(2, 2, 2)
        assert live.tolist() == [[[True, True], [True, True]], [[False, True], [True, True]]]


class TestTreeReturns:
    def test_three_turns(self):
        rewards = torch.zeros(8, 1, 3)
        rewards[:2, 0, 0], rewards[:4, 0, 1] = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0, 2.0, 2.0])
        rewards[:, 0, 2] = torch.arange(8.0)
        played = torch.zeros(8, 3, dtype=torch.bool)
        played[:2, 0] = played[:4, 1] = played[:, 2] = True
        returns, known = tree_returns(rewards, played, played, [2, 2, 2], gamma_turn=0.5)
        assert returns[:4, 0, 1].tolist() == [0.25, 5.25, 4.25, 5.25]
        assert returns[:2, 0, 0].tolist() == [1 + 0.5 * 2.75, 2 + 0.5 * 4.75]
        assert torch.equal(known, played)


class TestBadInput:
    def test_agents_that_speak_later_are_refused_when_they_do(self, tiny_model, tmp_path):
        class Late(teams.Pair):
            """The second turn is a chain."""

            def play(self, problem):
                yield {"a": problem["prompt"], "b": problem["prompt"]}
                yield {"a": problem["prompt"]}
                yield {"b": problem["prompt"]}

        trainer, _ = tree(
            tiny_model, tmp_path, [[0.0] * 8, [0.0] * 32], workflow=Late(num_turns=2), joint_mode="cross",
            per_device_train_batch_size=40,
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"but Late asks \['a'\] alone\. Set joint_mode='align'\."):
            teams.generation_batch(trainer)
