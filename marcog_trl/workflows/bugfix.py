"""A tester and a fixer, who correct code that has a bug."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from marcog_trl.agents import Advisor, Agent, Execute, Prompt
from marcog_trl.parsing.replies import code_in
from marcog_trl.problems.bugs import assert_job
from marcog_trl.workflows.feedback import Feedback, VisibleTests
from marcog_trl.workflows.rounds import Rounds


class Bugfix(Rounds):
    """
    A tester and a fixer. The tester reads the problem and its code, which has a bug, and writes one assert. The assert is run
    on this code. The fixer reads code, assert and result, and writes the corrected function, which is the solution.

    Problems need the code with the bug in the column `buggy_solution`. See [`~marcog_trl.parsing.asserts.assert_in`] for the
    asserts that are run.

    Args:
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`Rounds`].

    Raises:
        ValueError: If an argument has an unknown value; while playing, if a problem has no `buggy_solution`.
    """

    needs_entry_point = True

    def __init__(
        self,
        num_turns: int = 1,
        feedback: str | Feedback = "level_feedback",
        visible_tests: VisibleTests = 1,
        roles: Mapping[str, str] | None = None,
        expert: Advisor | None = None,
    ):
        tester = Agent(
            "tester",
            "The code below has a bug. Write one assert that fails on this code and passes on correct code. Only the assert.",
        )
        fixer = Agent(
            "fixer",
            "The code below has a bug. A test was run on it, which may be wrong. Correct the code. Write the whole code. "
            "Code only.",
        )
        super().__init__((tester, fixer), num_turns, feedback, visible_tests, roles, expert)

    def _open(self, agent: Agent, problem: Mapping[str, Any], *texts: str) -> Prompt:
        buggy = problem.get("buggy_solution")
        if not buggy:
            raise ValueError(
                "it has no 'buggy_solution', the code that workflow='bugfix' corrects. Use load_problems('builtin_bugs'), or "
                "add the column"
            )
        code = buggy.strip("\n").rstrip()
        return super()._open(agent, problem, f"Code:\n{code}", *texts)

    def _turn(self, problem: Mapping[str, Any], chats: dict[str, Prompt]) -> Generator[Any, Any, dict]:
        replies = dict((yield {"tester": chats["tester"]}))
        job = assert_job(problem, problem["buggy_solution"], replies["tester"])
        result = "Test: none"
        if job is not None:
            [verdict] = yield Execute((job,))
            outcome = "could not be run" if verdict.status == "infrastructure" else verdict.message or "passed"
            result = f"Test: {job.tests[0]}\nResult: {outcome}"
        chats["fixer"] = self._tell(self.agents[1], problem, chats["fixer"], result)
        replies |= yield {"fixer": chats["fixer"]}
        return replies

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        return code_in(problem, replies["fixer"])

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return None if agent.name == "tester" else problem["entry_point"]
