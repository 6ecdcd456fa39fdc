"""
The networks of the heterogeneity layer: from observation to latent to cores, and the value of a team's latents.

All agents share the networks, whatever the number of agents. The networks compute in at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from marcog_trl.algorithms.critic import Float32Linear, RunningMoments, standardize


def _orthogonal(layer: Float32Linear, gain: float) -> Float32Linear:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _normalize(obs: torch.Tensor) -> torch.Tensor:
    """Layer normalisation of each half of `[o, h]`, because hidden states are far larger than embeddings."""
    return standardize(obs.unflatten(-1, (2, -1))).flatten(-2)


class LatentNet(nn.Module):
    """
    Three-layer MLP from the observation of an agent to the distribution of its latent.

    Args:
        obs_size (`int`): 2H, size of an observation `[o, h]`: what tells the agent's role text apart, and the state of its prompt.
        latent_size (`int`, *optional*, defaults to `8`): d, size of the latent.
        hidden (`int`, *optional*, defaults to `128`): Width of the hidden layers.
        sigma_min (`float`, *optional*, defaults to `0.05`): Minimum of the standard deviation, which bounds the entropy.

    Source: Guo et al. 2024, SHPPO (https://huggingface.co/papers/2404.03869).
    """

    def __init__(self, obs_size: int, latent_size: int = 8, hidden: int = 128, sigma_min: float = 0.05):
        super().__init__()
        self.sigma_min = sigma_min
        # A step of Adam changes every weight by as much, and so their sum in proportion to the number of inputs. Without the
        # scale, one step with the observations of a model of half a billion parameters makes all latents the same
        self.scale = 256 / obs_size
        self.first = _orthogonal(Float32Linear(obs_size, hidden), gain=2**0.5 / self.scale)
        self.second = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        self.mu = _orthogonal(Float32Linear(hidden, latent_size), gain=1.0)
        # σ starts near 0.18, well below the spread of μ, so that agents differ by more than noise
        self.sigma = _orthogonal(Float32Linear(hidden, latent_size), gain=0.01)
        nn.init.constant_(self.sigma.bias, -2.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            obs (`torch.Tensor` of shape `(B, ..., 2H)`): Observations.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: mean μ, in (-1, 1), and standard deviation σ, both `(B, ..., d)`.
        """
        x = F.relu(self.first(_normalize(obs) * self.scale))
        x = F.relu(self.second(x))
        # μ is bounded because the latent loss maximises a learned value: without a bound, |μ| and the cores grow a
        # hundredfold, to latents on which the value was not learned
        return torch.tanh(self.mu(x)), F.softplus(self.sigma(x)) + self.sigma_min


class InferenceNet(nn.Module):
    """
    Estimates the return of a team from the observations and latents of its agents, in any order.

    Like the critic, it predicts standardised returns, so that it learns as fast with rewards of any size, and begins at the mean
    return.

    Args:
        obs_size (`int`): 2H, size of an observation.
        latent_size (`int`, *optional*, defaults to `8`): d, size of the latent.
        hidden (`int`, *optional*, defaults to `128`): Width of the hidden layers.

    Source: Guo et al. 2024, SHPPO (https://huggingface.co/papers/2404.03869).
    """

    def __init__(self, obs_size: int, latent_size: int = 8, hidden: int = 128):
        super().__init__()
        # Separate layers for observation and latent: in one layer, 2H numbers would dominate 2d
        self.observation = _orthogonal(Float32Linear(obs_size, hidden), gain=1.0)
        self.latent = _orthogonal(Float32Linear(2 * latent_size, hidden, bias=False), gain=1.0)
        self.agent = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        self.team = _orthogonal(Float32Linear(hidden, hidden), gain=2**0.5)
        # Small, so that the untrained estimate hardly affects the latents
        self.value = _orthogonal(Float32Linear(hidden, 1), gain=0.01)
        self.returns = RunningMoments()

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
            live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act. Other agents do not count.
            detach_weights (`bool`, *optional*, defaults to `False`):
                Whether to compute gradients for the inputs only, so that a loss of the latents does not change this network.

        Returns:
            `torch.Tensor` of shape `(B,)`: Expected team return, in reward units.
        """
        alive = live.bool()[:, :, None]
        obs = torch.where(alive, obs, torch.zeros_like(obs))
        latent = torch.where(alive, torch.cat([mu, sigma], dim=-1), torch.zeros_like(mu[..., :1]))
        x = self.observation(_normalize(obs), detach_weights) + self.latent(latent, detach_weights)
        x = F.relu(self.agent(F.relu(x), detach_weights))
        # The mean, because the target is a mean over the agents, for teams of any size
        x = torch.where(alive, x, torch.zeros_like(x)).sum(dim=1) / alive.sum(dim=1).clamp(min=1)
        x = F.relu(self.team(x, detach_weights))
        return self.returns.restore(self.value(x, detach_weights).squeeze(-1))


class CoreDecoder(nn.Module):
    """
    Linear layer from a latent to the cores of all adapted layers. By default all cores start at 0: plain shared LoRA.

    If LoRA's B starts at 0, cores may start at any value, since the adapter has no effect yet. Values other than 0 are
    better: with cores of 0, agents cannot differ until both B and the cores have grown, and a shared B gets hardly any
    gradient as long as agents should differ but do not.

    Args:
        latent_size (`int`): d, size of the latent.
        ranks (`Sequence[int]`): r of every adapted layer, in the order of [`LoraCores`].
        scale (`float`, *optional*, defaults to `0.0`): Initial size of the cores relative to the identity: root mean square
            of ‖C‖_F / √r over random weights, for a latent of length √d.

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
