"""Reward for a helper and a main agent that solve a problem together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from marcog_trl.agents import Prompt, numbered
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.parsing.extract import extract_code, syntax_error
from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper, returns_value
from marcog_trl.parsing.prompts import context_of
from marcog_trl.parsing.syntax import combine
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.verdicts import (
    Completion,
    judge,
    log_means,
    problems_of,
    reward_or_failure,
    test_components,
    text_of,
)


HELPER_DEFINED = 0.4
MAIN_DEFINED = 0.6
COMBINATION_PARSES = 0.5
CALLS_HELPER = 0.5
NOT_A_WRAPPER = 1.0
RESULT_IGNORED = -0.5


@dataclass(frozen=True)
class _Structure:
    """What the syntax tree says; shares in [0, 1], over the helpers where there are several."""

    helper_definition: float
    main_definition: float
    syntax: float
    calls_helper: float
    not_wrapper: float
    result_ignored: float

    @property
    def runs(self) -> bool:
        return bool(self.main_definition and self.syntax)


@needs_entry_point
@needs_tests
def collaboration_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    Reward of the `collaboration` workflow, at most 4.0, decided on the syntax tree and by the tests:

    * +0.4 if the helper's reply defines `aux` and it returns a value;
    * +0.6 if the main agent's reply defines the entry point and it returns a value; otherwise the reward ends here;
    * +0.5 if both replies and their combination are Python; otherwise the reward ends here;
    * + the fraction of the tests that the solution passes;
    * if at least one test passes and the helper wrote `aux`: +0.5 if the entry point calls `aux`; +1.0 more if it is not a
      thin wrapper around it; −0.5 if it uses no result of it.

    A main agent that defines `aux` itself does not call the helper's. Where there are several helpers, their parts are
    averaged. Of a single agent, the completion holds both functions.

    Logs `collaboration_reward/…`: `helper_definition`, `main_definition`, `syntax`, `calls_helper`, `not_wrapper`,
    `result_ignored` (shares of the episodes, the last three also where no test passes), `tests_passed`, `tests_total`,
    `timeouts` (over the solutions that were executed), `pass_rate`, `solved` (over all).

    Args:
        prompts (`list` of length E): The problems' prompts.
        completions (`list` of length E): Solutions, as plain text or as the assistant's messages.
        replies (`list[dict[str, str]]` of length E, *optional*): What each agent wrote: `"main"`, and one or more helpers.
        verdicts (`list[list[tuple[Job, Verdict]]]` of length E, *optional*): What the workflow has executed in this turn.
        turn (`list[int]` of length E, *optional*): Turn of the episodes, counted from 0.
        executor (`CodeExecutor`, *optional*): Runs the tests. Defaults to the process-wide one; its limits hold.
        log_metric (`Callable`, *optional*): TRL's hook for scalar metrics.
        **columns: The dataset's columns (see `marcog_trl.problems`), and whatever else the trainer passes.

    Returns:
        `list[float]` of length E: [`InfrastructureFailure`] where the executor failed, not the solution.

    Raises:
        ValueError: If the dataset has no tests or entry points, or if `replies` are not those of a main agent and its helpers.

    Source: the code-generation experiments of CoMLRL (https://huggingface.co/papers/2508.04652), with its checks moved from
    regular expressions to the syntax tree.
    """
    problems = problems_of(prompts, columns, needed=("test", "test_format", "entry_point"))
    solutions = []
    structures = []
    for i, problem in enumerate(problems):
        solution = text_of(completions[i])
        if replies is None or len(replies[i]) == 1:
            solution, structure = _single(problem, solution)
        else:
            structure = _team(problem, replies[i], solution)
        solutions.append(solution)
        structures.append(structure)
    wanted = [s if structure.runs else None for s, structure in zip(solutions, structures, strict=True)]
    results = judge(problems, wanted, verdicts, executor)
    rewards = [_reward(structure, verdict) for structure, verdict in zip(structures, results, strict=True)]

    components: dict[str, list[float | None]] = {
        field.name: [asdict(structure)[field.name] for structure in structures] for field in fields(_Structure)
    }
    tests = test_components(results)
    for name in ("pass_rate", "solved"):
        tests[name] = [v if structure.runs else 0.0 for v, structure in zip(tests[name], structures, strict=True)]
    log_means(log_metric, "collaboration_reward", components | tests, turn)
    return rewards


def _reward(structure: _Structure, verdict: Verdict | None) -> float:
    reward = HELPER_DEFINED * structure.helper_definition + MAIN_DEFINED * structure.main_definition
    if verdict is None:
        return reward
    reward += COMBINATION_PARSES + verdict.passed / verdict.total
    if verdict.passed:
        reward += CALLS_HELPER * structure.calls_helper
        reward += NOT_A_WRAPPER * structure.not_wrapper
        reward += RESULT_IGNORED * structure.result_ignored
    return reward_or_failure(verdict, reward)


def _team(problem: Mapping[str, Any], replies: Mapping[str, str], solution: str) -> _Structure:
    helpers = [name for name in replies if name != "main"]
    if "main" not in replies or not helpers:
        raise ValueError(
            f"replies of {list(replies)} are not those of a main agent and its helpers, which collaboration_reward scores; "
            "workflow='collaboration' works"
        )
    entry_point, context = problem["entry_point"], context_of(problem)
    main = extract_code(replies["main"], entry_point, context)
    names = [numbered("aux", i) for i in range(1, len(helpers) + 1)]
    written = {name: extract_code(replies[helper], name, context) for name, helper in zip(names, helpers, strict=True)}
    whole = syntax_error(replies["main"], entry_point, context) is None and all(
        syntax_error(replies[helper], name, context) is None for name, helper in zip(names, helpers, strict=True)
    )
    parses = whole and bool(extract_code(solution, entry_point, context))
    return _structure(entry_point, main, written, parses, own_helpers=False)


def _single(problem: Mapping[str, Any], completion: str) -> tuple[str, _Structure]:
    entry_point, context = problem["entry_point"], context_of(problem)
    main = extract_code(completion, entry_point, context)
    helper = main if defines(main, "aux") else extract_code(completion, "aux", context)
    whole = all(syntax_error(completion, name, context) is None for name in ("aux", entry_point))
    solution = main if helper == main else combine(helper, main)
    return solution, _structure(entry_point, main, {"aux": helper}, whole, own_helpers=True)


def _structure(
    entry_point: str, main: str, helpers: Mapping[str, str], parses: bool, *, own_helpers: bool
) -> _Structure:
    """`helpers`: what was written for each helper function; `own_helpers`: whether main's code may hold them."""

    def share(values: list[bool]) -> float:
        return sum(values) / len(helpers)

    defined = [name for name, text in helpers.items() if returns_value(text, name)]
    called = [name for name in defined if calls(main, entry_point, name) and (own_helpers or not defines(main, name))]
    return _Structure(
        helper_definition=len(defined) / len(helpers),
        main_definition=float(returns_value(main, entry_point)),
        syntax=float(parses),
        calls_helper=len(called) / len(helpers),
        not_wrapper=share([not is_thin_wrapper(main, entry_point, name) for name in called]),
        result_ignored=share([ignores_result(main, entry_point, name) for name in called]),
    )
