"""Reward for helpers and a main agent that solve a problem together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import Verdict
from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper
from marcog_trl.rewards.division import Division, test_divisions
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.solutions import Completion, Solutions, or_failure


COMBINATION_PARSES = 0.5
CALLS_HELPER = 0.5
NOT_A_WRAPPER = 1.0
RESULT_IGNORED = -0.5


@needs_entry_point
@needs_tests
def collaboration_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    **given: Any,
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
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply, of `"main"` and one or
            more helpers. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests or entry points, or `replies` are not those of a main agent and helpers.

    Source: the code-generation experiments of CoMLRL (https://huggingface.co/papers/2508.04652), with checks on the syntax
    tree in place of regular expressions.
    """
    solutions = Solutions("collaboration_reward", prompts, completions, given, ("test", "entry_point"))
    divisions, results, tests = test_divisions(solutions, "collaboration_reward", replies)
    structures = [_structure(division) for division in divisions]
    names = structures[0] if structures else ()
    solutions.log({**{name: [structure[name] for structure in structures] for name in names}, **tests})
    return [_reward(*each) for each in zip(divisions, structures, results, strict=True)]


def _reward(division: Division, structure: Mapping[str, float], verdict: Verdict | None) -> float:
    if verdict is None:
        return division.definition_reward
    reward = division.definition_reward + COMBINATION_PARSES + verdict.passed / verdict.total
    if verdict.passed:
        reward += CALLS_HELPER * structure["calls_helper"]
        reward += NOT_A_WRAPPER * structure["not_wrapper"]
        reward += RESULT_IGNORED * structure["result_ignored"]
    return or_failure(verdict, reward)


def _structure(division: Division) -> dict[str, float]:
    """Facts about the syntax tree, as shares in [0, 1]; averages over the helpers if there are several."""
    main, entry_point = division.main, division.entry_point
    called = [
        name
        for name in division.defined
        if calls(main, entry_point, name) and (division.by_one_agent or not defines(main, name))
    ]
    count = len(division.helpers)
    return {
        "calls_helper": len(called) / count,
        "not_wrapper": sum(not is_thin_wrapper(main, entry_point, name) for name in called) / count,
        "result_ignored": sum(ignores_result(main, entry_point, name) for name in called) / count,
    }
