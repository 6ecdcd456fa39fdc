"""Shared steps of the shipped reward functions: read the batch, run the tests, and log means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict, shared_executor
from marcog_trl.problems import solution_job
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure


Completion = str | list[dict[str, str]]
"""Plain text, or the assistant's messages."""


def text_of(completion: Completion) -> str:
    """
    Get the text of a completion.

    Args:
        completion (`str` or `list[dict[str, str]]`): Plain text, or messages, of which the last one is used.

    Returns:
        `str`: The text.
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def problems_of(
    prompts: Sequence[Prompt], columns: Mapping[str, Any], needed: Sequence[str] = ("test", "test_format")
) -> list[dict[str, Any]]:
    """
    Rebuild the dataset rows from the arguments of a reward function.

    Args:
        prompts (`list[str | list[dict[str, str]]]` of length E): Prompts of the problems.
        columns (`Mapping[str, list]`): The other keyword arguments. Those that are lists of length E are columns.
        needed (`Sequence[str]`, *optional*, defaults to `("test", "test_format")`): Required columns.

    Returns:
        `list[dict]` of length E: One row per episode.

    Raises:
        ValueError: If a column is missing.
    """
    lists = {
        name: values for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)
    }
    missing = [name for name in needed if name not in lists]
    if missing and prompts:
        raise ValueError(
            f"The dataset has no column {missing[0]!r}, which this reward needs. Its columns are {['prompt', *lists]}. Use "
            "marcog_trl.load_problems, for example."
        )
    return [
        {"prompt": prompt, **{name: values[i] for name, values in lists.items()}} for i, prompt in enumerate(prompts)
    ]


def run_tests(
    problems: Sequence[Mapping[str, Any]],
    solutions: Sequence[str | None],
    known: Sequence[Sequence[tuple[Job, Verdict]]] | None = None,
    executor: CodeExecutor | None = None,
) -> list[Verdict | None]:
    """
    Run all tests on solutions, with one call of the executor. Verdicts of jobs that the workflow has executed in this turn
    are reused, and equal jobs are executed once.

    Args:
        problems (`list[Mapping]` of length E): Dataset rows.
        solutions (`list[str | None]` of length E): Solutions; `None` to execute nothing.
        known (`list[list[tuple[Job, Verdict]]]`, *optional*): Jobs that were executed before, and their verdicts.
        executor (`CodeExecutor`, *optional*): Defaults to the shared executor.

    Returns:
        `list[Verdict | None]` of length E: `None` where the solution is `None`.
    """
    jobs = [
        None if solution is None else solution_job(problem, solution)
        for problem, solution in zip(problems, solutions, strict=True)
    ]
    return run_jobs(jobs, known, executor)


def run_jobs(
    jobs: Sequence[Job | None],
    known: Sequence[Sequence[tuple[Job, Verdict]]] | None = None,
    executor: CodeExecutor | None = None,
) -> list[Verdict | None]:
    """Run jobs in the way of [`run_tests`]: one verdict per job, in order, and `None` where the job is `None`."""
    pairs = [pair for of_episode in known or () for pair in of_episode]
    pairs.sort(key=lambda pair: pair[1].status != "infrastructure")  # infrastructure failures first, to be replaced
    verdicts = dict(pairs)
    missing = list(dict.fromkeys(job for job in jobs if job is not None and job not in verdicts))
    if missing:
        executor = shared_executor() if executor is None else executor
        verdicts |= zip(missing, executor.run(missing), strict=True)
    return [None if job is None else verdicts[job] for job in jobs]


def reward_or_failure(verdict: Verdict, reward: float) -> float:
    """The reward, or an [`InfrastructureFailure`] if the executor failed to give the verdict."""
    return InfrastructureFailure(verdict.message) if verdict.status == "infrastructure" else reward


def test_components(results: Sequence[Verdict | None]) -> dict[str, list[float | None]]:
    """
    Values to log about verdicts.

    Args:
        results (`list[Verdict | None]` of length E): Verdicts; `None` if nothing was executed.

    Returns:
        `dict[str, list[float | None]]`: Component → one value per episode; `None` if there is no verdict or the executor
        failed.
    """

    def each(value: Callable[[Verdict], float]) -> list[float | None]:
        return [None if v is None or v.status == "infrastructure" else float(value(v)) for v in results]

    return {
        "tests_passed": each(lambda verdict: verdict.passed),
        "tests_total": each(lambda verdict: verdict.total),
        "pass_rate": each(lambda verdict: verdict.passed / verdict.total),
        "solved": each(lambda verdict: verdict.passed == verdict.total),
        "timeouts": each(lambda verdict: verdict.status == "timeout"),
    }


def log_means(
    log_metric: Callable[[str, float], None] | None,
    name: str,
    components: Mapping[str, Sequence[float | None]],
    turns: Sequence[int] | None = None,
) -> None:
    """
    Log the mean of each component as `name/component`, or as `name/turn_2/component` in the second turn, and so on.

    Args:
        log_metric (`Callable`, *optional*): `log_metric` of TRL; without it, nothing is logged.
        name (`str`): Name of the reward function.
        components (`Mapping[str, list[float | None]]`): Component → one value per episode. `None` does not count, and a
            component without any value is not logged.
        turns (`list[int]`, *optional*): Turn of each episode, counted from 0; the same for all.
    """
    turn = turns[0] if turns else 0
    prefix = f"{name}/turn_{turn + 1}" if turn else name
    for component, values in components.items():
        if log_metric is not None and any(value is not None for value in values):
            log_metric(f"{prefix}/{component}", EpisodeMean(values))
