"""
Agents, what a workflow is, and its three requests.

A workflow is a Python generator per episode: it yields `{agent name: prompt}` to let agents speak, [`Execute`] to run
code and [`Consult`] to ask somebody outside of the team. It knows nothing of tokens, batches, models or losses;
`rollout.py` plays it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from marcog_trl.execution import Job
from marcog_trl.parsing.prompts import Prompt, messages_of


@dataclass(frozen=True)
class Agent:
    """
    A named role with its own prompts; not a model.

    Args:
        name (`str`): Name, unique in the team; a path part of metrics (`agents/helper/reward`).
        role (`str`): What the agent is told to do. Shipped team workflows put it before the problem, and SHPPO's latents
            are computed from it.
    """

    name: str
    role: str


@dataclass(frozen=True)
class Slot:
    """
    One reply of one agent in an episode. A workflow declares the slots that it may use; a request fills the next one of
    the agent, or the one that it names.

    Args:
        agent (`str`): Name of the agent.
        turn (`int`, *optional*, defaults to `0`): Turn, counted from 0.
        act (`int`, *optional*, defaults to `0`): Which of the agent's replies within the turn, counted from 0.
    """

    agent: str
    turn: int = 0
    act: int = 0


@dataclass(frozen=True)
class Execute:
    """
    A workflow's request to run code; the generator receives one verdict per job, in order.

    Args:
        jobs (`tuple[Job, ...]`): What to run. A list is accepted and kept as a tuple.
    """

    jobs: tuple[Job, ...]

    def __post_init__(self):
        object.__setattr__(self, "jobs", tuple(self.jobs))


Advisor = Callable[[Sequence[Any]], Sequence[str | None]]
"""Answers questions from many episodes in one call: a text each, in order, or `None` where it has no answer."""


@dataclass(frozen=True)
class Consult:
    """
    A workflow's request to somebody outside of the team, such as an external model; the generator receives one text (or
    `None`) per question, in order. Answers are recorded, so that an episode that is forked asks nobody again.

    Args:
        advisor (`Callable`): `advisor(questions) -> answers`, called once for all the episodes that wait for it.
        questions (`tuple`): What it is asked. A list is accepted and kept as a tuple.
    """

    advisor: Advisor
    questions: tuple[Any, ...]

    def __post_init__(self):
        object.__setattr__(self, "questions", tuple(self.questions))


Play = Generator[Mapping[Any, Prompt] | Execute | Consult, Any, None]
"""What `Workflow.play` returns: yields requests, receives `{agent name: text}`, verdicts, or answers. The keys of a
request to speak are agents' names or [`Slot`]s."""


