"""
The critic: a value head on the policy's last hidden state, and the pooling of a team's prompt states.

Knows neither the policy nor the losses: it maps hidden states to values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Float32Linear(nn.Linear):
    """
    A linear layer that computes in float32 at least, whatever the dtype of its weights and whether autocast is on.

    Small networks beside the policy share its dtype (ZeRO-3 wants one for all trainable tensors), but values and
    latents lose too much in bfloat16.

    Args:
        in_features (`int`): Size of the input.
        out_features (`int`): Size of the output.
        bias (`bool`, *optional*, defaults to `True`): Whether to add a bias.
    """

    def forward(self, input: torch.Tensor, detach_weights: bool = False) -> torch.Tensor:
        """
        Args:
            input (`torch.Tensor` of shape `(..., in_features)`): Input, of any floating dtype.
            detach_weights (`bool`, *optional*, defaults to `False`):
                Whether the gradient reaches the input only. The weights are detached here, in the forward of the
                module that owns them, because ZeRO-3 gathers them no earlier.

        Returns:
            `torch.Tensor` of shape `(..., out_features)`: float32, or float64 for float64 weights.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        if detach_weights:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        with torch.autocast(device_type=input.device.type, enabled=False):
            return F.linear(input.to(dtype), weight, bias)


def standardize(x: torch.Tensor) -> torch.Tensor:
    """
    Layer normalisation without weights, in float32 at least.

    Args:
        x (`torch.Tensor` of shape `(..., H)`): Hidden states, of any floating dtype.

    Returns:
        `torch.Tensor` of shape `(..., H)`: Mean 0 and variance 1 over the last dimension.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.layer_norm(x, x.shape[-1:])


class ValueHead(nn.Module):
    """
    Two-layer MLP from hidden states to values. Values start at 0, and `start` moves all of them.

    `start` is a buffer and not the last layer's bias: DeepSpeed keeps its own copies of parameters, which would undo a
    value that is set after training has begun.

    Args:
        hidden_size (`int`): H, size of the policy's hidden states.
        team (`bool`):
            Whether the head also sees the team's pooled prompt states (MAPPO-like) or the row's own states alone
            (IPPO-like).

    Source: MAPPO (https://huggingface.co/papers/2103.01955).
    """

    start: torch.Tensor

    def __init__(self, hidden_size: int, team: bool):
        super().__init__()
        width = min(hidden_size, 1024)  # enough for a scalar, and small beside a LoRA of a 7B model
        self.own = Float32Linear(hidden_size, width)
        self.team = Float32Linear(hidden_size, width, bias=False) if team else None
        self.out = Float32Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("start", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, team_state: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(B, T, H)`): Hidden state that precedes each token.
            team_state (`torch.Tensor` of shape `(B, H)`, *optional*): Pooled prompt states of each row's team.

        Returns:
            `torch.Tensor` of shape `(B, T)`: Values in reward units, float32 (float64 for float64 weights).

        Raises:
            ValueError: If `team_state` is given without `team`, or missing with it.
        """
        if (self.team is None) != (team_state is None):
            raise ValueError(
                f"team={self.team is not None} and team_state is {'missing' if team_state is None else 'given'}; "
                "a head with team=True needs it, one with team=False takes none"
            )
        x = self.own(standardize(hidden))
        if self.team is not None and team_state is not None:
            x = x + self.team(standardize(team_state))[:, None]
        return self.out(F.silu(x)).squeeze(-1) + self.start

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        state_dict.setdefault(f"{prefix}start", torch.zeros(()))  # values of earlier versions started at 0
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def pool_team_states(
    states: torch.Tensor,
    episode: torch.Tensor,
    stage: torch.Tensor,
    agent: torch.Tensor,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Mean over the agents of what the team knows when a row begins: every agent's latest prompt state.

    A row sees the agents of its own stage and of earlier stages of its episode, itself included, and never a later
    prompt: that would contain the row's own reply, and a baseline that sees its own action is biased.

    Args:
        states (`torch.Tensor` of shape `(R, H)`): Prompt state of each row, in any order of rows.
        episode (`torch.Tensor` of shape `(R,)`): Index of each row's episode.
        stage (`torch.Tensor` of shape `(R,)`): When the row's agent acted: counts up within an episode, over turns.
        agent (`torch.Tensor` of shape `(R,)`): Index of each row's agent.
        live (`torch.Tensor` of shape `(R,)`, *optional*):
            0 on rows that were never played. Nobody sees them, and they get zeros. All rows are live by default.

    Returns:
        `torch.Tensor` of shape `(R, H)`: The pooled states, in the dtype of `states`.

    Source: MAPPO's centralised value function (https://huggingface.co/papers/2103.01955).
    """
    live = torch.ones_like(episode, dtype=torch.bool) if live is None else live.bool()
    if not len(states):
        return states
    # Rows move into one line per episode, (E, M), so that the pairs of rows number E · M² and not R².
    ids, index = torch.unique(episode, return_inverse=True)
    order = torch.argsort(index, stable=True)
    size = torch.bincount(index, minlength=len(ids))
    start = size.cumsum(0) - size
    line = index[order]
    place = torch.arange(len(order), device=order.device) - start[line]

    def lines(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(ids), int(size.max()), *x.shape[1:]).index_put((line, place), x[order])

    stages, agents, lives = lines(stage), lines(agent), lines(live)
    state = lines(states).to(torch.promote_types(states.dtype, torch.float32)).masked_fill(~lives[:, :, None], 0)
    here, there = stages[:, :, None], stages[:, None, :]
    same_agent = (agents[:, :, None] == agents[:, None, :]) & lives[:, None, :]
    never = torch.iinfo(stages.dtype).max
    renewed = torch.where(same_agent & (there > here), there, never).amin(dim=2)  # (E, M): stage of the next state
    seen = lives[:, None, :] & (there <= here) & (here < renewed[:, None, :])  # (E, M, M): row sees row
    weight = seen.to(state.dtype) / seen.sum(dim=2, keepdim=True).clamp(min=1)
    pooled = (weight @ state).masked_fill(~lives[:, :, None], 0).to(states.dtype)
    return torch.empty_like(states).index_copy(0, order, pooled[line, place])
