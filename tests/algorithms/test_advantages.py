import threading

import pytest
import torch

from marcog_trl.algorithms.advantages import (
    agent_weights,
    gae,
    group_advantages,
    normalize_advantages,
    value_loss,
)


def gae_by_loop(rewards, values, mask, gamma, lam, next_row, gamma_turn, lam_turn):
    """The recursion as the paper writes it, token by token, along each chain of rows."""
    B, T = rewards.shape
    advantages = torch.zeros_like(rewards)
    starts = set(range(B)) - {int(row) for row in next_row if row >= 0}
    for start in starts:
        chain, row = [], start
        while row >= 0:
            chain.append(row)
            row = int(next_row[row])
        tokens = [(row, t) for row in chain for t in range(T) if mask[row, t]]
        following_value = following_advantage = 0.0
        following_row = None
        for row, t in reversed(tokens):
            same = following_row in (None, row)
            discount, trace = (gamma, lam) if same else (gamma_turn, lam_turn)
            delta = rewards[row, t] + discount * following_value - values[row, t]
            advantages[row, t] = delta + discount * trace * following_advantage
            following_value, following_advantage, following_row = values[row, t], advantages[row, t], row
    return advantages


class Processes:
    """Runs a function on parts of a batch in threads whose `sums` really meet, as collectives do."""

    def __init__(self, count):
        self.count, self.barrier, self.parts = count, threading.Barrier(count, timeout=30), [None] * count

    def run(self, function, parts):
        results = [None] * self.count

        def work(rank):
            def sums(x):
                self.parts[rank] = x
                self.barrier.wait()
                total = sum(self.parts)
                self.barrier.wait()
                return total

            results[rank] = function(parts[rank], sums)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class TestGae:
    def test_gaps_and_padding_are_skipped(self):
        nan = float("nan")
        rewards = torch.tensor([[nan, 0.0, nan, 0.0, 9.0, 1.0, nan]])
        values = torch.tensor([[9.0, 0.5, nan, 0.6, 9.0, 0.7, 9.0]])
        mask = torch.tensor([[0, 1, 0, 1, 0, 1, 0]])
        advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.5)
        torch.testing.assert_close(advantages, torch.tensor([[0, 0.225, 0, 0.25, 0, 0.3, 0]]))
        torch.testing.assert_close(returns, torch.tensor([[0, 0.725, 0, 0.85, 0, 1.0, 0]]))

    def test_two_turns_by_hand(self):
        rewards = torch.tensor([[4.0, 0.0], [1.0, 2.0]])  # the second row is the first turn
        values = torch.tensor([[3.0, 0.0], [0.5, 0.25]])
        mask = torch.tensor([[1, 0], [1, 1]])
        advantages, returns = gae(
            rewards, values, mask, gamma=0.5, lam=0.5, next_row=torch.tensor([-1, 0]), gamma_turn=0.8, lam_turn=0.25
        )
        # second turn: 4 − 3 = 1. First turn, last token: 2 + 0.8 · 3 − 0.25 + 0.8 · 0.25 · 1 = 4.35;
        # first token: 1 + 0.5 · 0.25 − 0.5 + 0.25 · 4.35 = 1.7125
        torch.testing.assert_close(advantages, torch.tensor([[1.0, 0.0], [1.7125, 4.35]]))
        torch.testing.assert_close(returns, torch.tensor([[4.0, 0.0], [2.2125, 4.6]]))

    def test_lam_turn_defaults_to_lam(self):
        rewards, values, mask = torch.rand(3, 4), torch.rand(3, 4), torch.ones(3, 4)
        chain = torch.tensor([1, 2, -1])
        expected = gae(rewards, values, mask, lam=0.7, next_row=chain, lam_turn=0.7)
        torch.testing.assert_close(gae(rewards, values, mask, lam=0.7, next_row=chain), expected)
        assert not torch.equal(gae(rewards, values, mask, lam=0.7, next_row=chain, lam_turn=0.5)[0], expected[0])

    @pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    def test_equals_the_recursion_on_random_chains(self, gamma, lam):
        generator = torch.Generator().manual_seed(7)
        B, T = 12, 9
        rewards, values = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
        mask = torch.rand(B, T, generator=generator) < 0.6
        mask[torch.arange(B), torch.randint(T, (B,), generator=generator)] = True
        next_row = torch.tensor([5, -1, 0, -1, 1, 3, -1, 11, 7, -1, 8, -1])  # chains of up to four rows, in disorder
        settings = {"gamma": gamma, "lam": lam, "gamma_turn": 0.8, "lam_turn": 0.6}
        advantages, returns = gae(rewards, values, mask, next_row=next_row, **settings)
        expected = gae_by_loop(rewards, values, mask, next_row=next_row, **settings)
        torch.testing.assert_close(advantages, expected)
        torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0))

    def test_rows_without_live_tokens(self):
        mask = torch.tensor([[0, 0], [1, 1]])
        chain = torch.tensor([1, -1])
        advantages, returns = gae(torch.ones(2, 2), torch.ones(2, 2), mask, next_row=chain)  # a dead row's link: fine
        assert not advantages[0].any() and not returns[0].any() and advantages[1].any()

    def test_a_circle(self):
        with pytest.raises(ValueError, match="circle"):
            gae(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), next_row=torch.tensor([1, 0]))

    def test_long_rows_keep_their_precision(self):
        rewards = torch.zeros(1, 4096)
        rewards[0, -1] = 1.0
        advantages, _ = gae(rewards, torch.zeros(1, 4096), torch.ones(1, 4096), lam=0.999)
        expected = 0.999 ** torch.arange(4095, -1, -1, dtype=torch.float64)
        torch.testing.assert_close(advantages[0].double(), expected, rtol=1e-5, atol=0)


