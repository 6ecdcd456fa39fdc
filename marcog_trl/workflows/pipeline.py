"""Planner, coder and debuggers, one after the other."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from marcog_trl.agents import PLACE, Advisor, Agent, Execute, Prompt, numbered
from marcog_trl.checks import COUNT, check_number
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.problems import solution_job
from marcog_trl.workflows.feedback import Feedback, VisibleTests, visible_results
from marcog_trl.workflows.rounds import CODE, SOLVER, FeedbackWorkflow


class Pipeline(FeedbackWorkflow):
    """
    Planner, coder and debugger, one after the other. The coder reads the plan; the debugger reads the code and its test
    results, and the last agent's code is the solution.

    Args:
        num_agents (`int`, *optional*, defaults to `3`): 1: coder; 2: planner and coder; 3: planner, coder and debugger; more:
            more debuggers, each of which reads the code of the one before.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`]. `visible_tests` also applies to debuggers.

    Raises:
        ValueError: If an argument has an unknown value.
    """

    def __init__(
        self,
        num_agents: int = 3,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        check_number("num_agents", num_agents, COUNT, whole=True, default=1)
        planner = Agent(
            "planner",
            f"{PLACE}\n\nPlan the function in one short sentence, without code. Begin with `The function`.",
        )
        coder = Agent("coder", SOLVER)
        debugger = f"{PLACE}\n\nWrite the correct code. {CODE}"
        debuggers = [Agent(numbered("debugger", i), debugger) for i in range(1, num_agents - 1)]
        agents = (coder,) if num_agents == 1 else (planner, coder, *debuggers)
        super().__init__(agents, num_turns, feedback, visible_tests, roles, expert)
        self.needs_tests = self.needs_tests or num_agents > 2

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[Any, Any, dict]:
        replies: dict[str, str] = {}
        before: Agent | None = None
        for agent in self.agents:
            if before is not None:
                text = replies[before.name]
                if before.name == "planner":
                    text = f"Plan:\n{text}"
                else:
                    job = solution_job(problem, text)
                    [verdict] = yield Execute((job,))
                    results = visible_results(job, verdict, self.visible_tests)
                    levels = (f"{level.name}: {level.finding}" for level in self._levels(before, problem, text))
                    report = "\n".join([*levels, results])
                    # Code that was cut to the part that parses would hide the error that the debugger has to correct
                    shown = text if error_in(problem, text) is not None else code_in(problem, text) or text
                    text = f"Code:\n{shown}\n\n{report}"
                chats[agent.name] = self._tell(agent, problem, chats[agent.name], text)
            replies |= yield {agent.name: chats[agent.name]}
            before = agent
        return replies

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return code_in(problem, replies[self.agents[-1].name])

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return None if agent.name == "planner" else problem.get("entry_point")
