"""Makes a team's model act as its agents: selects the latent, or the block of the adapter, of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel

from marcog_trl.agents import Workflow, without_place
from marcog_trl.algorithms.critic import standardize
from marcog_trl.rollout.engine import encode_prompts
from marcog_trl.rollout.records import Row
from marcog_trl.team.modules import ForwardContext, TeamModule
from marcog_trl.team.positions import positions
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.shared_prompts import contiguous_states


class AgentContexts:
    """
    Selects what makes the agents of a team differ, apart from their prompts.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The team's model, with `modules` attached.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        workflow ([`Workflow`]): The team's workflow.
        settings ([`TeamSettings`]): The team's settings.
        modules ([`TeamModule`]): The team's networks.
        autocast (`Callable`): Returns a context that sets the precision of forward passes on prompts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        workflow: Workflow,
        settings: TeamSettings,
        modules: TeamModule,
        autocast: Callable[[], AbstractContextManager[None]],
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._agents = [agent.name for agent in workflow.agents]
        roles = [agent.role for agent in workflow.agents]
        # Agents with the same role text are told apart by their names
        self._roles = [
            role if roles.count(role) == 1 else f"{name}: {role}"
            for name, role in zip(self._agents, roles, strict=True)
        ]
        self._settings = settings
        self._modules = modules
        self._autocast = autocast

    @torch.no_grad()
    def as_agent(
        self, agent: str, inputs: Mapping[str, torch.Tensor] | None
    ) -> AbstractContextManager[ForwardContext | None]:
        if self._settings.parameter_sharing == "shared":
            return nullcontext()
        index = torch.tensor([self._agents.index(agent)], device=self._model.device)
        if self._settings.parameter_sharing == "separate":
            return self._modules.rows(ForwardContext(agent=index, frozen=True))
        if self._settings.latent_scope == "agent":
            observations = self.role_observations[index]
        elif inputs is None:
            raise ValueError(
                "inputs=None, but with latent_scope='observation' an agent depends on its prompt. Pass the model's inputs: "
                f"use_agent({agent!r}, inputs)."
            )
        else:
            masks = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            ids = [row[mask].tolist() for row, mask in zip(inputs["input_ids"], masks, strict=True)]
            role = self._role_embeddings[index].expand(len(ids), -1)
            observations = torch.cat([role, self._prompt_states(ids)], dim=-1)
        mu, _ = self._modules.latents(observations)
        return self._modules.rows(ForwardContext(z=mu, frozen=True))

    @contextmanager
    def as_rows(
        self, rows: list[Row], noise: Callable[[list[Row]], torch.Tensor] | None, prompt_states: bool
    ) -> Iterator[ForwardContext]:
        """Makes the model act as the agents of these rows, and stores latents, noise and observations in the rows."""
        with torch.no_grad():
            context = self._forward_context(rows, noise, prompt_states)
        with self._modules.rows(context):
            yield context

    def as_before(self, rows: list[Row]) -> AbstractContextManager[ForwardContext]:
        """Makes the model act as the agents of these rows, with the latents that the rows have."""
        if not self._settings.has_latents:
            return self._modules.rows(self._forward_context(rows, None, prompt_states=False))
        weight = next(self._modules.parameters())
        unused = torch.zeros(self._settings.latent_size, dtype=weight.dtype, device=weight.device)
        latents = torch.stack([row.latent for row in rows] or [unused])
        return self._modules.rows(ForwardContext(z=latents, frozen=True))

    def _forward_context(
        self, rows: list[Row], noise: Callable[[list[Row]], torch.Tensor] | None, prompt_states: bool
    ) -> ForwardContext:
        """Returns the context of one generate call. Without rows, that of a dummy row."""
        settings = self._settings
        by_prompt = settings.has_latents and settings.latent_scope == "observation"
        if prompt_states or by_prompt:
            self._observe(rows, by_prompt)
        if settings.parameter_sharing == "separate":
            agents = [self._agents.index(row.slot.agent) for row in rows] or [0]
            return ForwardContext(agent=torch.tensor(agents, device=self._model.device), frozen=True)
        if not settings.has_latents:
            return ForwardContext()
        observations = self._observations_of(rows)
        mu, sigma = self._modules.latents(observations)
        eps = torch.zeros_like(mu) if noise is None else noise(rows)
        z = mu + sigma * eps
        for i, row in enumerate(rows):
            row.observation, row.latent, row.noise = observations[i], z[i], eps[i]
        return ForwardContext(z=z, frozen=True)

    def _observe(self, rows: list[Row], by_prompt: bool) -> None:
        """Sets the state of the prompt on each row, and the observation if latents depend on the prompt."""
        prompts = list({tuple(row.prompt_ids): None for row in rows}) or [(self._tokenizer.eos_token_id,)]
        ids = [list(prompt) for prompt in prompts]
        states = dict(zip(prompts, self._prompt_states(ids), strict=True))
        for row in rows:
            row.prompt_state = states[tuple(row.prompt_ids)]
            if by_prompt:
                role = self._role_embeddings[self._agents.index(row.slot.agent)]
                row.observation = torch.cat([role, row.prompt_state])

    def _observations_of(self, rows: list[Row]) -> torch.Tensor:
        """Returns the observation `[o, h]` of each row, `(R, 2H)`. Without rows, that of a dummy row."""
        if self._settings.latent_scope == "agent":  # a collective operation under ZeRO-3: also without rows
            return self.role_observations[[self._agents.index(row.slot.agent) for row in rows] or [0]]
        if not rows:
            return torch.zeros_like(self._role_embeddings[:1]).repeat(1, 2)
        return torch.stack([row.observation for row in rows])

    def _prompt_states(self, prompt_ids: list[list[int]]) -> torch.Tensor:
        """
        Returns the final hidden state at the last token of each prompt, `(len(prompt_ids), H)`: that of the base model, or of the
        policy if it has no adapter.
        """
        inputs = self._tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        inputs = inputs.to(self._model.device)
        with (
            torch.no_grad(),
            self._modules.rows(ForwardContext(last_state=True)) as context,
            without_adapter(self._model),
            contiguous_states(self._model),
            self._autocast(),
        ):
            self._model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                logits_to_keep=1,
                use_cache=False,
                **positions(self._model.get_decoder(), inputs["attention_mask"]),
            )
        assert context.hidden is not None
        return context.hidden.float()

    @cached_property
    def _role_ids(self) -> list[list[int]]:
        return encode_prompts(
            self._tokenizer,
            [[{"role": "user", "content": without_place(role)}] for role in self._roles],
        )

    @cached_property
    def _role_embeddings(self) -> torch.Tensor:
        """Mean input embedding of each agent's role text, made [`distinct`], `(N, H)`. Cached, because embeddings are frozen."""
        inputs = self._tokenizer.pad({"input_ids": self._role_ids}, return_tensors="pt").to(self._model.device)
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        embeddings = self._model.get_input_embeddings()(inputs["input_ids"]).detach().float()
        return distinct((embeddings * mask).sum(1) / mask.sum(1))

    @cached_property
    def role_observations(self) -> torch.Tensor:
        """Observation of each agent's role text alone, `(N, 2H)`. Cached, because the base model is frozen."""
        return torch.cat([self._role_embeddings, distinct(self._prompt_states(self._role_ids))], dim=-1)


def distinct(x: torch.Tensor) -> torch.Tensor:
    """
    What tells the rows of `x`, `(N, H)`, apart: their differences from the mean row, standardised, `(N, H)`; 0 where they are alike.
    Mean embeddings of two role texts have a cosine of .99, so that networks would see one agent, and latents become the same.
    """
    return standardize(x - x.mean(0))


def without_adapter(model: Any) -> AbstractContextManager[Any]:
    """Makes a model act as before training. One that is trained as a whole does not change."""
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()


def keep_token_states(rows: list[Row], completion_ids: list[list[int]], states: list[torch.Tensor]) -> None:
    """Sets the states before each generated token, `(T, H)`, on the rows, if generation ran the hooks."""
    if rows and len(states) >= max(map(len, completion_ids)) and len(states[0]) == len(rows):
        stacked = torch.stack(states, dim=1)
        for i, row in enumerate(rows):
            row.token_states = stacked[i, : len(completion_ids[i])]
