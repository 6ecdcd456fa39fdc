"""
Losses of the latents, which make them identifiable (low entropy), different between agents, and of high value.

Pure tensor functions without reduction: one number per team-turn, that is, per row of the batch. `live` marks the agents
that act in the turn. Other agents do not count.

Source: Guo et al. 2024, SHPPO (https://huggingface.co/papers/2404.03869).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


MIN_DISTANCE_RANGE = 0.1


def latent_entropy(sigma: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """
    Entropy of the agents' latents, averaged over the live agents.

    Args:
        sigma (`torch.Tensor` of shape `(B, N, d)`): Standard deviations.
        live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act.

    Returns:
        `torch.Tensor` of shape `(B,)`: `(1/N) Σ_i ½ Σ_d log(2πe σ²)` in nats, 0 without live agents.
    """
    alive = live.bool()
    sigma = torch.where(alive[:, :, None], sigma, torch.ones_like(sigma))
    entropy = (0.5 * math.log(2 * math.pi * math.e) + sigma.log()).sum(dim=-1)
    return torch.where(alive, entropy, torch.zeros_like(entropy)).sum(dim=1) / alive.sum(dim=1).clamp(min=1)


def _distances(z: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine distances `(B, N, N)`, and the mask `(B, N, N)` of pairs of different live agents."""
    alive = live.bool()
    direction = F.normalize(torch.where(alive[:, :, None], z, torch.zeros_like(z)), dim=-1)
    different = ~torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
    return 1 - direction @ direction.transpose(1, 2), alive[:, :, None] & alive[:, None, :] & different


def latent_distance_range(z: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Smallest and largest distance between the latents of two agents, for `distance_range` of [`latent_diversity`].

    Args:
        z (`torch.Tensor` of shape `(B, N, d)`): Latents of the whole generation batch.
        live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: minimum and maximum, both scalars without gradient; `inf` and `-inf` if there
            are no pairs, so that they can be reduced over processes.
    """
    distance, pairs = _distances(z.detach(), live)
    return distance.masked_fill(~pairs, torch.inf).amin(), distance.masked_fill(~pairs, -torch.inf).amax()


def latent_diversity(
    z: torch.Tensor,
    live: torch.Tensor,
    distance_range: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
) -> torch.Tensor:
    """
    Distance between the latents of two agents, averaged over the pairs of live agents.

    Args:
        z (`torch.Tensor` of shape `(B, N, d)`): Latents.
        live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act.
        distance_range (`tuple`, *optional*):
            Minimum and maximum over the whole rollout (within one team of two agents they are equal). The distance, one
            minus the cosine, in [0, 2], is scaled so that they become 0 and 1, as in the paper. A range below 0.1 counts
            as 0.1. Not scaled by default.

    Returns:
        `torch.Tensor` of shape `(B,)`: `1/(N(N−1)) Σ_{i≠j} distance(z_i, z_j)`, 0 for fewer than two live agents.
    """
    distances, pairs = _distances(z, live)
    if distance_range is not None:
        low, high = (torch.as_tensor(bound, dtype=z.dtype, device=z.device) for bound in distance_range)
        distances = (distances - low) / (high - low).clamp(min=MIN_DISTANCE_RANGE)
    total = torch.where(pairs, distances, torch.zeros_like(distances)).sum(dim=(1, 2))
    return total / pairs.sum(dim=(1, 2)).clamp(min=1)


def behaviour_distance(logps: torch.Tensor, other_logps: torch.Tensor) -> torch.Tensor:
    """
    Distance between what an agent does and what it would do with another agent's latent, estimated from sampled tokens.

    If a token is drawn from π with latent z, the mean over tokens is the total-variation distance `½ Σ |π_z − π_z'|` of the
    next-token distributions, and the gradient is its gradient.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the agents' own tokens.
        other_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the same tokens with the other latents.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `max(0, 1 − π_z'/π_z)`, in [0, 1].
    """
    own = logps.detach()
    ratio = (other_logps - own).clamp(max=0).exp()  # a larger one counts as 1: it gives 0, without overflow
    return F.relu((logps - own).exp() - ratio)


def inference_loss(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """
    Squared error of InferenceNet.

    Args:
        value (`torch.Tensor` of shape `(B,)`): Estimate of InferenceNet, from detached μ and σ.
        target (`torch.Tensor` of shape `(B,)`): Mean of the agents' returns of the turn, in the units of `value`. No gradient.

    Returns:
        `torch.Tensor` of shape `(B,)`: `(V_I − y)²`.
    """
    return (value - target.detach()).square()


def latent_loss(
    value: torch.Tensor,
    sigma: torch.Tensor,
    z: torch.Tensor,
    live: torch.Tensor,
    entropy_coef: float = 0.01,
    diversity_coef: float = 0.1,
    distance_range: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
) -> torch.Tensor:
    """
    Loss of LatentNet per team-turn: `−V_I + λ_e L_e − λ_d L_d`.

    Args:
        value (`torch.Tensor` of shape `(B,)`): Estimate of InferenceNet with `detach_weights=True`.
        sigma (`torch.Tensor` of shape `(B, N, d)`): Standard deviations, with gradient.
        z (`torch.Tensor` of shape `(B, N, d)`): Latents `μ + σ ε`, with gradient.
        live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act.
        entropy_coef (`float`, *optional*, defaults to `0.01`): λ_e.
        diversity_coef (`float`, *optional*, defaults to `0.1`): λ_d.
        distance_range (`tuple`, *optional*): See [`latent_diversity`].

    Returns:
        `torch.Tensor` of shape `(B,)`: The losses; 0 for a team-turn without live agents.
    """
    diversity = latent_diversity(z, live, distance_range)
    loss = -value + entropy_coef * latent_entropy(sigma, live) - diversity_coef * diversity
    return torch.where(live.bool().any(dim=1), loss, torch.zeros_like(loss))
