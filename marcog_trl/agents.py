"""
Agents, workflows, and the three requests that a workflow can make.

A workflow is a Python generator per episode. It yields `{agent name: prompt}` to ask agents for replies, [`Execute`] to run
code, and [`Consult`] to ask an advisor outside of the team. `marcog_trl.rollout` plays workflows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from marcog_trl.checks import COUNT, check_number, returns_value
from marcog_trl.endpoints import Endpoint
from marcog_trl.execution import Job
from marcog_trl.parsing.prompts import Prompt, fill, messages_of


Tools = Sequence[Callable[..., Any]]
"""Functions that an agent may call inside a reply."""


@dataclass(frozen=True)
class Agent:
    """
    A named role in a team. Agents share one model, except for those that speak through an endpoint.

    Args:
        name (`str`): Name, unique in the team. Part of the names of metrics (`agents/helper/reward`).
        role (`str`): Instruction for the agent, from which SHPPO also computes latents (with the name, if agents have the same
            text). It comes before the problem, or where
            `{problem}` stands in it. `{entry_point}` and `{arguments}` are the name and the arguments of the function that
            the problem asks for.
        endpoint ([`~marcog_trl.endpoints.Endpoint`], *optional*): Endpoint of another model that speaks for the agent. Such
            an agent is never trained.
        tools (`Sequence[Callable]`, *optional*): Functions that the agent may call inside a reply, as in
            [`~trl.GRPOTrainer`]: with type hints and a docstring in Google's style. They may be coroutine functions. Lists
            are converted to tuples.
    """

    name: str
    role: str
    endpoint: Endpoint | None = None
    tools: Tools = ()

    def __post_init__(self):
        object.__setattr__(self, "tools", tuple(self.tools))


@dataclass(frozen=True)
class Slot:
    """
    One reply of one agent in an episode. A workflow declares the slots that it may use. A request fills the next slot of an
    agent, or the slot that it names.

    Args:
        agent (`str`): Name of the agent.
        turn (`int`, *optional*, defaults to `0`): Turn, counted from 0.
        act (`int`, *optional*, defaults to `0`): Number of the reply among those of the agent in the turn, counted from 0.
    """

    agent: str
    turn: int = 0
    act: int = 0


@dataclass(frozen=True)
class Execute:
    """
    Request to run code. The generator receives one verdict per job, in order.

    Args:
        jobs (`tuple[Job, ...]`): Jobs to run. Lists are converted to tuples.
    """

    jobs: tuple[Job, ...]

    def __post_init__(self):
        object.__setattr__(self, "jobs", tuple(self.jobs))


Advisor = Callable[[Sequence[Any]], Sequence[str | None]]
"""Answers the questions of many episodes in one call: one text per question, in order, or `None` if it has no answer."""


@dataclass(frozen=True)
class Consult:
    """
    Request to an advisor outside of the team, such as an external model. The generator receives one text (or `None`) per
    question, in order. Answers are recorded, so forked episodes do not ask again.

    Args:
        advisor (`Callable`): `advisor(questions) -> answers`, called once for all episodes that wait for it.
        questions (`tuple`): Questions for the advisor. Lists are converted to tuples.
    """

    advisor: Advisor
    questions: tuple[Any, ...]

    def __post_init__(self):
        object.__setattr__(self, "questions", tuple(self.questions))


LATER = object()
"""What an advisor answers to a question that has no answer yet. The episode asks it again, while others go on."""


class EpisodeFailed(Exception):
    """
    Raised by `play` to end an episode that failed. Its solution is an empty text.

    Args:
        reason (`str`): Why it failed.
        masks (`bool`, *optional*, defaults to `True`): Whether it is left out of all losses.
    """

    def __init__(self, reason: str, masks: bool = True):
        super().__init__(reason)
        self.masks = masks


RequestGenerator = Generator[Mapping[Any, Prompt] | Execute | Consult, Any, str | None]
"""Type of `Workflow.play`: yields requests, receives `{agent name: text}`, verdicts or answers, and may return the solution.
The keys of a request for replies are names of agents or [`Slot`]s."""


@dataclass(frozen=True)
class WorkflowFile:
    """
    The Python file of a workflow or of a reward that was loaded by name, as it was then.

    Args:
        path (`Path`): Where it was; absolute.
        content (`bytes`): The source code, which is saved with the team.
    """

    path: Path
    content: bytes

    @classmethod
    def read(cls, path: Path) -> WorkflowFile:
        """Reads the file at a path."""
        return cls(path.absolute(), path.read_bytes())


class Workflow:
    """
    Decides which agents speak when, and what they see.

    Subclasses set `agents` and implement `play`, which returns the solution, or `solution`, or both. `play` must be
    deterministic: given the same replies and verdicts it must yield the same requests, because episodes are forked by
    replaying their first responses.

    Attributes:
        agents (`tuple[Agent, ...]`): The team, in order.
        num_turns (`int`, defaults to `1`): Maximum number of turns of an episode.
        slots (`tuple[Slot, ...]`): All replies that an episode may use, in order. By default each agent speaks once per
            turn.
        needs_tests (`bool`, defaults to `False`): Whether `play` uses the tests of a problem.
        needs_entry_point (`bool`, defaults to `False`): Whether a problem must have an `entry_point`.
        replayable (`bool`, defaults to `True`): Whether `play` is deterministic, so that episodes can branch.
        may_fail (`bool`, defaults to `False`): Whether `play` may raise [`EpisodeFailed`]. If all episodes fail, it is an error.
        source_file ([`WorkflowFile`], *optional*): Set if the workflow was loaded from a file by name, `"my_team.py:Debate"`.
    """

    agents: tuple[Agent, ...] = ()
    num_turns: int = 1
    needs_tests: bool = False
    needs_entry_point: bool = False
    replayable: bool = True
    may_fail: bool = False
    source_file: WorkflowFile | None = None

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(agent.name, turn) for turn in range(self.num_turns) for agent in self.agents)

    def play(self, problem: Mapping[str, Any]) -> RequestGenerator:
        """
        Play one episode.

        Args:
            problem (`Mapping`): One dataset row, read-only; a copy for this episode.

        Yields:
            `dict[str, str | list[dict[str, str]]]` (agent name → prompt: these agents speak at the same moment; receives
            agent name → text), [`Execute`] (receives a list of verdicts) or [`Consult`] (receives a list of texts). A
            turn ends with a request for slots of a later turn, or when the generator returns.

            A reply fills the next slot of its agent. If an optional reply was left out, that is the wrong slot: use the
            slot as the key instead of the agent's name. The response is keyed by the agent's name in both cases, but for
            an agent that is asked for several slots at once, whose replies are keyed by the slots.

            ```python
            slots = (Slot("coder"), Slot("coder", act=1), Slot("coder", turn=1))

            def play(self, problem):
                replies = yield {"coder": problem["prompt"]}
                if not replies["coder"].strip():  # a retry, which most episodes do not need
                    replies = yield {"coder": problem["prompt"]}
                replies = yield {Slot("coder", turn=1): f"Improve this:\n{replies['coder']}"}
            ```

        Returns:
            `str`, *optional*: The solution of the last turn that was played. Otherwise, and for the turns before, `solution`
            is called.
        """
        raise NotImplementedError

    def ask(self, agent: str, problem: Mapping[str, Any], *texts: str) -> list[dict[str, str]]:
        """
        Make a prompt for an agent: its role text, the problem, and further texts, in one message with blank lines between.
        In the role text, `{problem}` is the place of the problem and of the further texts, if they do not follow the role text,
        and `{entry_point}` and `{arguments}` are the name and the arguments of the function that the problem asks for.

        Args:
            agent (`str`): Name of the agent.
            problem (`Mapping`): One dataset row. If its `prompt` has chat messages, all of this goes into the last one.
            *texts (`str`): What the agent reads after the problem, such as the replies of others.

        Returns:
            `list[dict[str, str]]`: Chat messages.

        Raises:
            ValueError: If the workflow has no such agent.
        """
        roles = {member.name: member.role for member in self.agents}
        if agent not in roles:
            raise ValueError(f"{type(self).__name__} has no agent {agent!r}. Use one of {list(roles)}.")
        return ask(fill(roles[agent], problem), problem["prompt"], *texts)

    def parts(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> Mapping[str, str]:
        """
        The part of a turn that each agent wrote, as passed to `solution` and to reward functions: the replies, unless one agent
        writes the parts of several.

        Args:
            problem (`Mapping`): One dataset row, read-only.
            replies (`Mapping[str, str]`): Each agent's last reply of the turn.

        Returns:
            `Mapping[str, str]`: Name → text.
        """
        return replies

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        """
        The solution that the replies of a turn make up, which is executed and scored. It is not called for the last turn
        of an episode if `play` returned the solution.

        Args:
            problem (`Mapping`): One dataset row, read-only.
            replies (`Mapping[str, str]`): Result of `parts`: by default each agent's last reply of the turn.

        Returns:
            `str`: Text of the solution.
        """
        title = type(self).__name__
        raise TypeError(
            f"{title}.play returned no solution, and {title} has no method 'solution'. Return the solution in play."
        )

    def validate(self) -> None:
        """
        Check the declaration of the workflow.

        Raises:
            TypeError: If `play` is missing, or `solution` is missing although there are several turns or `play` returns nothing.
            ValueError: If there are no agents, two agents share a name, an agent has both tools and an endpoint, `num_turns`
                is below 1, or a slot has an unknown agent, has an invalid turn or is repeated.
        """
        title = type(self).__name__
        names = [agent.name for agent in self.agents]
        if not names:
            raise ValueError(f"{title}.agents=() has no agent. Set agents=(Agent('solver', 'Write the function.'),).")
        for agent in self.agents:
            if agent.tools and agent.endpoint is not None:
                raise ValueError(
                    f"Agent {agent.name!r} has tools and an endpoint, which cannot call them. Remove either of them."
                )
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(
                f"{title}.agents={names} has {names.count(repeated[0])} agents named {repeated[0]!r}. Give each a name of its "
                f"own: {[f'{name}{names[:i].count(name) + 1}' if name in repeated else name for i, name in enumerate(names)]}."
            )
        check_number(f"{title}.num_turns", self.num_turns, COUNT, whole=True, default=1)
        if not self.slots:
            raise ValueError(f"{title}.slots=() lets no agent speak. Set slots=({Slot(names[0])},).")
        for slot in self.slots:
            if slot.agent not in names:
                raise ValueError(f"{title}.slots names agent={slot.agent!r}, which is not in {names}.")
            if not 0 <= slot.turn < self.num_turns:
                raise ValueError(
                    f"{title}.slots has turn={slot.turn} of agent {slot.agent!r}, but num_turns={self.num_turns} has the "
                    f"turns 0 to {self.num_turns - 1}."
                )
            if self.slots.count(slot) > 1:
                raise ValueError(
                    f"{title}.slots has {slot} {self.slots.count(slot)} times. For another reply in the same turn use "
                    f"{replace(slot, act=slot.act + 1)}."
                )
        if type(self).play is Workflow.play:
            raise TypeError(f"{title} has no method 'play'. Write one that yields {{agent name: prompt}}.")
        if type(self).solution is Workflow.solution:
            if self.num_turns > 1:
                raise TypeError(
                    f"{title} has no method 'solution', which num_turns={self.num_turns} needs: play returns only the solution "
                    "of the last turn. Write one that returns the solution that the replies of a turn make up."
                )
            if not returns_value(type(self).play):
                raise TypeError(
                    f"{title}.play returns no solution, and {title} has no method 'solution'. Return the solution in play."
                )


def with_tools(workflow: Workflow, tools: Any) -> Workflow:
    """
    A copy of a workflow whose only agent has further tools.

    Raises:
        TypeError: If `tools` is not a list.
        ValueError: If the workflow has several agents.
    """
    if tools is None or tools == []:
        return workflow
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools={tools!r:.80} is not a list. Pass a list of functions.")
    if len(workflow.agents) > 1:
        raise ValueError(
            f"tools does not say which of the agents {[agent.name for agent in workflow.agents]} may use them. Pass a workflow "
            f"with Agent({workflow.agents[-1].name!r}, '...', tools=[...])."
        )
    workflow = copy.copy(workflow)
    [agent] = workflow.agents
    workflow.agents = (replace(agent, tools=(*agent.tools, *tools)),)
    workflow.validate()
    return workflow


# Prompts


PLACE = "{problem}"
"""Stands in a role text for the problem."""


def ask(role: str, prompt: Prompt, *texts: str) -> list[dict[str, str]]:
    """
    Make the first messages of an agent: role text and problem in one user message.

    Args:
        role (`str`): Role text. `{problem}` is the place of the problem; otherwise it follows, after a blank line.
        prompt (`str` or `list[dict[str, str]]`): The `prompt` of the problem. If it has chat messages, the role text goes
            into the last one.
        *texts (`str`): What follows the problem, with blank lines between.

    Returns:
        `list[dict[str, str]]`: Chat messages.
    """
    *before, last = messages_of(reduce(with_text, texts, prompt))
    text = role if PLACE in role else f"{role}\n\n{PLACE}"
    problem = last["content"] if text.endswith(PLACE) else last["content"].rstrip()
    return [*before, {**last, "content": text.replace(PLACE, problem)}]


def without_place(role: str) -> str:
    """A role text without the place of the problem."""
    return role.replace(PLACE, "").strip()


def with_text(chat: Prompt, text: str) -> list[dict[str, str]]:
    """Add a text to the last message of a chat."""
    *before, last = messages_of(chat)
    return [*before, {**last, "content": f"{last['content'].rstrip()}\n\n{text}"}]


def numbered(name: str, i: int) -> str:
    """`aux`, `aux2`, `aux3`, … for i = 1, 2, 3, …"""
    return name if i == 1 else f"{name}{i}"
