"""Agents that share the functions of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marcog_trl.agents import PLACE, Advisor, Agent, numbered
from marcog_trl.checks import Range, check_number
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.prompts import fill
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import combine, find, parse, without
from marcog_trl.workflows.feedback import Feedback, Level, VisibleTests
from marcog_trl.workflows.rounds import CODE, FeedbackWorkflow


class Module(FeedbackWorkflow):
    """
    Agents that write the functions of one module at the same moment, without seeing each other's replies. Problems have the column
    `functions`, the names of the functions to write; the first agent writes the first one, and so on, in turns. The solution is the
    module with each function as its agent wrote it.

    Args:
        num_agents (`int`, *optional*, defaults to `4`): Size of the team.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`].

    Raises:
        ValueError: If an argument has an unknown value; while playing, if a problem has fewer functions than there are agents.
    """

    def __init__(
        self,
        num_agents: int = 4,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        check_number("num_agents", num_agents, Range(2), whole=True, default=4)
        role = f"{PLACE}\n\nOther agents write the other functions of this module."
        agents = tuple(Agent(numbered("coder", i), role) for i in range(1, num_agents + 1))
        super().__init__(agents, num_turns, feedback, visible_tests, roles, expert)

    def assigned(self, agent: str, problem: Mapping[str, Any]) -> list[str]:
        """
        The functions that an agent writes.

        Args:
            agent (`str`): Name of the agent.
            problem (`Mapping`): One dataset row.

        Returns:
            `list[str]`: Names, in the order of the problem.

        Raises:
            ValueError: If the problem has fewer functions than there are agents.
        """
        functions, names = list(problem.get("functions") or ()), [member.name for member in self.agents]
        if len(functions) < len(names):
            raise ValueError(
                f"its functions={functions} are fewer than the {len(names)} agents: set a smaller num_agents, or the column "
                "'functions'"
            )
        return functions[names.index(agent) :: len(names)]

    def _task(self, agent: Agent, problem: Mapping[str, Any]) -> str:
        own = " and ".join(self.assigned(agent.name, problem))
        return f"{fill(agent.role, problem)} Write only {own}. {CODE}"

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        parts = [
            self._part(problem, agent.name, code_in(problem, replies[agent.name], function))
            for agent in self.agents
            for function in self.assigned(agent.name, problem)
        ]
        return combine(*dict.fromkeys(parts))

    def _part(self, problem: Mapping[str, Any], agent: str, code: str) -> str:
        """The code of an agent, without the functions of other agents."""
        tree = parse(code)
        if tree is None:
            return code
        own = self.assigned(agent, problem)
        others = [find(tree, name) for name in problem["functions"] if name not in own]
        return without(code, tree, [node for node in tree.body if node in others])

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return ""

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        own = self.assigned(agent.name, problem)
        found = {name: defines(code_in(problem, reply, name), name) for name in own}
        return [
            Level(f"Definition of {name}", "found" if there else "missing", there) for name, there in found.items()
        ]
