"""
Agents, the workflows they play, and the two requests of a workflow.

A workflow is a Python generator per episode: it yields `{agent name: prompt}` to let agents speak and [`Execute`] to run
code. It knows nothing of tokens, batches, models or losses; `rollout.py` plays it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from marcog_trl.code import combine, extract_code


if TYPE_CHECKING:
    from marcog_trl.execution import Job


Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages with the keys `role` and `content`."""


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
    One reply of one agent in an episode.

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


Play = Generator[dict[str, Prompt] | Execute, Any, None]
"""What `Workflow.play` returns: yields requests, receives `{agent name: text}` or a list of verdicts."""


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
    """

    agents: tuple[Agent, ...] = ()
    num_turns: int = 1
    needs_tests: bool = False

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(agent.name, turn) for turn in range(self.num_turns) for agent in self.agents)

    def play(self, problem: Mapping[str, Any]) -> Play:
        """
        Play one episode.

        Args:
            problem (`Mapping`): One dataset row.

        Yields:
            `dict[str, str | list[dict[str, str]]]` (agent name → prompt: these agents speak at the same moment; receives
            agent name → text) or [`Execute`] (receives a list of verdicts). A request whose slots belong to a later turn,
            or the return, ends the turn.
        """
        raise NotImplementedError

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        """
        The code that a turn's replies amount to: what is executed and scored.

        Args:
            problem (`Mapping`): One dataset row.
            replies (`Mapping[str, str]`): Each agent's last reply of the turn.

        Returns:
            `str`: The solution's text.
        """
        raise NotImplementedError

    def validate(self) -> None:
        """
        Check the declaration of the workflow before any work starts.

        Raises:
            ValueError: If there are no agents, two agents share a name, `num_turns` is below 1, or a slot names an unknown
                agent or a turn that does not exist.
        """
        names = [agent.name for agent in self.agents]
        title = type(self).__name__
        if not names:
            raise ValueError(f"{title}.agents=() has no agent; (Agent('solver', 'Write the function.'),) works")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(
                f"{title}.agents={names} has {names.count(repeated[0])} agents named {repeated[0]!r}; "
                f"{[f'{name}{names[:i].count(name) + 1}' if name in repeated else name for i, name in enumerate(names)]}"
                " works"
            )
        if self.num_turns < 1:
            raise ValueError(f"{title}.num_turns={self.num_turns} has no turn; 1 works")
        if not self.slots:
            raise ValueError(f"{title}.slots=() lets no agent speak; ({Slot(names[0])},) works")
        for slot in self.slots:
            if slot.agent not in names:
                raise ValueError(
                    f"{title}.slots names agent={slot.agent!r}, which is not in {names}; {names[0]!r} works"
                )
            if not 0 <= slot.turn < self.num_turns:
                raise ValueError(
                    f"{title}.slots has turn={slot.turn} of agent {slot.agent!r}, but num_turns={self.num_turns}; "
                    f"turn={self.num_turns - 1} works"
                )


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
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return [*prompt[:-1], {**prompt[-1], "content": f"{role}\n\n{prompt[-1]['content']}"}]


class Collaboration(Workflow):
    """
    A helper and a main agent that write at the same moment: the helper a function `aux`, the main agent the entry point,
    which may call it. Neither sees the other's reply.
    """

    def __init__(self):
        self.agents = (
            Agent(
                "helper",
                "Write only a Python function named aux that returns useful data for the problem below. Another agent "
                "writes the solution. Code only.",
            ),
            Agent(
                "main",
                "Write the Python function asked for below. You may call aux(...), which another agent writes. Do not "
                "define aux. Code only.",
            ),
        )

    def play(self, problem: Mapping[str, Any]) -> Play:
        yield {agent.name: ask(agent.role, problem["prompt"]) for agent in self.agents}

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return combine(extract_code(replies["helper"], "aux"), extract_code(replies["main"], problem["entry_point"]))
