"""
The small networks of the heterogeneity layer: observation -> latent -> cores, and the team's value of its latents.

They know nothing of language models: an observation is a vector. All of them are shared by the agents, and none
depends on their number. They compute in float32 at least, whatever the dtype of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from marcog_trl.algorithms.critic import Float32Linear, standardize


def _orthogonal(layer: Float32Linear, gain: float) -> Float32Linear:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _normalize(obs: torch.Tensor) -> torch.Tensor:
    """Layer normalisation of both halves of `[o, h]` on their own: hidden states are far larger than embeddings."""
    return standardize(obs.unflatten(-1, (2, -1))).flatten(-2)


class LatentNet(nn.Module):
    """
    Three-layer MLP from what an agent observes to the distribution of its latent.

    Args:
        obs_size (`int`): 2H, size of an observation `[o, h]`: mean input embedding and final hidden state.
        latent_size (`int`, *optional*, defaults to `8`): d, size of the latent.
        hidden (`int`, *optional*, defaults to `128`): Width of the hidden layers.
        sigma_min (`float`, *optional*, defaults to `0.05`): Smallest standard deviation; bounds the latent's entropy.

    Source: Guo et al. 2024, SHPPO (https://huggingface.co/papers/2404.03869).
    """

    def __init__(self, obs_size: int, latent_size: int = 8, hidden: int = 128, sigma_min: float = 0.05):
        super().__init__()
        self.sigma_min = sigma_min
        self.first = _orthogonal(Float32Linear(obs_size, hidden), gain=2**0.5)
        self.second = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        self.mu = _orthogonal(Float32Linear(hidden, latent_size), gain=1.0)
        # σ starts near 0.18, well below the spread of μ, so that agents differ by more than their noise.
        self.sigma = _orthogonal(Float32Linear(hidden, latent_size), gain=0.01)
        nn.init.constant_(self.sigma.bias, -2.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            obs (`torch.Tensor` of shape `(B, ..., 2H)`): Observations.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: mean μ, in (-1, 1), and standard deviation σ, both `(B, ..., d)`.
        """
        x = F.relu(self.first(_normalize(obs)))
        x = F.relu(self.second(x))
        # Bounded, as σ is from below: the latent loss climbs a learned value, and without a bound it leaves the latents
        # that the value was learned on (seen: |μ| grows a hundredfold, and the cores with it).
        return torch.tanh(self.mu(x)), F.softplus(self.sigma(x)) + self.sigma_min


class InferenceNet(nn.Module):
    """
    What a team is expected to earn, given its agents' observations and latents. Indifferent to the agents' order.

    Args:
        obs_size (`int`): 2H, size of an observation.
        latent_size (`int`, *optional*, defaults to `8`): d, size of the latent.
        hidden (`int`, *optional*, defaults to `128`): Width of the hidden layers.

    Source: Guo et al. 2024, SHPPO (https://huggingface.co/papers/2404.03869).
    """

    def __init__(self, obs_size: int, latent_size: int = 8, hidden: int = 128):
        super().__init__()
        # Observation and latent enter through layers of their own: side by side, 2H numbers would drown 2d.
        self.observation = _orthogonal(Float32Linear(obs_size, hidden), gain=1.0)
        self.latent = _orthogonal(Float32Linear(2 * latent_size, hidden, bias=False), gain=1.0)
        self.agent = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        self.team = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        # Small, so that an untrained estimate does not push the latents.
        self.value = _orthogonal(Float32Linear(hidden, 1), gain=0.01)

    def forward(
        self,
        obs: torch.Tensor,
        mu: torch.Tensor,
        sigma: torch.Tensor,
        live: torch.Tensor,
        detach_weights: bool = False,
    ) -> torch.Tensor:
        """
        Args:
            obs (`torch.Tensor` of shape `(B, N, 2H)`): Observations of the agents that act in the same turn.
            mu (`torch.Tensor` of shape `(B, N, d)`): Means of their latents.
            sigma (`torch.Tensor` of shape `(B, N, d)`): Standard deviations of their latents.
            live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act; the others do not count.
            detach_weights (`bool`, *optional*, defaults to `False`):
                Whether the gradient reaches the inputs only, so that a loss on the latents cannot change this network.

        Returns:
            `torch.Tensor` of shape `(B,)`: Expected team return, in reward units.
        """
        alive = live.bool()[:, :, None]
        obs = torch.where(alive, obs, torch.zeros_like(obs))
        latent = torch.where(alive, torch.cat([mu, sigma], dim=-1), torch.zeros_like(mu[..., :1]))
        x = self.observation(_normalize(obs), detach_weights) + self.latent(latent, detach_weights)
        x = F.relu(self.agent(F.relu(x), detach_weights))
        # The mean, not the sum: the target is a mean over the agents, and the net must serve teams of any size.
        x = torch.where(alive, x, torch.zeros_like(x)).sum(dim=1) / alive.sum(dim=1).clamp(min=1)
        x = F.relu(self.team(x, detach_weights))
        return self.value(x, detach_weights).squeeze(-1)


class CoreDecoder(nn.Module):
    """
    One linear layer from a latent to the cores of all adapted layers. By default all cores start at 0: plain shared LoRA.

    Where LoRA's B starts at 0, cores may start anywhere, since the adapter changes nothing before B moves. They had better not
    be 0 there: two agents can then differ only once B and the cores both have grown, and a B that the agents share has
    nothing to grow from as long as they must differ and do not.

    Args:
        latent_size (`int`): d, size of the latent.
        ranks (`Sequence[int]`): r of every adapted layer, in the order of [`LoraCores`].
        scale (`float`, *optional*, defaults to `0.0`): Size of the cores at the start, relative to the identity that they
            are added to: root mean square of ‖C‖_F / √r over random weights, for a latent of length √d.

    Source: the heterogeneous layer of SHPPO (https://huggingface.co/papers/2404.03869), moved between LoRA's A and B.
    """

    def __init__(self, latent_size: int, ranks: Sequence[int], scale: float = 0.0):
        super().__init__()
        self.ranks = list(ranks)
        self.cores = Float32Linear(latent_size, sum(rank**2 for rank in self.ranks))
        nn.init.zeros_(self.cores.weight)
        nn.init.zeros_(self.cores.bias)
        if scale:
            with torch.no_grad():
                parts = self.cores.weight.split([rank**2 for rank in self.ranks])
                for rank, weight in zip(self.ranks, parts, strict=True):
                    nn.init.normal_(weight, std=scale / (rank * latent_size) ** 0.5)

    def forward(self, z: torch.Tensor) -> list[torch.Tensor]:
        """
        Args:
            z (`torch.Tensor` of shape `(B, d)`): Latent of each row.

        Returns:
            `list[torch.Tensor]`: One core per adapted layer, `(B, r, r)` each.
        """
        flat = self.cores(z).split([rank**2 for rank in self.ranks], dim=-1)
        return [core.unflatten(-1, (rank, rank)) for core, rank in zip(flat, self.ranks, strict=True)]
