"""Reward for a tester and a fixer who correct code that has a bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.problems.bugs import assert_job
from marcog_trl.rewards.requirements import needs_entry_point, needs_tester, needs_tests
from marcog_trl.rewards.values import InfrastructureFailure
from marcog_trl.rewards.verdicts import (
    Completion,
    log_means,
    problems_of,
    reward_or_failure,
    run_jobs,
    test_components,
    text_of,
)


@needs_tester
@needs_entry_point
@needs_tests
def bugfix_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[dict[str, float] | float]:
    """
    Reward of the `bugfix` workflow, by agent, in [0, 1]:

    * fixer, and all other agents: R, the fraction of the tests that the solution passes;
    * tester: ½ R + ½ · D. D is 1 if its assert discriminates: it fails on `buggy_solution` and passes on
      `canonical_solution`. Otherwise D is 0, also if an assert times out.

    In trainers of a single agent, which corrects the code alone, the reward is R.

    Logs `bugfix_reward/…`: `usable_assert` (share of the testers that wrote an assert which could be run), `fails_on_bug`,
    `passes_on_reference`, `discriminates` (shares of the testers), `tests_passed`, `tests_total`, `pass_rate`, `solved`,
    `timeouts`.

    Args:
        prompts, completions, verdicts, turn, executor, log_metric, **columns: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply, with one of `"tester"`. Trainers of a single
            agent pass none.

    Returns:
        `list[dict[str, float]]` of length E: Agent → reward; [`InfrastructureFailure`] if the executor failed. `list[float]` in
        trainers of a single agent.

    Raises:
        ValueError: If the dataset has no tests, or, with `replies`, no entry points, buggy or reference solutions.
    """
    asserts = replies is not None
    columns_read = (
        "test",
        "test_format",
        *(("entry_point", "buggy_solution", "canonical_solution") if asserts else ()),
    )
    problems = problems_of(prompts, columns, columns_read)
    solved = [solution_job(p, text_of(completion)) for p, completion in zip(problems, completions, strict=True)]
    tested: list[list[Job | None]] = [
        [assert_job(p, p[column], texts["tester"]) for p, texts in zip(problems, replies or (), strict=asserts)]
        for column in ("buggy_solution", "canonical_solution")
    ]
    found = run_jobs([*solved, *tested[0], *tested[1]], verdicts, executor)  # of all episodes in one call
    results, found = found[: len(problems)], found[len(problems) :]
    components = test_components(results)
    rewards: list[Any] = [
        reward_or_failure(verdict, verdict.passed / verdict.total) for verdict in results if verdict is not None
    ]
    if replies is not None:
        fails = [_has(verdict, "failed") for verdict in found[: len(problems)]]
        passes = [_has(verdict, "passed") for verdict in found[len(problems) :]]
        discriminates = [None if a is None or b is None else a * b for a, b in zip(fails, passes, strict=True)]
        rewards = [_of_team(*each) for each in zip(rewards, discriminates, replies, strict=True)]
        components |= {
            "usable_assert": [float(job is not None) for job in tested[0]],
            "fails_on_bug": fails,
            "passes_on_reference": passes,
            "discriminates": discriminates,
        }
    log_means(log_metric, "bugfix_reward", components, turn)
    return rewards


def _has(verdict: Verdict | None, status: str) -> float | None:
    """Whether an assert has this status, if it was run; `None` if the executor failed."""
    if verdict is None or verdict.status != "infrastructure":
        return float(verdict is not None and verdict.status == status)
    return None


def _of_team(rate: float, discriminates: float | None, replies: Mapping[str, str]) -> dict[str, float] | float:
    """Rewards of the agents. If the executor failed, an [`InfrastructureFailure`]."""
    if isinstance(rate, InfrastructureFailure):
        return rate
    if discriminates is None:
        return InfrastructureFailure("the assert could not be run")
    return dict.fromkeys(replies, rate) | {"tester": (rate + discriminates) / 2}
