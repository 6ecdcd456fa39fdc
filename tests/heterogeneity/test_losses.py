import math

import pytest
import torch

from marcog_trl.heterogeneity.losses import (
    behaviour_distance,
    inference_loss,
    latent_distance_range,
    latent_diversity,
    latent_entropy,
    latent_loss,
)


# Three agents at 0°, 90° and 180°; then the same with the last one absent; then one agent alone; then nobody.
Z = torch.tensor([[[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]]]).repeat(4, 1, 1)
LIVE = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
SIGMA = torch.tensor([[[1.0, 2.0], [0.5, 1.0], [4.0, 4.0]]]).repeat(4, 1, 1)
UNIT = 0.5 * math.log(2 * math.pi * math.e)  # entropy of a standard normal


def test_entropy_by_hand():
    log2 = math.log(2)
    expected = [2 * UNIT + (1 - 1 + 4) * log2 / 3, 2 * UNIT + (1 - 1) * log2 / 2, 2 * UNIT - log2, 0.0]
    torch.testing.assert_close(latent_entropy(SIGMA, LIVE), torch.tensor(expected))
    normal = torch.distributions.Normal(torch.zeros_like(SIGMA), SIGMA).entropy().sum(-1).mean(1)
    torch.testing.assert_close(latent_entropy(SIGMA, torch.ones(4, 3)), normal)


def test_cosine_diversity_by_hand():
    # distances 1, 1 and 2 between the pairs
    torch.testing.assert_close(latent_diversity(Z, LIVE), torch.tensor([4 / 3, 1.0, 0.0, 0.0]))


def test_minmax_diversity_by_hand():
    low, high = latent_distance_range(Z, LIVE)
    assert (low, high) == (1.0, 2.0)
    torch.testing.assert_close(
        latent_diversity(Z, LIVE, (low, high)), torch.tensor([1 / 3, 0.0, 0.0, 0.0]), atol=1e-6, rtol=0
    )
    # a narrow range counts as 0.1
    torch.testing.assert_close(
        latent_diversity(Z, LIVE, (1.0, 1.01)), torch.tensor([10 / 3, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0
    )


def test_distance_range_without_pairs_and_gradient():
    low, high = latent_distance_range(Z[2:].requires_grad_(), LIVE[2:])
    assert (low, high) == (math.inf, -math.inf)
    assert not low.requires_grad


def test_behaviour_distance_and_its_gradient_are_those_of_the_distributions_on_average():
    own, other = (torch.randn(3, 50, generator=torch.manual_seed(seed)).requires_grad_() for seed in (0, 1))
    logps, other_logps = own.log_softmax(1), other.log_softmax(1)
    mean = (logps.detach().exp() * behaviour_distance(logps, other_logps)).sum(1)  # over the tokens that π may draw
    exact = (logps.exp() - other_logps.exp()).abs().sum(1) / 2
    torch.testing.assert_close(mean, exact)
    found, expected = (torch.autograd.grad(x.sum(), (own, other), retain_graph=True) for x in (mean, exact))
    torch.testing.assert_close(found, expected)


def test_behaviour_distance_of_what_the_other_agent_would_hardly_do_or_is_sure_of():
    own = torch.tensor([[-200.0, -1.0, -1e-3]]).requires_grad_()
    other = torch.tensor([[-1e-3, -1.0, -200.0]]).requires_grad_()
    distance = behaviour_distance(own, other)
    assert distance.tolist() == [[0.0, 0.0, 1.0]]
    distance.sum().backward()
    assert own.grad.isfinite().all() and other.grad.isfinite().all()


def test_inference_loss():
    value, target = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 2.0], requires_grad=True)
    loss = inference_loss(value, target)
    assert loss.tolist() == [4.0, 0.0]
    loss.sum().backward()
    assert value.grad.tolist() == [-4.0, 0.0] and target.grad is None


def test_latent_loss_is_the_sum_of_its_parts():
    value = torch.tensor([0.5, 1.0, 2.0, 3.0])
    expected = -value + 0.02 * latent_entropy(SIGMA, LIVE) - 0.3 * latent_diversity(Z, LIVE)
    expected[3] = 0.0  # nobody acts
    torch.testing.assert_close(latent_loss(value, SIGMA, Z, LIVE, entropy_coef=0.02, diversity_coef=0.3), expected)
    defaults = -value[0] + 0.01 * latent_entropy(SIGMA, LIVE)[0] - 0.1 * latent_diversity(Z, LIVE)[0]
    torch.testing.assert_close(latent_loss(value, SIGMA, Z, LIVE)[0], defaults)


def test_descent_lowers_entropy_and_drives_agents_apart():
    torch.manual_seed(0)
    sigma, z = torch.ones(1, 2, 3, requires_grad=True), torch.randn(1, 2, 3, requires_grad=True)
    live = torch.ones(1, 2)
    before = latent_entropy(sigma, live).item(), latent_diversity(z, live).item()
    latent_loss(torch.zeros(1), sigma, z, live).sum().backward()
    with torch.no_grad():
        after = latent_entropy(sigma - sigma.grad, live).item(), latent_diversity(z - z.grad, live).item()
    assert after[0] < before[0] and after[1] > before[1]


@pytest.mark.parametrize("options", [{}, {"distance_range": (0.0, 2.0)}])
def test_permutation_and_absent_agents(options):
    order = torch.tensor([2, 0, 1])
    value = torch.zeros(4)
    expected = latent_loss(value, SIGMA, Z, LIVE, **options)
    permuted = latent_loss(value, SIGMA[:, order], Z[:, order], LIVE[:, order], **options)
    torch.testing.assert_close(permuted, expected)

    dead = LIVE[:, :, None] == 0
    sigma, z = (x.masked_fill(dead, float("nan")).requires_grad_() for x in (SIGMA, Z))
    loss = latent_loss(value, sigma, z, LIVE, **options)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    for gradient in (sigma.grad, z.grad):
        assert gradient.isfinite().all() and not gradient.masked_select(dead).any()


def test_latents_of_zero_length_have_finite_gradients():
    z = torch.zeros(1, 2, 3, requires_grad=True)
    latent_diversity(z, torch.ones(1, 2)).sum().backward()
    assert z.grad.isfinite().all()
