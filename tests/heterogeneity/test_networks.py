import pytest
import torch

from marcog_trl.heterogeneity.networks import CoreDecoder, InferenceNet, LatentNet
from marcog_trl.team.agent_contexts import distinct


B, N, H, D = 3, 4, 6, 2


@pytest.fixture
def team():
    torch.manual_seed(0)
    return {
        "obs": torch.randn(B, N, 2 * H),
        "mu": torch.randn(B, N, D, requires_grad=True),
        "sigma": torch.rand(B, N, D).add(0.1).requires_grad_(),
        "live": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0]]),
    }


def permuted(team, order):
    return {name: tensor[:, order] for name, tensor in team.items()}


class TestLatentNet:
    def test_shapes_and_bounds(self):
        net = LatentNet(2 * H, latent_size=D, sigma_min=0.3)
        mu, sigma = net(100 * torch.randn(B, N, 2 * H))
        assert mu.shape == sigma.shape == (B, N, D)
        assert (sigma > 0.3).all()
        with torch.no_grad():
            net.sigma.bias.fill_(-1e3)
        torch.testing.assert_close(net(torch.randn(5, 2 * H))[1], torch.full((5, D), 0.3))

    def test_agents_start_further_apart_than_their_noise(self):
        torch.manual_seed(0)
        mu, sigma = LatentNet(256)(torch.randn(16, 256))
        assert mu.std(dim=0).mean() > 2 * sigma.mean()

    def test_permuting_the_agents_permutes_the_outputs(self, team):
        net, order = LatentNet(2 * H), torch.tensor([2, 0, 3, 1])
        for output, reordered in zip(net(team["obs"]), net(team["obs"][:, order]), strict=True):
            torch.testing.assert_close(output[:, order], reordered)

    def test_neither_half_of_the_observation_drowns_the_other(self):
        torch.manual_seed(0)
        net = LatentNet(2 * H)
        embedding, hidden = 0.02 * torch.randn(2, H), 50 * torch.randn(H)
        mu, _ = net(torch.cat([embedding, hidden.expand(2, H)], dim=-1))
        assert (mu[0] - mu[1]).norm() > 0.1 * mu[0].norm()

    @pytest.mark.parametrize("size", [256, 1792, 7168])
    def test_one_step_leaves_agents_apart_whatever_the_size(self, size):
        """Observations that are alike, as those of agents with one prompt, and a gradient that moves all latents the same way."""
        kept = []
        for seed in range(6):
            torch.manual_seed(seed)
            net = LatentNet(size)
            obs = torch.randn(size) + 0.5 * torch.randn(16, size)
            optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
            before = net(obs)[0].std(dim=0).mean()
            (-net(obs)[0].sum()).backward()
            optimizer.step()
            kept.append(net(obs)[0].std(dim=0).mean() / before)
        assert sum(kept) / len(kept) > 0.3

    def test_bfloat16_weights_under_autocast_give_float32(self):
        net = LatentNet(2 * H).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mu, sigma = net(torch.randn(B, 2 * H).bfloat16())
        assert mu.dtype == sigma.dtype == torch.float32


def test_agents_with_one_prompt_and_roles_that_are_nearly_alike_start_apart():
    torch.manual_seed(0)
    roles = 0.02 * torch.randn(256) + 0.0005 * torch.randn(2, 256)  # as small as the embeddings of real models
    assert torch.cosine_similarity(*roles, dim=0) > 0.99
    mu, _ = LatentNet(512)(torch.cat([distinct(roles), 50 * torch.randn(256).expand(2, 256)], dim=-1))
    assert torch.cosine_similarity(*mu, dim=0) < 0.9
    assert not distinct(roles[:1]).any()


class TestInferenceNet:
    def test_indifferent_to_the_order_of_agents(self, team):
        net = InferenceNet(2 * H, D)
        assert net(**team).shape == (B,)
        torch.testing.assert_close(net(**permuted(team, torch.tensor([3, 1, 0, 2]))), net(**team))

    def test_agents_that_do_not_act_never_count(self, team):
        net = InferenceNet(2 * H, D)
        dead = team["live"][:, :, None] == 0
        filled = {
            name: tensor.detach().masked_fill(dead, float("nan")).requires_grad_()
            for name, tensor in team.items()
            if name != "live"
        }
        value = net(**filled, live=team["live"])
        torch.testing.assert_close(value, net(**team))
        value.sum().backward()
        for tensor in filled.values():
            assert tensor.grad.isfinite().all()
            assert not tensor.grad.masked_select(dead).any()
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters())

        alone = {name: tensor[2:, 2:3] for name, tensor in team.items()}
        torch.testing.assert_close(net(**team)[2:], net(**alone))

    def test_depends_on_observations_and_latents(self, team):
        net, value = InferenceNet(2 * H, D), None
        value = net(**team)
        for name in ("obs", "mu", "sigma"):
            assert (net(**{**team, name: team[name] + torch.randn_like(team[name])}) != value).all(), name

    def test_serves_teams_of_any_size(self, team):
        net = InferenceNet(2 * H, D)
        twice = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in team.items()}
        torch.testing.assert_close(net(**twice), net(**team))

    def test_detached_weights(self, team):
        net = InferenceNet(2 * H, D)
        kept, detached = net(**team), net(**team, detach_weights=True)
        assert torch.equal(kept, detached)
        detached.sum().backward()
        assert all(parameter.grad is None for parameter in net.parameters())
        gradients = team["mu"].grad.clone(), team["sigma"].grad.clone()
        assert all(gradient.any() for gradient in gradients)
        team["mu"].grad = team["sigma"].grad = None
        kept.sum().backward()
        torch.testing.assert_close((team["mu"].grad, team["sigma"].grad), gradients)
        assert all(parameter.grad.any() for parameter in net.parameters())


class TestCoreDecoder:
    def test_starts_at_zero_and_is_linear(self):
        decoder = CoreDecoder(D, [4, 2, 4])
        z = torch.randn(B, D)
        cores = decoder(z)
        assert [core.shape for core in cores] == [(B, 4, 4), (B, 2, 2), (B, 4, 4)]
        assert not any(core.any() for core in cores)
        torch.nn.init.normal_(decoder.cores.weight)
        middle = decoder.cores.weight[16:20]  # after the first layer's 4 × 4
        torch.testing.assert_close(decoder(z)[1], (z @ middle.T).view(B, 2, 2))

    def test_scale_is_the_size_of_cores_beside_the_identity(self):
        decoder = CoreDecoder(8, [16] * 40 + [4] * 40, scale=0.7)
        z = torch.nn.functional.normalize(torch.randn(64, 8), dim=-1) * 8**0.5
        for cores, rank in ((decoder(z)[:40], 16), (decoder(z)[40:], 4)):
            size = torch.stack(cores).square().sum((-2, -1)).mean().sqrt() / rank**0.5
            assert size.item() == pytest.approx(0.7, rel=0.1)

    def test_gradient_reaches_every_weight(self):
        decoder = CoreDecoder(D, [2, 3])
        sum(core.sum() for core in decoder(torch.randn(B, D))).backward()
        assert decoder.cores.weight.grad.all() and decoder.cores.bias.grad.all()
