"""Counterfactual credit on numbers worked out by hand, and on a team whose gradient can be enumerated."""

import itertools

import pytest
import torch

from marcog_trl.agents import Agent, Slot, Workflow
from marcog_trl.algorithms.advantages import group_advantages, tree_returns
from marcog_trl.algorithms.counterfactual import critic_share, sibling_moments
from marcog_trl.rollout.engine import play_tree
from marcog_trl.rollout.tree import Tree


STAGES = [(Slot("planner"),), (Slot("coder"),)]


def worth(tree, leaves):
    """Q̂ of the rows of one problem, from the rewards of its episodes."""
    return torch.tensor(leaves)[torch.tensor(tree.episodes_of_row)].mean(1)


class TestNumbers:
    def test_siblings_have_the_same_context(self):
        tree = Tree.of_stages(STAGES, [2, 2])
        earned = worth(tree, [1.0, 0.0, 0.0, 0.0])
        assert earned.tolist() == [0.5, 0.0, 1.0, 0.0, 0.0, 0.0]
        assert group_advantages(earned, tree.siblings, "rloo").tolist() == [0.5, -0.5, 1.0, -1.0, 0.0, 0.0]
        flat = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, "rloo")
        torch.testing.assert_close(flat, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))

    def test_mask_and_groups_of_several_sizes(self):
        found = group_advantages(
            torch.tensor([1.0, 3.0, 2.0, 4.0, 9.0, 5.0]), [2, 3, 1], "rloo", torch.tensor([1, 1, 1, 0, 1, 1])
        )
        assert found.tolist() == [-2.0, 2.0, -7.0, 0.0, 7.0, 0.0]
        scaled = group_advantages(torch.tensor([1.0, 3.0, 2.0, 2.0, 8.0]), [2, 3], "mean", scale="group")
        torch.testing.assert_close(scaled[:2], torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-4))
        torch.testing.assert_close(scaled[2:], torch.tensor([-2.0, -2.0, 4.0]) / (12**0.5 + 1e-4))

    def test_the_share_of_the_critic(self):
        def share(variance, error, siblings):
            return critic_share(torch.tensor(variance), torch.tensor(error), torch.tensor(siblings)).item()

        assert share(0.08, 0.01, 3.0) == pytest.approx(0.8)
        assert share(0.08, 0.01, 1.0) == 1.0
        assert share(0.08, -0.01, 3.0) == 1.0
        assert share(0.0, 0.0, 3.0) == 0.0

    def test_moments_of_siblings(self):
        variance, error, count = sibling_moments(
            torch.tensor([1.0, 0.0, 0.5, 0.9, 7.0]), torch.full((5,), 0.4), torch.tensor([1, 1, 1, 1, 0]), [2, 3]
        )
        torch.testing.assert_close(variance, torch.tensor([0.5, 0.08]))
        torch.testing.assert_close(error, torch.tensor([0.1**2 - 0.25, 0.3**2 - 0.04]))
        assert count.tolist() == [2.0, 2.0]

    def test_joint_actions_that_share_replies_are_counterfactual(self):
        class Pair(Workflow):
            agents = (Agent("helper", "Help."), Agent("main", "Write."))

        tree = Tree.of_turns(Pair(), [2], cross=True)
        # Joint actions: (helper 0, main 0), (0, 1), (1, 0), (1, 1)
        found = group_advantages(worth(tree, [1.0, 0.0, 0.5, 0.5]), tree.siblings, "rloo")
        assert found.tolist() == [0.0, 0.0, 0.5, -0.5]
        lines = Tree.of_turns(Pair(), [2])
        aligned = group_advantages(worth(lines, [1.0, 0.5]), lines.siblings, "rloo")
        assert aligned.tolist() == [0.5, -0.5, 0.5, -0.5]


class TwoStages(Workflow):
    """The planner says 0 or 1, and the coder, who reads it, too."""

    agents = (Agent("planner", "Plan."), Agent("coder", "Code."))

    def play(self, problem):
        plan = yield {"planner": "plan"}
        code = yield {"coder": plan["planner"]}
        return plan["planner"] + code["coder"]


class TestGradient:
    """A softmax team whose estimates are averaged over all that can happen."""

    # Planner, coder after 0, after 1
    LOGITS = torch.tensor([[0.3, -0.4], [0.9, -0.2], [-0.7, 0.5]], dtype=torch.double)
    REWARD = torch.tensor([[1.0, -0.5], [0.2, 2.0]], dtype=torch.double)

    def exact(self):
        logits = self.LOGITS.clone().requires_grad_()
        planner, coder = logits[0].softmax(0), logits[1:].softmax(1)
        (planner[:, None] * coder * self.REWARD).sum().backward()
        return logits.grad

    def estimate(self, logits, replies, fixed):
        """The estimated gradient of one tree, and the probability of its replies. `replies`: plans, then codes."""
        stages = iter((replies[:2], replies[2:]))

        def generate(rows):
            return [[reply] for reply in next(stages)], None

        tree = Tree.of_stages(STAGES, [2, 2])
        [episodes] = play_tree(
            TwoStages(), [{"prompt": ""}], generate, lambda prompts: [[0]] * len(prompts),
            lambda ids: [str(i) for [i] in ids], tree,
        )  # fmt: skip
        said = [tuple(map(int, episode.turns[0].solution)) for episode in episodes]
        rewards = torch.stack([self.REWARD[pair] for pair in said])
        all_played = torch.ones(4, 1, dtype=torch.bool)
        returns, _ = tree_returns(rewards[:, None, None], all_played, all_played, tree.branches)
        found = group_advantages(returns.flatten()[torch.tensor(tree.episodes_of_row)].mean(1), tree.siblings, "rloo")
        policy = logits.log_softmax(1)
        scores = [policy[0, replies[g]] for g in range(2)]
        scores += [policy[1 + replies[g // 2], replies[2 + g]] for g in range(4)]
        if fixed:  # compares plans with the codes that were written for the first one
            other = [self.REWARD[replies[g], replies[2]] for g in range(2)]
            found[:2] = torch.stack([other[0] - other[1], other[1] - other[0]])
        surrogate = sum(a * s for a, s in zip(found[:2], scores[:2], strict=True)) / 2
        surrogate = surrogate + sum(a * s for a, s in zip(found[2:], scores[2:], strict=True)) / 4
        [gradient] = torch.autograd.grad(surrogate, logits)
        return gradient, torch.stack(scores).sum().exp().detach()

    def mean(self, fixed):
        logits = self.LOGITS.clone().requires_grad_()
        total, mass = torch.zeros_like(self.LOGITS), 0.0
        for replies in itertools.product((0, 1), repeat=6):
            gradient, probability = self.estimate(logits, replies, fixed)
            total, mass = total + probability * gradient, mass + probability
        assert mass == pytest.approx(1.0)
        return total

    def test_its_mean_is_the_exact_gradient(self):
        torch.testing.assert_close(self.mean(fixed=False), self.exact(), rtol=1e-9, atol=1e-12)

    def test_that_of_fixed_later_replies_is_not(self):
        biased = self.mean(fixed=True)
        torch.testing.assert_close(biased[1:], self.exact()[1:], rtol=1e-9, atol=1e-12)
        assert (biased[0] - self.exact()[0]).abs().max() > 0.01