class Workflow:
    """
    Who speaks when and who sees what.

    Subclasses set `agents` and write `play` and `solution`. Given the same replies and verdicts, `play` must yield the
    same requests: episodes are forked by replaying their recorded prefix.

    Attributes:
        agents (`tuple[Agent, ...]`): The team, in order.
        num_turns (`int`, defaults to `1`): The most turns of an episode.
        slots (`tuple[Slot, ...]`): The most replies that an episode can use, in order. By default every agent speaks once
            per turn.
        needs_tests (`bool`, defaults to `False`): Whether `play` reads the tests of a problem.
        needs_entry_point (`bool`, defaults to `False`): Whether a problem must name the function that it asks for.
    """

    agents: tuple[Agent, ...] = ()
    num_turns: int = 1
    needs_tests: bool = False
    needs_entry_point: bool = False

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(agent.name, turn) for turn in range(self.num_turns) for agent in self.agents)

    def play(self, problem: Mapping[str, Any]) -> Play:
        """
        Play one episode.

        Args:
            problem (`Mapping`): One dataset row, read-only. Lists and dicts in it are this episode's own copies.

        Yields:
            `dict[str, str | list[dict[str, str]]]` (agent name → prompt: these agents speak at the same moment; receives
            agent name → text), [`Execute`] (receives a list of verdicts) or [`Consult`] (receives a list of texts). A
            request whose slots belong to a later turn, or the return, ends the turn.

            A reply goes into the next slot of its agent. After an optional reply that was left out, that would be the
            wrong one: name the slot in place of the agent. The answer has the agent's name in any case.

            ```python
            slots = (Slot("coder"), Slot("coder", act=1), Slot("coder", turn=1))

            def play(self, problem):
                replies = yield {"coder": problem["prompt"]}
                if not replies["coder"].strip():  # a retry, which most episodes do without
                    replies = yield {"coder": problem["prompt"]}
                replies = yield {Slot("coder", turn=1): f"Improve this:\n{replies['coder']}"}
            ```
        """
        raise NotImplementedError

    def parts(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> Mapping[str, str]:
        """
        Who wrote what in a turn, as `solution` and reward functions are told: the replies themselves, unless one agent
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
        The code that a turn's replies amount to: what is executed and scored.

        Args:
            problem (`Mapping`): One dataset row, read-only.
            replies (`Mapping[str, str]`): What `parts` returned: each agent's last reply of the turn.

        Returns:
            `str`: The solution's text.
        """
        raise NotImplementedError

    def validate(self) -> None:
        """
        Check the declaration of the workflow before any work starts.

        Raises:
            TypeError: If `play` or `solution` is missing, an agent is not an [`Agent`], or a slot not a [`Slot`].
            ValueError: If there are no agents, two agents share a name, `num_turns` is below 1, a slot names an unknown
                agent or a turn that does not exist, or stands twice.
        """
        title = type(self).__name__
        _check_entries(f"{title}.agents", self.agents, Agent("main", "Write the function."))
        names = [agent.name for agent in self.agents]
        if not names:
            raise ValueError(f"{title}.agents=() has no agent. Set agents=(Agent('solver', 'Write the function.'),).")
        for agent in self.agents:
            if not isinstance(agent.name, str) or not agent.name or not isinstance(agent.role, str):
                raise TypeError(f"{title}.agents has {agent}. Use text for the name and the role.")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(
                f"{title}.agents={names} has {names.count(repeated[0])} agents named {repeated[0]!r}. Give each a name of its "
                f"own: {[f'{name}{names[:i].count(name) + 1}' if name in repeated else name for i, name in enumerate(names)]}."
            )
        check_number(f"{title}.num_turns", self.num_turns)
        _check_entries(f"{title}.slots", self.slots, Slot(names[0]))
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
        for name, base, works in (
            ("play", Workflow.play, "yields {agent name: prompt}"),
            ("solution", Workflow.solution, "returns the code that a turn's replies amount to"),
        ):
            if getattr(type(self), name) is base:
                raise TypeError(f"{title} has no method {name!r}. Write one that {works}.")


def _check_entries(name: str, entries: Any, example: Any) -> None:
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise TypeError(f"{name}={entries!r} is not a tuple. Set it to ({example},).")
    for i, entry in enumerate(entries):
        if not isinstance(entry, type(example)):
            raise TypeError(
                f"{name}[{i}]={entry!r} is a {type(entry).__name__}. Use {type(example).__name__}s, such as {example}."
            )


def check_number(name: str, value: Any, least: int = 1) -> None:
    """Raises `ValueError` unless a value is a whole number of at least `least`; the error calls it `name`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}. Set {name}={least}.")


# Prompts


def ask(role: str, prompt: Prompt) -> list[dict[str, str]]:
    """
    The opening messages of an agent: role text, blank line, problem, in one user message.

    Args:
        role (`str`): Role text.
        prompt (`str` or `list[dict[str, str]]`): The problem's `prompt`. Of chat messages, the last one takes the role
            text.

    Returns:
        `list[dict[str, str]]`: Chat messages.
    """
    *before, last = messages_of(prompt)
    return [*before, {**last, "content": f"{role}\n\n{last['content']}"}]


def with_text(chat: Prompt, text: str) -> list[dict[str, str]]:
    """The chat with a text added to its last message."""
    *before, last = messages_of(chat)
    return [*before, {**last, "content": f"{last['content'].rstrip()}\n\n{text}"}]


def numbered(name: str, i: int) -> str:
    """`aux`, `aux2`, `aux3`, … for i = 1, 2, 3, …"""
    return name if i == 1 else f"{name}{i}"
