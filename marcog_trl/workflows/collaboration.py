"""Helpers and a main agent that write at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marcog_trl.agents import PLACE, Advisor, Agent, numbered
from marcog_trl.checks import Range, check_number
from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import combine
from marcog_trl.workflows.feedback import Feedback, Level, VisibleTests
from marcog_trl.workflows.rounds import FeedbackWorkflow


# An example keeps a small model from solving the whole problem, which it does if it is only told not to
_EXAMPLE = "First keep the words that begin with a capital letter, then sort them, then join them with spaces."
_STEPS = (
    ("first", "[word for word in words if word[0].isupper()]"),
    ("second", "sorted(words)"),
    ("third", "' '.join(words)"),
)


def _helper(i: int, function: str) -> str:
    """Role text of the helper that does step i, counted from 0."""
    step, code = _STEPS[min(i, len(_STEPS) - 1)]
    return (
        f"Another agent writes the function that solves a problem. You write {function}, which does only the {step} step, and "
        f'returns its result. For example, if the problem is "{_EXAMPLE}", your answer is:\n```python\ndef {function}(words):\n'
        f"    return {code}\n```\n\nThe problem:\n{PLACE}\n\nAnswer with one code block that begins with this line:\n```python\n"
        f"def {function}({{arguments}}):\n```"
    )


class Collaboration(FeedbackWorkflow):
    """
    Helpers and a main agent that write at the same moment. A helper writes the function `aux` (the second helper `aux2`, and
    so on), and the main agent the entry point, which may call it. They do not see each other's replies.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Size of the team: one main agent, the others helpers.
        num_turns (`int`, *optional*, defaults to `1`): Rounds of the whole team.
        feedback, visible_tests, roles, expert: See [`FeedbackWorkflow`].

    Raises:
        ValueError: If an argument has an unknown value.
    """

    needs_entry_point = True

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
        self.functions = {numbered("helper", i): numbered("aux", i) for i in range(1, num_agents)}
        agents = [Agent(name, _helper(i, function)) for i, (name, function) in enumerate(self.functions.items())]
        *first, last = (f"{function}({{arguments}})" for function in self.functions.values())
        if first:
            use = f"You may call {', '.join(first)} and {last}, which other agents write. Do not define them."
        else:
            use = f"You may call {last}, which another agent writes. Do not define aux."
        answer = "Answer with one code block that begins with `def {entry_point}({arguments}):`."
        main = Agent("main", f"{PLACE}\n\nWrite {{entry_point}}. {use} {answer}")
        super().__init__((*agents, main), num_turns, feedback, visible_tests, roles, expert)

    def solution(self, problem: Mapping[str, Any], replies: Mapping[str, str]) -> str:
        """The helpers' and the main agent's code. A helper that defines the entry point does not answer for the main agent."""
        main = code_in(problem, replies["main"])
        if not defines(main, problem["entry_point"]):
            return main
        return combine(*(code_in(problem, replies[agent.name], self._target(agent, problem)) for agent in self.agents))

    def _target(self, agent: Agent, problem: Mapping[str, Any]) -> str | None:
        return self.functions.get(agent.name, problem["entry_point"])

    def _levels(self, agent: Agent, problem: Mapping[str, Any], reply: str) -> list[Level]:
        levels = super()._levels(agent, problem, reply)
        if agent.name != "main":
            return levels
        entry_point = problem["entry_point"]
        found = code_in(problem, reply)
        for function in self.functions.values():
            if defines(found, function):
                state = "defined by you, which is not allowed"
            elif not calls(found, entry_point, function):
                state = "not called"
            elif ignores_result(found, entry_point, function):
                state = "called, but its result is not used"
            elif is_thin_wrapper(found, entry_point, function):
                state = f"called, but {entry_point} does nothing else"
            else:
                state = "called"
            levels.append(Level(f"Helper {function}", state, state == "called"))
        return levels
