"""Reward for helpers and a main agent that solve a problem together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper
from marcog_trl.rewards.division import Division, read_division
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.verdicts import (
    Completion,
    log_means,
    problems_of,
    reward_or_failure,
    run_tests,
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
    """Facts about the syntax tree, as shares in [0, 1]; averages over the helpers if there are several."""

    helper_definition: float
    main_definition: float
    syntax: float
    calls_helper: float
    not_wrapper: float
    result_ignored: float


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
    Reward of the `collaboration` workflow, at most 4.0, from the syntax tree and the tests:

    * +0.4 if the helper's reply defines `aux` and it returns a value;
    * +0.6 if the main agent's reply defines the entry point and it returns a value; otherwise nothing more is added;
    * +0.5 if both replies and their combination have no syntax error; otherwise nothing more is added;
    * + fraction of the tests that the solution passes;
    * if at least one test passes and the helper wrote `aux`: +0.5 if the entry point calls `aux`; +1.0 if it also is not a
      thin wrapper around `aux`; −0.5 if it never uses the result of `aux`.

    These are CoMLRL's numbers, for comparison. The syntax tree cannot tell work from decoration: a main agent that solves the
    problem alone earns 2.5, but 4.0 with a call of a useless helper that is never reached or changes nothing (`if False: return
    aux(x)`, `data = aux(x) or None`), with its own function under the name `aux`, or with a helper that solves everything and
    one more line than `return aux(x)`. [`divided_work_reward`] executes programs to find out.

    If the main agent defines `aux` itself, it does not call the helper's. With several helpers, their parts are averaged.
    In trainers of a single agent, the completion holds both functions.

    Logs `collaboration_reward/…`: `helper_definition`, `main_definition`, `syntax`, `calls_helper`, `not_wrapper`,
    `result_ignored` (shares of the episodes, the last three also if no test passes), `tests_passed`, `tests_total`,
    `timeouts` (over the executed solutions), `pass_rate`, `solved` (over all solutions).

    Args:
        prompts, completions, verdicts, turn, executor, log_metric, **columns: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply, of `"main"` and one or
            more helpers. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests or entry points, or `replies` are not those of a main agent and helpers.

    Source: the code-generation experiments of CoMLRL (https://huggingface.co/papers/2508.04652), with checks on the syntax
    tree in place of regular expressions.
    """
    problems = problems_of(prompts, columns, needed=("test", "test_format", "entry_point"))
    given = zip(problems, completions, [None] * len(problems) if replies is None else replies, strict=True)
    divisions = [read_division("collaboration_reward", problem, text_of(text), team) for problem, text, team in given]
    structures = [_structure(division) for division in divisions]
    results = run_tests(problems, [d.solution if d.runs else None for d in divisions], verdicts, executor)
    rewards = [_reward(structure, verdict) for structure, verdict in zip(structures, results, strict=True)]

    components: dict[str, list[float | None]] = {
        field.name: [asdict(structure)[field.name] for structure in structures] for field in fields(_Structure)
    }
    tests = test_components(results)
    for name in ("pass_rate", "solved"):
        tests[name] = [v if division.runs else 0.0 for v, division in zip(tests[name], divisions, strict=True)]
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


def _structure(division: Division) -> _Structure:
    main, entry_point = division.main, division.entry_point

    def share(values: list[bool]) -> float:
        return sum(values) / len(division.helpers)

    called = [
        name
        for name in division.defined
        if calls(main, entry_point, name) and (division.by_one_agent or not defines(main, name))
    ]
    return _Structure(
        helper_definition=division.helper_definition,
        main_definition=float(division.main_definition),
        syntax=float(division.parses),
        calls_helper=len(called) / len(division.helpers),
        not_wrapper=share([not is_thin_wrapper(main, entry_point, name) for name in called]),
        result_ignored=share([ignores_result(main, entry_point, name) for name in called]),
    )