class TestNormalizeAdvantages:
    def test_by_hand(self):
        advantages = torch.tensor([[1.0, 3.0, float("nan")], [10.0, 99.0, 14.0]])
        mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
        per_agent, variance = normalize_advantages(advantages, mask, torch.tensor([0, 1]), torch.tensor([0.0, 16.0]))
        torch.testing.assert_close(per_agent, torch.tensor([[-1.0, 1.0, 0.0], [-0.5, 0.0, 0.5]]))
        assert variance.tolist() == [1, 4]
        together, _ = normalize_advantages(advantages, mask, torch.tensor([0, 0]), torch.zeros(1))
        # mean 7, variance (36 + 16 + 9 + 49) / 4 = 27.5
        torch.testing.assert_close(together, torch.tensor([[-6.0, -4.0, 0.0], [3.0, 0.0, 7.0]]) / 27.5**0.5)

    def test_degenerate_groups_give_zero(self):
        advantages, mask = torch.tensor([[5.0, 7.0], [0.1, 0.1], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1], [0, 0]])
        normalized, variance = normalize_advantages(advantages, mask, torch.tensor([0, 1, 2]), torch.zeros(3))
        torch.testing.assert_close(normalized, torch.zeros(3, 2), rtol=0, atol=1e-3)
        assert variance[:2].tolist() == [0, 0] and variance[2].isnan()

    def test_statistics_are_global(self):
        """Also where a process does not have rows of the last group."""
        torch.manual_seed(0)
        advantages, mask, agents = (
            torch.randn(9, 5) + 3,
            torch.rand(9, 5) < 0.7,
            torch.tensor([0, 1, 0, 1, 0, 1, 0, 2, 2]),
        )
        least = torch.zeros(3)
        whole, _ = normalize_advantages(advantages, mask, agents, least)
        rows = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5, 6, 7, 8])
        parts = Processes(2).run(
            lambda part, sums: normalize_advantages(advantages[part], mask[part], agents[part], least, sums)[0], rows
        )
        torch.testing.assert_close(torch.cat(parts), whole)
        for agent in range(3):
            tokens = whole[agents == agent][mask[agents == agent]]
            torch.testing.assert_close(tokens.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
            squares = [
                row[live].square().mean()
                for row, live in zip(whole[agents == agent], mask[agents == agent], strict=True)
            ]
            torch.testing.assert_close(torch.stack(squares).nanmean(), torch.tensor(1.0))

    def test_the_variance_counts_rows_and_not_tokens(self):
        advantages = torch.tensor([[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
        mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
        normalized, variance = normalize_advantages(advantages, mask, torch.zeros(3, dtype=torch.long), torch.zeros(1))
        # mean 7 / 4; mean squares (9 / 4)^2 and (3 / 4)^2
        torch.testing.assert_close(variance, torch.tensor([45 / 16]))
        torch.testing.assert_close(normalized, (advantages - 7 / 4) * mask / variance.sqrt())

    @pytest.mark.parametrize("chance", [0.9, 0.1, 0.5])
    def test_a_coin_does_not_reward_lengths(self, chance):
        """Batches of 8 replies, which end after each token with a chance of .1; the gradient of its log-odds, in standard deviations."""
        torch.manual_seed(0)
        batches = torch.arange(20_000).repeat_interleave(8)
        length = (torch.rand(len(batches)).log() / torch.tensor(0.9).log()).ceil().clamp(1, 48)
        mask = torch.arange(48) < length[:, None]
        coins = (torch.rand(len(batches)) < chance).float()[:, None].expand(mask.shape)
        normalized, _ = normalize_advantages(coins, mask, batches, torch.zeros(20_000))
        gradient = torch.zeros(20_000).index_add(0, batches, normalized[:, 0] * (0.1 * length - 1))
        assert (
            abs(gradient.mean() / gradient.std()) < 0.07
        )  # .22 if the variance counts tokens; .04 is an error of 5 sigma

    def test_large_mean(self):
        normalized, _ = normalize_advantages(
            1e4 + torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([0]), torch.zeros(1)
        )
        torch.testing.assert_close(normalized, torch.tensor([[-1.0, 1.0]]))


class TestAgentWeights:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
    agents = torch.tensor([0, 1, 0, 1, 2])

    def test_tokens_by_hand(self):
        # agents have 5, 1 and 0 tokens: 6 / (2 · 5), 6 / (2 · 1), and nothing for the absent one
        torch.testing.assert_close(agent_weights(self.mask, self.agents, 3), torch.tensor([0.6, 3.0, 0.6, 3.0, 0.0]))

    def test_rows_by_hand(self):
        expected = torch.tensor([0.75, 1.5, 0.75, 1.5, 0.0])
        torch.testing.assert_close(agent_weights(self.mask, self.agents, 3, unit="row"), expected)

    def test_counts_are_global(self):
        rows = torch.tensor([0, 1]), torch.tensor([2, 3, 4])
        parts = Processes(2).run(
            lambda part, sums: agent_weights(self.mask[part], self.agents[part], 3, reduce=sums), rows
        )
        torch.testing.assert_close(torch.cat(parts), agent_weights(self.mask, self.agents, 3))


class TestGroupAdvantages:
    returns = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("mean", [-2.0, -1.0, 3.0, -1.0, -1.0, 2.0]),
            ("rloo", [-3.0, -1.5, 4.5, -1.5, -1.5, 3.0]),
            ("max", [-5.0, -4.0, 0.0, -3.0, -3.0, 0.0]),
            ("none", [1.0, 2.0, 6.0, 0.0, 0.0, 3.0]),
        ],
    )
    def test_by_hand(self, kind, expected):
        torch.testing.assert_close(group_advantages(self.returns, 3, kind), torch.tensor(expected))

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("mean", [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
            ("rloo", [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            ("max", [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            ("none", [1.0, 2.0, 0.0, 0.0, 0.0, 3.0]),
        ],
    )
    def test_masked_siblings_do_not_count(self, kind, expected):
        mask = torch.tensor([1, 1, 0, 0, 0, 1])
        returns = self.returns.masked_fill(mask == 0, float("nan"))
        torch.testing.assert_close(group_advantages(returns, 3, kind, mask), torch.tensor(expected))

    @pytest.mark.parametrize("kind", ["mean", "rloo", "max"])
    @pytest.mark.parametrize("scale", ["none", "group"])
    def test_equal_returns_leave_no_rounding(self, kind, scale):
        returns = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 5.0])
        assert group_advantages(returns, 3, kind, returns < 5, scale).tolist() == [0.0] * 6

    @pytest.mark.parametrize("scale", ["group", "batch", "agent"])
    def test_returns_without_spread_are_not_divided(self, scale):
        """Not even where rounding makes them differ: solved siblings keep their return."""
        agents = torch.zeros(6, dtype=torch.long)
        for returns in (torch.ones(6), torch.full((6,), 0.7) + 1e-7 * torch.arange(6)):
            scaled = group_advantages(returns, 3, "none", scale=scale, agents=agents)
            torch.testing.assert_close(scaled, returns)
            assert not group_advantages(returns, 3, "mean", scale=scale, agents=agents).abs().gt(0.01).any()

    def test_agent_scale_is_global(self):
        torch.manual_seed(0)
        returns, agents, mask = torch.randn(12), torch.arange(12) // 2 % 3, torch.arange(12) != 5
        whole = group_advantages(returns, 2, "mean", mask, "agent", agents)
        for agent in range(3):
            rows = (agents == agent) & mask
            expected = group_advantages(returns, 2, "mean", mask)[rows] / (returns[rows].std() + 1e-4)
            torch.testing.assert_close(whole[rows], expected)
        parts = Processes(2).run(
            lambda part, sums: group_advantages(returns[part], 2, "mean", mask[part], "agent", agents[part], sums),
            torch.arange(12).split(6),
        )
        torch.testing.assert_close(torch.cat(parts), whole)

    def test_unknown_scale_is_refused(self):
        with pytest.raises(KeyError, match="agents"):
            group_advantages(self.returns, 3, scale="agents")


class TestValueLoss:
    def test_by_hand(self):
        values = torch.tensor([[1.0, 2.0, 0.0, 9.0]])
        old_values = torch.tensor([[1.1, 0.0, 0.0, 0.0]])
        returns = torch.tensor([[3.0, 3.0, 1.0, float("nan")]])
        mask = torch.tensor([[1, 1, 1, 0]])
        loss = value_loss(values, old_values, returns, mask, cliprange=0.2)
        # unclipped 2² / 2; clipped to 0.2: 2.8² / 2 beats 1² / 2; unclipped 1² / 2; masked
        torch.testing.assert_close(loss, torch.tensor([[2.0, 3.92, 0.5, 0.0]]))

    def test_gradient_stops_at_the_clip_only_while_it_would_improve(self):
        values = torch.tensor([[0.5, -0.5]], requires_grad=True)
        loss = value_loss(values, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), cliprange=0.2)
        loss.sum().backward()
        torch.testing.assert_close(values.grad, torch.tensor([[0.0, -1.5]]))
