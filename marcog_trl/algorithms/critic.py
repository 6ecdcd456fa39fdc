"""
The critic: a value head on the last hidden state of the policy, and the pooling of prompt states over a team.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from marcog_trl.algorithms.advantages import SumOverProcesses


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


NEWEST = 0.05  # least weight of the newest batch in running moments


class RunningMoments(nn.Module):
    """
    Running mean of each of some quantities, and their common standard deviation: of all batches at first, and later mostly of
    the last 20.

    They are buffers, because DeepSpeed keeps its own copies of parameters, and stay in float32 beside weights of lower precision.

    Args:
        *shape (`int`): Shape of the quantities.
    """

    batches: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, *shape: int):
        super().__init__()
        for name, size in (("batches", ()), ("mean", shape), ("square", shape)):
            self.register_buffer(name, torch.zeros(size))

    @property
    def scale(self) -> torch.Tensor:
        """The standard deviation, `()`: the root mean square of those of all quantities. 1 if all values were 0."""
        floor = 1e-3 * self.square.mean().sqrt()  # the rounding errors of equal values are not a signal
        scale = torch.maximum((self.square - self.mean**2).clamp(min=0).mean().sqrt(), floor)
        return torch.where(scale > 0, scale, torch.ones_like(scale))

    def standardize(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values `(..., *shape)` as distances from the mean, in standard deviations."""
        return (values - self.mean) / self.scale

    def restore(self, distances: torch.Tensor) -> torch.Tensor:
        """Returns the values that [`standardize`] has made into these distances."""
        return distances * self.scale + self.mean

    def update(self, values: torch.Tensor, sums: SumOverProcesses | None = None) -> None:
        """
        Adds a batch. Without values in any process, nothing changes.

        Args:
            values (`torch.Tensor` of shape `(R, *shape)`): Values of this process.
            sums (`Callable`, *optional*): Sums a tensor over the processes. One process by default.
        """
        values = values.detach().double()
        found = torch.stack([values.sum(0), values.square().sum(0), torch.full_like(self.mean, len(values)).double()])
        total, square, count = found if sums is None else sums(found)
        if count.any():
            self.batches += 1
            weight = (1 / self.batches).clamp(min=NEWEST)
            self.mean.lerp_((total / count).to(self.mean), weight)
            self.square.lerp_((square / count).to(self.square), weight)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            self._buffers[name] = cast(torch.Tensor, buffer).float()
        return self


class ValueHead(nn.Module):
    """
    Two-layer MLP from the hidden state before a token, and what is known when the row begins, to the value of the token.

    It sees standardised states and predicts standardised returns, so that it learns fast from states with a large mean, and as
    fast with rewards of any size. It begins at the mean return.

    Args:
        hidden_size (`int`): H, size of the policy's hidden states.

    Source: MAPPO (https://huggingface.co/papers/2103.01955), which normalises values, too.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        width = min(hidden_size, 1024)  # small compared to a LoRA of a 7B model
        self.own = Float32Linear(hidden_size, width)
        self.team = Float32Linear(hidden_size, width, bias=False)
        self.out = Float32Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.states = RunningMoments(hidden_size)
        self.returns = RunningMoments()

    def forward(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(B, T, H)`): Hidden state before each token.
            state (`torch.Tensor` of shape `(B, H)`): Prompt state of each row, or the pooled ones of its team, standardised by
                `states`.

        Returns:
            `torch.Tensor` of shape `(B, T)`: Values in reward units, float32 (float64 for float64 weights).
        """
        x = self.own(standardize(hidden)) + self.team(state)[:, None]
        return self.returns.restore(self.out(F.silu(x)).squeeze(-1))

    def update_returns(
        self, returns: torch.Tensor, values: torch.Tensor, sums: SumOverProcesses | None = None
    ) -> torch.Tensor:
        """
        Adds a batch to the running moments of the returns.

        Args:
            returns (`torch.Tensor` of shape `(R,)`): Returns of this process, in reward units.
            values (`torch.Tensor`): Values with the moments so far, in reward units.
            sums (`Callable`, *optional*): Sums a tensor over the processes. One process by default.

        Returns:
            `torch.Tensor`: The values with the new moments.
        """
        output = self.returns.standardize(values)
        self.returns.update(returns, sums)
        return self.returns.restore(output)


def pool_team_states(
    states: torch.Tensor, stage: torch.Tensor, agent: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """
    Averages the agents' latest prompt states: what the team knows when a row begins.

    A row sees the prompts of its own stage and of earlier stages of its episode, including its own prompt. It does not see
    later prompts, which may contain its own reply: a baseline that depends on the action is biased.

    Args:
        states (`torch.Tensor` of shape `(E, M, H)`): Prompt states of the M rows of each episode, in any order.
        stage (`torch.Tensor` of shape `(E, M)`): Stage of each row, which increases within an episode, also across turns.
        agent (`torch.Tensor` of shape `(E, M)`): Index of the agent of each row.
        live (`torch.Tensor` of shape `(E, M)`):
            False on rows that were not played. Other rows do not see them, and their own result is 0.

    Returns:
        `torch.Tensor` of shape `(E, M, H)`: The pooled states, in the dtype of `states`.

    Source: MAPPO's centralised value function (https://huggingface.co/papers/2103.01955).
    """
    state = states.to(torch.promote_types(states.dtype, torch.float32)).masked_fill(~live[:, :, None], 0)
    here, there = stage[:, :, None], stage[:, None, :]
    same_agent = (agent[:, :, None] == agent[:, None, :]) & live[:, None, :]
    never = torch.iinfo(stage.dtype).max
    renewed = torch.where(same_agent & (there > here), there, never).amin(dim=2)  # (E, M): stage of the next state
    seen = live[:, None, :] & (there <= here) & (here < renewed[:, None, :])  # (E, M, M): row sees row
    weight = seen.to(state.dtype) / seen.sum(dim=2, keepdim=True).clamp(min=1)
    return (weight @ state).masked_fill(~live[:, :, None], 0).to(states.dtype)
