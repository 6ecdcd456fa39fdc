import pytest
import torch

from marcog_trl.algorithms.critic import Float32Linear, RunningMoments, ValueHead, pool_team_states


def pool_by_loop(states, stage, agent, live):
    """The definition, for the rows of one episode."""
    pooled = torch.zeros_like(states)
    for row in live.nonzero().flatten():
        latest = {}
        for other in sorted(range(len(states)), key=lambda r: int(stage[r])):
            if live[other] and stage[other] <= stage[row]:
                latest[int(agent[other])] = states[other]
        pooled[row] = torch.stack(list(latest.values())).mean(0)
    return pooled


class TestValueHead:
    def test_values_start_at_zero_and_every_parameter_learns_within_two_steps(self):
        torch.manual_seed(0)
        head = ValueHead(16)
        hidden, state = torch.randn(3, 5, 16), torch.randn(3, 16)
        assert head(hidden, state).shape == (3, 5)
        assert not head(hidden, state).any()
        before = {name: parameter.clone() for name, parameter in head.named_parameters()}
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (head(hidden, state) - 1).square().mean().backward()
            optimizer.step()
        for name, parameter in head.named_parameters():
            assert not torch.equal(parameter, before[name]), name

    def test_indifferent_to_the_scale_of_hidden_states(self):
        head = ValueHead(16)
        torch.nn.init.normal_(head.out.weight)
        hidden, state = torch.randn(2, 3, 16), torch.randn(2, 16)
        torch.testing.assert_close(head(1000 * hidden, state), head(hidden, state), rtol=1e-3, atol=1e-3)

    def test_bfloat16_weights_under_autocast_compute_in_float32(self):
        torch.manual_seed(0)
        head = ValueHead(16).bfloat16()
        torch.nn.init.normal_(head.out.weight)
        hidden, state = torch.randn(2, 3, 16).bfloat16(), torch.randn(2, 16).bfloat16()
        reference = ValueHead(16)
        reference.load_state_dict(head.state_dict())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = head(hidden, state)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, reference(hidden.float(), state.float()))
        values.sum().backward()
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in head.parameters())

    @pytest.mark.parametrize("size", [0.1, 1.0, 1000.0])
    def test_values_grow_with_the_rewards(self, size):
        torch.manual_seed(0)
        head = ValueHead(4)
        torch.nn.init.normal_(head.out.weight)
        hidden, state = torch.randn(2, 3, 4), torch.randn(2, 4)
        output = head(hidden, state)
        values = head.update_returns(torch.tensor([1.0 * size, 5.0 * size]), output)
        torch.testing.assert_close(values, size * (3 + 2 * output))
        torch.testing.assert_close(head(hidden, state), values)
        again = head.update_returns(torch.tensor([2.0 * size, 7.0 * size]), values)
        torch.testing.assert_close(head(hidden, state), again)


class TestRunningMoments:
    def test_are_those_of_all_batches_at_first(self):
        moments, batches = RunningMoments(2), torch.randn(5, 3, 2) + torch.tensor([4.0, -1.0])
        for batch in batches:
            moments.update(batch)
        torch.testing.assert_close(moments.mean, batches.flatten(0, 1).mean(0))
        variance = batches.flatten(0, 1).var(0, correction=0)
        torch.testing.assert_close(moments.scale, variance.mean().sqrt())

    def test_standardize(self):
        """Around the mean of each dimension, by one scale, which does not enlarge dimensions that hardly differ."""
        torch.manual_seed(0)
        values = 50 * torch.randn(8) + torch.tensor([3.0, 1e-6, *[1.0] * 6]) * torch.randn(6, 8)
        moments = RunningMoments(8)
        torch.testing.assert_close(moments.standardize(values), values)  # nothing is known yet
        moments.update(values)
        found = moments.standardize(values)
        torch.testing.assert_close(found.mean(0), torch.zeros(8), atol=1e-3, rtol=0)
        assert found.square().mean().item() == pytest.approx(1.0, rel=1e-2)
        assert found[:, 1].abs().max() < 1e-3 and found[:, 0].std() > found[:, 2].std()

    def test_forget_early_batches(self):
        moments = RunningMoments()
        for _ in range(100):
            moments.update(torch.tensor([0.0, 0.0]))
        for _ in range(200):
            moments.update(torch.tensor([1.0, 3.0]))
        torch.testing.assert_close(moments.mean, torch.tensor(2.0), atol=1e-3, rtol=0)
        torch.testing.assert_close(moments.scale, torch.tensor(1.0), atol=1e-2, rtol=0)

    @pytest.mark.parametrize(("value", "scale"), [(0.0, 1.0), (2.0, 2e-3), (-2.0, 2e-3)])
    def test_equal_values(self, value, scale):
        moments = RunningMoments()
        moments.update(torch.tensor([value, value]))
        torch.testing.assert_close(moments.scale, torch.tensor(scale), atol=2e-4, rtol=0)
        assert moments.mean == value

    def test_are_those_of_all_processes(self):
        """One of which may have no values. Without any, nothing changes."""
        moments, alone, others = RunningMoments(2), RunningMoments(2), torch.randn(3, 2)
        own = torch.randn(2, 2)
        sums = torch.stack([others.sum(0), others.square().sum(0), torch.full((2,), 3.0)]).double()
        moments.update(own, lambda found: found + sums)
        alone.update(torch.cat([own, others]))
        torch.testing.assert_close(moments.mean, alone.mean)
        torch.testing.assert_close(moments.scale, alone.scale)
        moments.update(own[:0])
        assert moments.batches == 1

    def test_keep_their_precision_beside_weights_of_lower_precision(self):
        head = ValueHead(4).bfloat16()
        for _ in range(3):
            head.returns.update(torch.tensor([1000.0, 1003.0]))
        torch.testing.assert_close(head.returns.mean, torch.tensor(1001.5))
        assert head.own.weight.dtype == torch.bfloat16


def test_detached_weights_pass_the_gradient_to_the_input_only():
    layer, x = Float32Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    layer(x, detach_weights=True).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 3))


class TestPoolTeamStates:
    def test_equals_the_definition_on_random_teams_in_any_order(self):
        torch.manual_seed(0)
        slots = torch.stack([torch.randperm(15) for _ in range(4)])
        stage, agent, live = slots // 3, slots % 3, torch.rand(4, 15) < 0.4
        states = torch.randn(4, 15, 6)
        pooled = pool_team_states(states, stage, agent, live)
        expected = map(pool_by_loop, states, stage, agent, live)
        torch.testing.assert_close(pooled, torch.stack(list(expected)))
        agents_renamed = pool_team_states(states, stage, (agent + 1) % 3, live)
        torch.testing.assert_close(agents_renamed, pooled)

    def test_rows_never_played_count_for_nobody(self):
        states = torch.tensor([[[1.0], [float("nan")]]])
        zeros = torch.zeros(1, 2, dtype=torch.long)
        pooled = pool_team_states(states, zeros, torch.arange(2)[None], live=torch.tensor([[True, False]]))
        assert pooled.tolist() == [[[1.0], [0.0]]]
