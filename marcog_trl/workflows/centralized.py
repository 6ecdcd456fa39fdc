"""One agent that writes the replies of a whole team."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from marcog_trl.agents import Agent, Consult, Execute, Prompt, RequestGenerator, Slot, Workflow, without_place
from marcog_trl.parsing.prompts import messages_of


class Centralized(Workflow):
    """
    One agent, `team`, that writes the replies of all agents of a workflow in one reply, each between tags. It is the
    centralised policy that decentralised policies are compared with. A part that is missing or not closed is an empty text.
    Rewards and the feedback of the workflow see the parts.

    Args:
        workflow (`Workflow`): Workflow of the team. Its agents must speak at the same moment, once per turn.

    Raises:
        TypeError, ValueError: If the declaration of the workflow is wrong.
        ValueError: While playing, if the agents of the workflow do not speak at the same moment.

    Source: the centralised baseline of MAGRPO (https://huggingface.co/papers/2508.04652).
    """

    def __init__(self, workflow: Workflow):
        workflow.validate()
        outside = [agent.name for agent in workflow.agents if agent.endpoint is not None]
        if outside:
            raise ValueError(
                f"centralized=True has one agent, which speaks for all, but {outside} of {type(workflow).__name__} speak through "
                "endpoints. Remove the endpoints, or set centralized=False."
            )
        self.workflow = workflow
        names = [agent.name for agent in workflow.agents]
        using = [agent.name for agent in workflow.agents if agent.tools]
        if using:
            raise ValueError(
                f"centralized=True has one agent in place of {using}, which have tools. Remove their tools, and pass tools=[...] "
                "for the agent that replaces them."
            )
        template = "\n".join(f"<{name}>\n...\n</{name}>" for name in names)
        self.task = (
            f"Write the answers of {len(names)} agents, each between the tags of its name:\n\n{template}\n\nWhat they are "
            "asked:"
        )
        roles = "\n\n".join(f"{agent.name}: {without_place(agent.role)}" for agent in workflow.agents)
        self.agents = (Agent("team", f"{self.task}\n\n{roles}"),)
        for name in ("source_file", "num_turns", "needs_tests", "needs_entry_point", "replayable", "may_fail"):
            setattr(self, name, getattr(workflow, name))

    def play(self, problem: Mapping[str, Any]) -> RequestGenerator:
        inner = self.workflow.play(problem)
        chat: list[dict[str, str]] = []
        answer: Any = None
        while True:
            try:
                request = next(inner) if answer is None else inner.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Execute | Consult):
                answer = yield request
                continue
            names = [agent.name for agent in self.workflow.agents]
            turns = {key.turn for key in request if isinstance(key, Slot)}  # if the workflow names slots
            request = {key.agent if isinstance(key, Slot) else key: prompt for key, prompt in request.items()}
            if list(request) != names or len(turns) > 1:
                raise ValueError(
                    f"centralized=True needs a workflow that asks {names} at the same moment, but "
                    f"{type(self.workflow).__name__} asks {list(request)}. Use workflow='collaboration', or centralized=False."
                )
            chat = [*chat, *self._ask(request, problem["prompt"], first=not chat)]
            replies = yield {Slot("team", turns.pop()) if turns else "team": chat}
            chat = [*chat, {"role": "assistant", "content": replies["team"]}]
            answer = self.parts(problem, replies)

    def _ask(self, request: Mapping[str, Prompt], prompt: Prompt, first: bool) -> list[dict[str, str]]:
        """Join the last messages of all agents to one message. The problem, which they share, comes once, at the end."""
        last = {name: messages_of(chat)[-1]["content"] for name, chat in request.items()}
        problem = messages_of(prompt)[-1]["content"] if first else ""
        if not all(problem.rstrip() in text for text in last.values()):
            problem = ""
        asked = [f"{name}: {text.replace(problem.rstrip(), '', 1).strip()}" for name, text in last.items()]
        before = messages_of(next(iter(request.values())))[:-1] if first else []
        parts = [self.task if first else "What the agents are told:", *asked, *([problem] if problem else [])]
        return [*before, {"role": "user", "content": "\n\n".join(parts)}]

    def parts(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> dict[str, str]:
        found = {
            agent.name: re.search(
                rf"<{re.escape(agent.name)}>(.*?)</{re.escape(agent.name)}>", replies["team"], re.DOTALL
            )
            for agent in self.workflow.agents
        }
        return {name: "" if match is None else match[1].strip() for name, match in found.items()}

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return self.workflow.solution(problem, replies)
