"""The agents of a team that speak through endpoints: other models answer for them, and they are never trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from typing import Any

from marcog_trl.agents import Workflow
from marcog_trl.checks import nearest
from marcog_trl.endpoints import Endpoint, EndpointClient, EndpointError
from marcog_trl.parsing.prompts import messages_of
from marcog_trl.rollout.chats import with_system_prompt
from marcog_trl.rollout.engine import Generate
from marcog_trl.rollout.records import Row


class EndpointAgents:
    """
    Asks endpoints for the replies of a stage, while the team's model generates the others.

    Args:
        workflow ([`Workflow`]): The team's workflow.
        system_prompt (`str`, *optional*): System message of every chat prompt that has none.
        sum_over_processes (`Callable`): Sums an `int` over all processes.
    """

    def __init__(self, workflow: Workflow, system_prompt: str | None, sum_over_processes: Callable[[int], int]):
        self._system_prompt = system_prompt
        self._sum = sum_over_processes
        self._warned: set[str] = set()
        clients: dict[Endpoint, EndpointClient] = {}
        self._client_of = {
            agent.name: clients.setdefault(agent.endpoint, EndpointClient(agent.endpoint))
            for agent in workflow.agents
            if agent.endpoint is not None
        }

    def beside(self, generate: Generate, masks_failures: bool) -> Generate:
        """
        Returns a function that generates a stage with `generate`, except for the replies of agents behind endpoints.

        Args:
            generate (`Callable`): Generates the replies of the team's own agents.
            masks_failures (`bool`): Whether an episode is masked if an agent's endpoint fails, after one warning per agent.

        Raises:
            EndpointError: On all processes, if an endpoint does not answer and `masks_failures` is `False`.
        """
        if not self._client_of:
            return generate

        def speak(rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
            own = [row for row in rows if row.slot.agent not in self._client_of]
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(self._ask, rows)
                # All processes generate, or none does
                completion_ids, logprobs = generate(own) if self._sum(len(own)) else ([], None)
            asking.result()
            self._check(rows, masks_failures)
            places = iter(range(len(own)))
            place_of = [None if row.completion is not None else next(places) for row in rows]
            return (
                [[] if place is None else completion_ids[place] for place in place_of],
                None if logprobs is None else [[] if place is None else logprobs[place] for place in place_of],
            )

        return speak

    def _ask(self, rows: list[Row]) -> None:
        """Sets `completion` on the rows of agents behind endpoints: one batch of requests per endpoint."""
        for client in dict.fromkeys(self._client_of.values()):
            asked = [row for row in rows if self._client_of.get(row.slot.agent) is client]
            chats = [messages_of(with_system_prompt(messages_of(row.prompt), self._system_prompt)) for row in asked]
            answers = client.ask(chats, share_equal=client.endpoint.temperature == 0)
            for row, answer in zip(asked, answers, strict=True):
                row.completion = answer

    def _check(self, rows: list[Row], masks_failures: bool) -> None:
        """Raises an error on all processes if a reply is missing, or warns once per agent if such episodes are masked."""
        failed = list(dict.fromkeys(row.slot.agent for row in rows if row.unanswered))
        if not masks_failures and self._sum(len(failed)):
            raise EndpointError(
                self._describe(failed[0], rows, "In training, on_reward_error='mask' leaves such episodes out.")
                if failed
                else "The endpoint of an agent failed on another process, which says why."
            )
        for agent in failed:
            if agent not in self._warned:
                self._warned.add(agent)
                then = (
                    "on_reward_error='mask' leaves these episodes out of training. Later failures are counted as "
                    f"agents/{agent}/failed in the log."
                )
                warnings.warn(self._describe(agent, rows, then), stacklevel=2)

    def _describe(self, agent: str, rows: list[Row], then: str) -> str:
        asked = [row.completion for row in rows if row.slot.agent == agent and row.completion is not None]
        errors = [answer.error for answer in asked if answer.error is not None]
        return self._client_of[agent].describe(f"The endpoint of agent {agent!r}", errors, len(asked), then)


def use_endpoints(workflow: Workflow, given: Mapping[str, Any] | None) -> dict[str, dict[str, Any]] | None:
    """
    Lets agents of a workflow speak through endpoints, in addition to those that the workflow declares, and checks all of them.

    Args:
        workflow ([`Workflow`]): The workflow. Changed in place.
        given (`Mapping[str, Mapping]`, *optional*): The fields of [`~marcog_trl.endpoints.Endpoint`], by agent. `{}` removes those
            that the workflow declares.

    Returns:
        `dict[str, dict]`, *optional*: The endpoints of the workflow, in the form of `given`; without any `None`, or `{}` if that was given.

    Raises:
        ValueError: If an agent or a field is unknown, or an endpoint cannot be used.
    """
    names = [agent.name for agent in workflow.agents]
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f'endpoints={given!r} is not a mapping. Set endpoints={{"planner": {_EXAMPLE}}}, for example.'
        )
    for name in given or {}:
        if name not in names:
            raise ValueError(f"endpoints has {name!r}, which is not one of the team's agents. Use some of {names}.")
    if given is not None:
        own = {name: endpoint_of(f"endpoints[{name!r}]", its) for name, its in given.items()}
        workflow.agents = tuple(
            replace(agent, endpoint=own.get(agent.name, agent.endpoint if given else None))
            for agent in workflow.agents
        )
    found = {agent.name: agent.endpoint for agent in workflow.agents if agent.endpoint is not None}
    for name, endpoint in found.items():
        try:
            endpoint.check()
        except (ImportError, ValueError) as error:
            raise ValueError(f"The endpoint of agent {name!r} cannot be used: {error}") from error
    return {name: asdict(endpoint) for name, endpoint in found.items()} or (None if given is None else {})


_EXAMPLE = '{"model": "gpt-4o-mini", "base_url": "http://localhost:8000/v1"}'


def endpoint_of(name: str, given: Any) -> Endpoint:
    """Makes an endpoint of its fields. `name`: where they stand, for errors."""
    if not isinstance(given, Mapping) or "model" not in given:
        raise ValueError(f"{name}={given!r} names no model. Set {name}={_EXAMPLE}, for example.")
    known = [field.name for field in fields(Endpoint)]
    for key in given:
        if key not in known:
            near = nearest(str(key), known)
            raise ValueError(
                f"{name} has an unknown key {key!r}. "
                + (f"Did you mean {near!r}?" if near else f"Use some of {known}.")
            )
    return Endpoint(**given)
