"""Agents that read one prompt, and whose programs are tried on visible tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from marcog_trl.agents import Agent, Execute, Prompt, RequestGenerator, numbered
from marcog_trl.checks import COUNT, Range, check_number
from marcog_trl.execution import Verdict
from marcog_trl.problems import solution_job
from marcog_trl.workflows.rounds import SOLVER, FeedbackWorkflow


class Coverage(FeedbackWorkflow):
    """
    Agents that write at the same moment and read the same prompt, that of [`Single`]. Their programs run on the tests of the
    problem, and the visible ones choose the solution: the program that passes most of them.

    Between programs that pass as many, the one with the smallest hash of its text is chosen, so that no agent comes first.

    Args:
        num_agents (`int`, *optional*, defaults to `4`): k, size of the team.
        visible_tests (`int`, *optional*, defaults to `1`): Number of tests that choose, from the first on. The others are hidden.
        roles (`Mapping[str, str]`, *optional*): See [`FeedbackWorkflow`].

    Raises:
        ValueError: If an argument has an unknown value.
    """

    def __init__(self, num_agents: int = 4, visible_tests: int = 1, roles: Mapping[str, str] | None = None):
        check_number("num_agents", num_agents, Range(2), whole=True, default=4)
        check_number("visible_tests", visible_tests, COUNT, whole=True, default=1)
        agents = tuple(Agent(numbered("solver", i), SOLVER) for i in range(1, num_agents + 1))
        super().__init__(agents, visible_tests=visible_tests, roles=roles)
        self.needs_tests = True

    def _open(self, agent: Agent, problem: Mapping[str, Any], *texts: str) -> Prompt:
        prompt = problem["prompt"]  # as in `Single`, chat messages are sent unchanged
        return super()._open(agent, problem, *texts) if isinstance(prompt, str) and agent.role else prompt

    def play(self, problem: Mapping[str, Any]) -> RequestGenerator:
        replies = yield {agent.name: self._open(agent, problem) for agent in self.agents}
        verdicts = yield Execute(tuple(solution_job(problem, reply) for reply in replies.values()))
        return replies[self.chosen(replies, dict(zip(replies, verdicts, strict=True)))]

    def chosen(self, replies: Mapping[str, str], verdicts: Mapping[str, Verdict]) -> str:
        """
        Chooses the solution.

        Args:
            replies (`Mapping[str, str]`): Agent → reply, of the whole team or of a part of it.
            verdicts (`Mapping[str, Verdict]`): Agent → verdict on its program, for at least these agents.

        Returns:
            `str`: Name of the agent whose reply is the solution.
        """

        def rank(agent: str) -> tuple[int, str]:
            failed = sum(result.status != "passed" for result in verdicts[agent].tests[: self.visible_tests])
            return failed, text_order(replies[agent])

        return min(replies, key=rank)


def text_order(text: str) -> str:
    """The place of a program among those that pass as many visible tests: a hash, so that no author comes first."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
