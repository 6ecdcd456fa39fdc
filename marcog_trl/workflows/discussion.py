"""All agents propose, read each other, and revise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from functools import cached_property
from typing import Any

from marcog_trl.agents import Advisor, Agent, Prompt, Slot, numbered
from marcog_trl.checks import Range, check_number
from marcog_trl.parsing.prompts import messages_of
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import parse, shape
from marcog_trl.workflows.feedback import Feedback, VisibleTests
from marcog_trl.workflows.rounds import CODE, SOLVER, FeedbackWorkflow


class Discussion(FeedbackWorkflow):
    """
    Agents that all propose a solution at the same moment, read the others' proposals, and revise their own: two replies of
    each agent per turn. The solution is the program that most agents end with, or the first agent's in a tie.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Size of the team.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`].

    Raises:
        ValueError: If an argument has an unknown value.

    Source: Du et al. 2023 (https://huggingface.co/papers/2305.14325).
    """

    def __init__(
        self,
        num_agents: int = 2,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        check_number("num_agents", num_agents, Range(2), whole=True, default=2)
        agents = tuple(Agent(numbered("solver", i), SOLVER) for i in range(1, num_agents + 1))
        super().__init__(agents, num_turns, feedback, visible_tests, roles, expert)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(agent.name, turn, act) for turn in range(self.num_turns) for act in (0, 1) for agent in self.agents
        )

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[Any, Any, dict]:
        proposals = yield dict(chats)
        for agent in self.agents:
            others = "\n\n".join(text for name, text in proposals.items() if name != agent.name)
            chats[agent.name] = [
                *messages_of(chats[agent.name]),
                {"role": "assistant", "content": proposals[agent.name]},
                {
                    "role": "user",
                    "content": f"The others wrote:\n\n{others}\n\nRevise your answer. {CODE}",
                },
            ]
        return (yield dict(chats))

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        programs = [code_in(problem, replies[agent.name]) for agent in self.agents]
        # Programs that differ in layout and comments only count as one. Counter keeps the order of the agents
        trees = [parse(program) for program in programs]
        shapes = [None if tree is None else shape(tree) for tree in trees]
        votes = Counter(shape for shape, program in zip(shapes, programs, strict=True) if program)
        return programs[shapes.index(votes.most_common(1)[0][0])] if votes else ""
