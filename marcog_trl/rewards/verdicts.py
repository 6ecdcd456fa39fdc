"""What the shipped reward functions share: from solutions to verdicts in one call of the executor, and means to the log."""

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
    The text of a completion.

    Args:
        completion (`str` or `list[dict[str, str]]`): Plain text, or messages of which the last one counts.

    Returns:
        `str`: The text.
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def problems_of(
    prompts: Sequence[Prompt], columns: Mapping[str, Any], needed: Sequence[str] = ("test", "test_format")
) -> list[dict[str, Any]]:
    """
    The dataset rows behind a call of a reward function.

    Args:
        prompts (`list[str | list[dict[str, str]]]` of length E): The problems' prompts.
        columns (`Mapping[str, list]`): The other keyword arguments of the call. Those that are lists of length E are columns.
        needed (`Sequence[str]`, *optional*, defaults to `("test", "test_format")`): Columns that there must be.

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
            f"the dataset has no column {missing[0]!r}, which this reward needs, but {['prompt', *lists]}; the rows of "
            "marcog_trl.problems.load_problems work"
        )
    return [
        {"prompt": prompt, **{name: values[i] for name, values in lists.items()}} for i, prompt in enumerate(prompts)
    ]


def judge(
    problems: Sequence[Mapping[str, Any]],
    solutions: Sequence[str | None],
    known: Sequence[Sequence[tuple[Job, Verdict]]] | None = None,
    executor: CodeExecutor | None = None,
) -> list[Verdict | None]:
    """
    The verdicts of all tests on solutions. What the workflow has executed in this turn is taken from its verdicts; equal
    jobs are executed once; everything else goes to the executor in one call.

    Args:
        problems (`list[Mapping]` of length E): Dataset rows.
        solutions (`list[str | None]` of length E): Solutions; `None` where nothing is to be executed.
        known (`list[list[tuple[Job, Verdict]]]`, *optional*): What has been executed already.
        executor (`CodeExecutor`, *optional*): Defaults to the process-wide one.

    Returns:
        `list[Verdict | None]` of length E.
    """
    jobs = [
        None if solution is None else solution_job(problem, solution)
        for problem, solution in zip(problems, solutions, strict=True)
    ]
    pairs = [pair for of_episode in known or () for pair in of_episode]
    pairs.sort(
        key=lambda pair: pair[1].status != "infrastructure"
    )  # where a job was executed twice, the last one counts
    verdicts = dict(pairs)
    missing = list(dict.fromkeys(job for job in jobs if job is not None and job not in verdicts))
    if missing:
        executor = shared_executor() if executor is None else executor
        verdicts |= zip(missing, executor.run(missing), strict=True)
    return [None if job is None else verdicts[job] for job in jobs]


def reward_or_failure(verdict: Verdict, reward: float) -> float:
    """The reward, unless the executor failed to give the verdict that it was computed from."""
    return InfrastructureFailure(verdict.message) if verdict.status == "infrastructure" else reward


def test_components(results: Sequence[Verdict | None]) -> dict[str, list[float | None]]:
    """
    What verdicts say, for the log.

    Args:
        results (`list[Verdict | None]` of length E): Verdicts; `None` where nothing was executed.

    Returns:
        `dict[str, list[float | None]]`: Component → values of length E; `None` where there is no verdict, or the executor
        failed to give one.
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
    Log the mean of each component as `name/component`, and, from the second turn on, as `name/turn_2/component` and so on.

    Args:
        log_metric (`Callable`, *optional*): TRL's `log_metric`; nothing is logged without.
        name (`str`): Name of the reward function.
        components (`Mapping[str, list[float | None]]`): Values per episode; `None` is left out of the mean, and nothing is
            logged without a value.
        turns (`list[int]`, *optional*): Turn of the episodes, counted from 0; the same for all, or absent.
    """
    turn = turns[0] if turns else 0
    prefix = f"{name}/turn_{turn + 1}" if turn else name
    for component, values in components.items():
        if log_metric is not None and any(value is not None for value in values):
            log_metric(f"{prefix}/{component}", EpisodeMean(values))
