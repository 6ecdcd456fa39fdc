"""Reward for a tester and a fixer who correct code that has a bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.parsing.asserts import examples_in
from marcog_trl.parsing.prompts import messages_of
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import combine
from marcog_trl.problems import solution_job
from marcog_trl.problems.bugs import assert_job
from marcog_trl.rewards.experiments import experiment
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


_FACTS = ("fails_on_bug", "passes_on_reference", "fails_on_others", "discriminates")


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
    * tester: ½ R + ½ · D. D is 1 if its assert discriminates: it fails on `buggy_solution`, passes on `canonical_solution`, and
      fails on two other wrong programs. These are right about the examples in the prompt only; otherwise they return another
      value of the same type. So an assert passes on them if it repeats an example, or says what the result is not. Otherwise
      D is 0, also if an assert times out.

    In trainers of a single agent, which corrects the code alone, the reward is R.

    Logs `bugfix_reward/…`: `usable_assert` (share of the testers that wrote an assert which could be run), `fails_on_bug`,
    `passes_on_reference`, `fails_on_others`, `discriminates` (shares of the testers), `tests_passed`, `tests_total`, `pass_rate`, `solved`,
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
    tested = [_assert_jobs(p, texts["tester"]) for p, texts in zip(problems, replies or (), strict=asserts)]
    found = run_jobs([*solved, *(job for jobs in tested for job in jobs)], verdicts, executor)  # of all episodes
    results, found = found[: len(problems)], found[len(problems) :]
    components = test_components(results)
    rewards: list[Any] = [
        reward_or_failure(verdict, verdict.passed / verdict.total) for verdict in results if verdict is not None
    ]
    if replies is not None:
        outcomes = [_outcome(found[i * len(jobs) : (i + 1) * len(jobs)]) for i, jobs in enumerate(tested)]
        rewards = [_of_team(*each) for each in zip(rewards, outcomes, replies, strict=True)]
        components["usable_assert"] = [float(jobs[0] is not None) for jobs in tested]
        components |= {name: [outcome[name] for outcome in outcomes] for name in _FACTS}
    log_means(log_metric, "bugfix_reward", components, turn)
    return rewards


def _assert_jobs(problem: Mapping[str, Any], reply: str) -> tuple[Job | None, ...]:
    """The jobs of an assert on the code with the bug, the reference solution, and two programs with other results."""
    reference, name = code_in(problem, problem["canonical_solution"]), problem["entry_point"]
    examples = examples_in("\n".join(str(message["content"]) for message in messages_of(problem["prompt"])), name)
    others = (combine(reference, experiment(kind, name, examples)) for kind in ("above", "below"))
    return tuple(assert_job(problem, code, reply) for code in (problem["buggy_solution"], reference, *others))


def _outcome(verdicts: Sequence[Verdict | None]) -> dict[str, float | None]:
    """What the verdicts say of an assert that was run on the programs of [`_assert_jobs`]; `None` if the executor failed."""
    known = [None if verdict is None else verdict.status for verdict in verdicts]
    if "infrastructure" in known:
        return dict.fromkeys(_FACTS)
    bug, reference, *others = known
    facts = (bug == "failed", reference == "passed", all(status == "failed" for status in others))
    return dict(zip(_FACTS, map(float, (*facts, all(facts))), strict=True))


def _of_team(
    rate: float, outcome: Mapping[str, float | None], replies: Mapping[str, str]
) -> dict[str, float] | InfrastructureFailure:
    """Rewards of the agents. If the executor failed, an [`InfrastructureFailure`]."""
    if isinstance(rate, InfrastructureFailure):
        return rate
    discriminates = outcome["discriminates"]
    if discriminates is None:
        return InfrastructureFailure("the assert could not be run")
    return dict.fromkeys(replies, rate) | {"tester": (rate + discriminates) / 2}
