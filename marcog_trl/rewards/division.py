"""Reads what helpers and a main agent wrote for one problem."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marcog_trl.agents import numbered
from marcog_trl.execution import Verdict
from marcog_trl.parsing.predicates import defines, reads_arguments, returns_value
from marcog_trl.parsing.replies import code_in, error_in
from marcog_trl.parsing.syntax import combine, find, parse
from marcog_trl.problems import solution_job
from marcog_trl.rewards.solutions import Components, Solutions, test_components


HELPER_DEFINED = 0.4
MAIN_DEFINED = 0.6


@dataclass(frozen=True)
class Division:
    """
    The parts of a solution.

    Attributes:
        entry_point (`str`): Function of the main agent.
        helpers (`dict[str, str]`): Function of a helper → code that was written for it.
        main (`str`): Code of the main agent.
        solution (`str`): The text to execute.
        parses (`bool`): Whether all replies and their combination have no syntax error.
        by_one_agent (`bool`): Whether one completion holds all of it.
    """

    entry_point: str
    helpers: dict[str, str]
    main: str
    solution: str
    parses: bool
    by_one_agent: bool

    @property
    def defined(self) -> list[str]:
        """The functions of helpers that were defined and return a value."""
        return [name for name, code in self.helpers.items() if returns_value(code, name)]

    @property
    def helper_definition(self) -> float:
        return len(self.defined) / len(self.helpers)

    @property
    def main_definition(self) -> bool:
        return returns_value(self.main, self.entry_point)

    @property
    def main_is_constant(self) -> bool:
        """Whether the entry point reads none of its arguments, as one that returns an example of the prompt."""
        return not reads_arguments(self.main, self.entry_point)

    @property
    def complete(self) -> bool:
        return self.main_definition and self.parses

    @property
    def definition_reward(self) -> float:
        return HELPER_DEFINED * self.helper_definition + MAIN_DEFINED * self.main_definition

    def around(self, name: str) -> tuple[str, str]:
        """The code up to the end of a helper's function, and the code that follows."""
        if not self.by_one_agent:
            names = list(self.helpers)
            end = names.index(name) + 1
            codes = [self.helpers[other] for other in names]
            return combine(*codes[:end]), combine(*codes[end:], self.main)
        tree = parse(self.solution)
        assert tree is not None  # it defines the helper
        function, lines = find(tree, name), self.solution.split("\n")
        cut = next(node.end_lineno for node in tree.body if any(part is function for part in ast.walk(node)))
        return "\n".join(lines[:cut]), "\n".join(lines[cut:])


def test_divisions(
    solutions: Solutions, reward: str, replies: Sequence[Mapping[str, str]] | None
) -> tuple[list[Division], list[Verdict | None], Components]:
    """
    Read what teams, or single agents, wrote, and run the tests on what is complete.

    Args:
        solutions ([`Solutions`]): The solutions.
        reward (`str`): Name of the reward, for errors.
        replies (`list[Mapping[str, str]]` of length E, *optional*): See [`read_division`].

    Returns:
        `tuple`: Per episode, the parts and the verdict, `None` if nothing was executed; and the components of the tests. Solutions
        that were not executed pass no test.
    """
    divisions = [
        read_division(reward, problem, solutions.texts[i], None if replies is None else replies[i])
        for i, problem in enumerate(solutions.problems)
    ]
    jobs = zip(divisions, solutions.problems, strict=True)
    results = solutions.run([solution_job(problem, own.solution) if own.complete else None for own, problem in jobs])
    components = test_components(results)
    for name in ("pass_rate", "solved"):
        shares = zip(components[name], results, strict=True)
        components[name] = [0.0 if result is None else value for value, result in shares]
    components["helper_definition"] = [division.helper_definition for division in divisions]
    components["main_definition"] = [float(division.main_definition) for division in divisions]
    components["syntax"] = [float(division.parses) for division in divisions]
    return divisions, results, components


def read_division(
    reward: str, problem: Mapping[str, Any], solution: str, replies: Mapping[str, str] | None
) -> Division:
    """
    Read the replies of a team, or the completion of a single agent.

    Args:
        reward (`str`): Name of the reward, for errors.
        problem (`Mapping`): One dataset row.
        solution (`str`): The team's solution, or the completion.
        replies (`Mapping[str, str]`, *optional*): Agent → reply, of `"main"` and helpers; of one agent or `None` if the
            completion holds all functions.

    Returns:
        [`Division`]: The parts.

    Raises:
        ValueError: If `replies` are not those of a main agent and helpers.
    """
    entry_point = problem["entry_point"]
    if replies is None or len(replies) == 1:
        main = code_in(problem, solution)
        helper = main if defines(main, "aux") else code_in(problem, solution, "aux")
        parses = all(error_in(problem, solution, name) is None for name in ("aux", entry_point))
        return Division(entry_point, {"aux": helper}, main, combine(*dict.fromkeys([helper, main])), parses, True)
    agents = [name for name in replies if name != "main"]
    if "main" not in replies or not agents:
        raise ValueError(
            f"{reward} needs replies of 'main' and at least one helper, but got those of {list(replies)}. Set "
            "workflow='collaboration'."
        )
    functions = {numbered("aux", i): agent for i, agent in enumerate(agents, start=1)}
    parses = error_in(problem, replies["main"]) is None and all(
        error_in(problem, replies[agent], name) is None for name, agent in functions.items()
    )
    helpers = {name: code_in(problem, replies[agent], name) for name, agent in functions.items()}
    main = code_in(problem, replies["main"])
    whole = combine(*helpers.values(), main)
    parses = parses and bool(whole) and parse(whole) is not None
    return Division(entry_point, helpers, main, solution, parses, False)
