"""
The critic: a value head on the last hidden state of the policy, and the pooling of prompt states over a team.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Float32Linear(nn.Linear):
    """
    A linear layer that computes in at least float32, also with weights of lower precision and under autocast.

    Small networks beside the policy have its dtype, because ZeRO-3 needs one dtype for all trainable tensors, but bfloat16
    is not precise enough for values and latents.

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
                Whether to compute gradients for the input only. The weights are detached in this forward pass because
                ZeRO-3 does not gather them earlier.

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
    Layer normalisation without weights, in at least float32.

    Args:
        x (`torch.Tensor` of shape `(..., H)`): Hidden states, of any floating dtype.

    Returns:
        `torch.Tensor` of shape `(..., H)`: Mean 0 and variance 1 over the last dimension.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.layer_norm(x, x.shape[-1:])


class ValueHead(nn.Module):
    """
    Two-layer MLP from hidden states to values. Values are `start`, 0 by default, at the beginning of training.

    `start` is a buffer instead of the bias of the last layer, because DeepSpeed keeps its own copies of parameters, which
    would overwrite a value that is set after training has begun.

    Args:
        hidden_size (`int`): H, size of the policy's hidden states.
        team (`bool`): Whether the head also sees the pooled prompt states of the team (as in MAPPO), or only the states of
            the row (as in IPPO).

    Source: MAPPO (https://huggingface.co/papers/2103.01955).
    """

    start: torch.Tensor

    def __init__(self, hidden_size: int, team: bool):
        super().__init__()
        width = min(hidden_size, 1024)  # small compared to a LoRA of a 7B model
        self.own = Float32Linear(hidden_size, width)
        self.team = Float32Linear(hidden_size, width, bias=False) if team else None
        self.out = Float32Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("start", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, team_state: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(B, T, H)`): Hidden state before each token.
            team_state (`torch.Tensor` of shape `(B, H)`, *optional*): Pooled prompt states of the team of each row.

        Returns:
            `torch.Tensor` of shape `(B, T)`: Values in reward units, float32 (float64 for float64 weights).

        Raises:
            ValueError: If `team_state` is given but `team=False`, or missing but `team=True`.
        """
        if (self.team is None) != (team_state is None):
            raise ValueError(
                f"team_state is {'missing' if team_state is None else 'given'}, but the head has "
                f"team={self.team is not None}. Pass team_state if and only if team=True."
            )
        x = self.own(standardize(hidden))
        if self.team is not None and team_state is not None:
            x = x + self.team(standardize(team_state))[:, None]
        return self.out(F.silu(x)).squeeze(-1) + self.start

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        state_dict.setdefault(f"{prefix}start", torch.zeros(()))  # checkpoints of earlier versions have no `start`
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def pool_team_states(
    states: torch.Tensor,
    episode: torch.Tensor,
    stage: torch.Tensor,
    agent: torch.Tensor,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Averages the agents' latest prompt states: what the team knows when a row begins.

    A row sees the prompts of its own stage and of earlier stages of its episode, including its own prompt. It does not see
    later prompts, which may contain its own reply: a baseline that depends on the action is biased.

    Args:
        states (`torch.Tensor` of shape `(R, H)`): Prompt state of each row, in any order of rows.
        episode (`torch.Tensor` of shape `(R,)`): Index of each row's episode.
        stage (`torch.Tensor` of shape `(R,)`): Stage of each row, which increases within an episode, also across turns.
        agent (`torch.Tensor` of shape `(R,)`): Index of the agent of each row.
        live (`torch.Tensor` of shape `(R,)`, *optional*):
            0 on rows that were not played. Other rows do not see them, and their own result is 0. By default all rows
            are live.

    Returns:
        `torch.Tensor` of shape `(R, H)`: The pooled states, in the dtype of `states`.

    Source: MAPPO's centralised value function (https://huggingface.co/papers/2103.01955).
    """
    live = torch.ones_like(episode, dtype=torch.bool) if live is None else live.bool()
    if not len(states):
        return states
    # One line per episode, (E, M), so that there are E · M² pairs of rows instead of R²
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
