"""
The small networks of a team, attached to the team's language model.

They are one `nn.Module`, a child of the causal LM, so that the optimizer, gradient clipping, DDP and DeepSpeed include it.
It runs in the LM's forward pass: a hook before the decoder sets the cores of each row and computes the latent losses, and a
hook after the decoder computes values from the last hidden state.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from marcog_trl.algorithms.critic import ValueHead
from marcog_trl.heterogeneity.cores import LoraCores, block_mask
from marcog_trl.heterogeneity.losses import inference_loss, latent_loss
from marcog_trl.heterogeneity.networks import CoreDecoder, InferenceNet, LatentNet


ATTRIBUTE = "marcog_team"


@dataclass
class LatentTargets:
    """
    Inputs of the latent losses of a micro-batch. Each row has the data of all agents in its turn.

    Args:
        obs (`torch.Tensor` of shape `(B, N, 2H)`): Observations of the agents.
        eps (`torch.Tensor` of shape `(B, N, d)`): Noise of their latents.
        live (`torch.Tensor` of shape `(B, N)`): 1 for agents that act in the turn.
        target (`torch.Tensor` of shape `(B,)`): Mean of the agents' returns, in reward units.
        entropy_coef, distance_coef (`float`): Weights of the losses.
        distance_range (`tuple`): See [`latent_diversity`].
    """

    obs: torch.Tensor
    eps: torch.Tensor
    live: torch.Tensor
    target: torch.Tensor
    entropy_coef: float
    distance_coef: float
    distance_range: tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class ForwardContext:
    """
    Inputs of forward passes besides token ids, and their outputs besides log-probabilities.

    Args:
        keep (`int`): Number of last tokens to compute values for.
        critic_state (`torch.Tensor` of shape `(B, H)`, *optional*): What the critic knows when a row begins.
        z (`torch.Tensor` of shape `(B, d)`, *optional*): Latents of the rows. In generation, one per prompt or one for all is
            enough: a prompt may have several consecutive rows.
        obs, eps (`torch.Tensor` of shape `(B, 2H)` and `(B, d)`, *optional*): If set, z is computed from them, with gradient.
        other_z (`torch.Tensor` of shape `(K, d)`, *optional*): Latents of K rows that follow the B rows. They have no values.
        agent (`torch.Tensor` of shape `(B,)`, *optional*): Indices of the rows' agents, if each agent has its own ranks. In
            generation as for `z`.
        latent_targets (`LatentTargets`, *optional*): If set, the latent losses are computed.
        frozen (`bool`): Whether all passes have the same prompts and weights, as in generation. Cores are then decoded once.
        last_state (`bool`): Whether to keep the hidden state of the last token.
        states (`list` of `(B, H)`, *optional*): If set to an empty list before generation, collects the hidden state that
            precedes each generated token.
    """

    keep: int = 0
    critic_state: torch.Tensor | None = None
    z: torch.Tensor | None = None
    obs: torch.Tensor | None = None
    eps: torch.Tensor | None = None
    other_z: torch.Tensor | None = None
    agent: torch.Tensor | None = None
    latent_targets: LatentTargets | None = None
    frozen: bool = False
    last_state: bool = False
    states: list[torch.Tensor] | None = None
    # Set by the hooks
    rows: int = 0  # number of rows for which cores are decoded
    values: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    latent_loss: torch.Tensor | None = None
    inference_loss: torch.Tensor | None = None
    # Set by the trainer: log-probabilities of the B rows and of the K rows, (B, T) and (K, T)
    logps: torch.Tensor | None = None
    other_logps: torch.Tensor | None = None


class TeamModule(nn.Module):
    """
    Value head, core decoder and latent networks of a team, all optional.

    Args:
        value_head (`ValueHead`, *optional*): The critic.
        critic_backprop (`bool`, *optional*, defaults to `False`): Whether the value loss reaches the policy.
        cores (`LoraCores`, *optional*): The adapter's hooks.
        core_decoder (`CoreDecoder`, *optional*): Maps latents to cores.
        latent_net (`LatentNet`, *optional*): Maps observations to latents.
        inference_net (`InferenceNet`, *optional*): Predicts the team's return from its latents.
        agents (`list[str]`, *optional*): Names of the agents, by index.
    """

    def __init__(
        self,
        value_head: ValueHead | None = None,
        critic_backprop: bool = False,
        cores: LoraCores | None = None,
        core_decoder: CoreDecoder | None = None,
        latent_net: LatentNet | None = None,
        inference_net: InferenceNet | None = None,
        agents: Sequence[str] = ("main",),
    ):
        super().__init__()
        self.value_head = value_head
        self.core_decoder = core_decoder
        self.latent_net = latent_net
        self.inference_net = inference_net
        self.critic_backprop = critic_backprop
        self.agents = list(agents)
        self._cores = cores
        self.context: ForwardContext | None = None
        self._warned = False

    def attach(self, causal_lm: PreTrainedModel) -> None:
        """Makes the module a child of the causal LM, and registers its hooks on the decoder."""
        causal_lm.add_module(ATTRIBUTE, self)
        # A saved or merged language model must not contain the team's modules
        ours = {f"{ATTRIBUTE}.{name}" for name in self.state_dict()}
        causal_lm._keys_to_ignore_on_save = {*(causal_lm._keys_to_ignore_on_save or ()), *ours}
        decoder = causal_lm.get_decoder()
        decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
        decoder.register_forward_hook(self._after_decoder)

    def latents(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean and standard deviation of the latents of observations `(B, 2H)`, each `(B, d)`."""
        assert self.latent_net is not None
        return self.latent_net(observations)

    def cores(self, z: torch.Tensor) -> list[torch.Tensor]:
        """Returns the cores of latents `(B, d)` in every adapted layer, each `(B, r, r)`."""
        assert self.core_decoder is not None
        return self.core_decoder(z)

    @contextmanager
    def rows(self, context: ForwardContext) -> Iterator[ForwardContext]:
        """Sets the rows of the forward passes inside the context."""
        outer, self.context = self.context, context
        try:
            yield context
        finally:
            # Cores stay set: gradient checkpointing runs the layers again in the backward pass
            self.context = outer
            if outer is not None:
                outer.rows = 0

    def _before_decoder(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        context = self.context
        if self._cores is None:
            return
        if context is None or (context.agent is None and context.z is None):
            self._cores.clear()
            if context is None and self._cores.acts:
                self._warn_of_no_agent()
            return
        given = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        rows = next(len(tensor) for tensor in given if tensor is not None)
        if context.frozen and context.rows == rows:
            return
        context.rows = rows

        def each(of_prompt: torch.Tensor) -> torch.Tensor:
            """Repeats values per prompt for every row: in generation, rows of a prompt (its beams) are consecutive."""
            several = context.frozen and rows % len(of_prompt) == 0
            return of_prompt.repeat_interleave(rows // len(of_prompt), dim=0) if several else of_prompt

        if context.agent is not None:
            agent = each(context.agent)
            masks = {rank: block_mask(agent, len(self.agents), rank) for rank in set(self._cores.ranks)}
            self._cores.set_masks([masks[rank] for rank in self._cores.ranks])
            return
        z = context.z
        if context.obs is not None and context.eps is not None:
            mu, sigma = self.latents(context.obs)
            z = mu + sigma * context.eps
        assert z is not None
        if context.other_z is not None:
            z = torch.cat([z, context.other_z])
        self._cores.set(self.cores(each(z)))
        if context.latent_targets is not None:
            self._latent_losses(context, context.latent_targets)

    def _warn_of_no_agent(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "The shared adapter ran without an agent, which is not a policy of the team. Call the model inside `with "
                f"trainer.use_agent({self.agents[0]!r}, inputs):` to use it as an agent.",
                stacklevel=2,
            )

    def _latent_losses(self, context: ForwardContext, targets: LatentTargets) -> None:
        assert self.latent_net is not None and self.inference_net is not None
        mu, sigma = self.latent_net(targets.obs)
        value = self.inference_net(targets.obs, mu.detach(), sigma.detach(), targets.live)
        scale = self.inference_net.returns.scale
        context.inference_loss = inference_loss(value / scale, targets.target / scale)
        context.latent_loss = latent_loss(
            self.inference_net(targets.obs, mu, sigma, targets.live, detach_weights=True),
            sigma,
            mu + sigma * targets.eps,
            targets.live,
            targets.entropy_coef,
            targets.distance_coef,
            targets.distance_range,
        )

    def _after_decoder(self, module: nn.Module, args: Any, output: Any) -> None:
        context = self.context
        if context is None:
            return
        hidden = output[0]
        if context.last_state:
            context.hidden = hidden[:, -1].detach()
        if context.states is not None:
            if hidden.size(1) > 1:  # prompts, or chunks of prompts
                context.states.clear()
            context.states.append(hidden[:, -1].detach())
        if context.keep and self.value_head is not None:
            # The state before the first completion token is the last one of the prompt
            own = len(hidden) - (0 if context.other_z is None else len(context.other_z))
            before = hidden[:own, -context.keep - 1 : -1]
            before = before if self.critic_backprop else before.detach()
            context.values = self.value_head(before, context.critic_state)
