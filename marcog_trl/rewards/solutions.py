"""Shared by the shipped reward functions: runs the tests of solutions, and logs means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import Job, Verdict, shared_executor
from marcog_trl.problems import solution_job
from marcog_trl.problems.schema import fault_of
from marcog_trl.problems.tests import complete, tests_of
from marcog_trl.rewards.values import EpisodeMean, InfrastructureFailure


Completion = str | list[dict[str, Any]]
"""Plain text, or the assistant's messages, of which the last one is used. Their contents are text, or parts of text."""

Components = dict[str, list[float | None]]
"""Component → one value per episode. `None` does not count."""


class Solutions:
    """
    The solutions of one call of a reward function.

    Args:
        reward (`str`): Name of the function.
        prompts (`list[str | list[dict[str, str]]]` of length E): Prompts of the problems.
        completions (`list[Completion]` of length E): Solutions.
        given (`Mapping[str, Any]`): The function's other arguments, as [`execution_reward`] describes them: `verdicts`, `turn`,
            `executor`, `log_metric`; lists of length E are columns of the dataset.
        needed (`Sequence[str]`, *optional*, defaults to `("test",)`): Required columns.

    Attributes:
        problems (`list[dict]` of length E): Dataset rows. The format of their tests is guessed if it is missing.
        texts (`list[str]` of length E): Solutions, as text.

    Raises:
        ValueError: If a column is missing, or tests cannot be run.
    """

    def __init__(
        self,
        reward: str,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        given: Mapping[str, Any],
        needed: Sequence[str] = ("test",),
    ):
        others = ("verdicts", "turn", "executor", "log_metric")
        self._verdicts, self._turn, self._executor, self._log_metric = map(given.get, others)
        self._reward = reward
        columns = {
            name: values
            for name, values in given.items()
            if name not in others and isinstance(values, list) and len(values) == len(prompts)
        }
        missing = [name for name in needed if name not in columns]
        if missing and prompts:
            raise ValueError(
                f"The dataset has no column {missing[0]!r}, which {reward} needs. Its columns are {['prompt', *columns]}. Rename "
                "or add it, or use marcog_trl.load_problems."
            )
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
        self.problems = [
            complete({"prompt": prompt if isinstance(prompt, str) else with_texts(prompt), **row})
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        for i, problem in enumerate(self.problems):
            try:
                if problem.get("test"):
                    tests_of(problem)
            except ValueError as error:
                raise ValueError(f"{reward} cannot use row {i}: {error}. Correct or drop the row.") from None
        self.texts = [text if isinstance(text, str) else last_text(text) for text in completions]

    @property
    def jobs(self) -> list[Job]:
        """The jobs that run all tests on the solutions."""
        return [solution_job(problem, text) for problem, text in zip(self.problems, self.texts, strict=True)]

    def run(
        self, jobs: Sequence[Job | None], known: Sequence[Sequence[tuple[Job, Verdict]]] = ()
    ) -> list[Verdict | None]:
        """
        Run jobs with one call of the executor. Verdicts of jobs that the workflow has executed in this turn are reused, and those
        that are `known`; equal jobs are executed once.

        Returns:
            `list[Verdict | None]`: One verdict per job, in order; `None` where the job is `None`.

        Raises:
            ValueError: If the tests of a problem cannot be run.
        """
        for i, problem in enumerate(self.problems):
            fault = fault_of(problem, {"test": self._reward})
            if fault is not None:
                raise ValueError(f"{self._reward} cannot use row {i}: {fault}. Correct or drop the row.")
        pairs = [pair for of_episode in (*(self._verdicts or ()), *known) for pair in of_episode]
        pairs.sort(key=lambda pair: pair[1].status != "infrastructure")  # these first, to be replaced
        verdicts = dict(pairs)
        missing = list(dict.fromkeys(job for job in jobs if job is not None and job not in verdicts))
        if missing:
            executor = self._executor or shared_executor()
            verdicts |= zip(missing, executor.run(missing), strict=True)
        for problem, job in zip(self.problems, jobs, strict=False):
            if job is not None and verdicts[job].unusable:
                raise ValueError(
                    f"{self._reward} cannot run the tests of task_id {problem.get('task_id')!r}: {verdicts[job].message}. In "
                    "TRL's trainers, call marcog_trl.execution.shared_executor(packages=[...]) before training."
                )
        return [None if job is None else verdicts[job] for job in jobs]

    def test(self) -> list[Verdict]:
        """Run all tests on the solutions, in the way of [`run`]."""
        return [verdict for verdict in self.run(self.jobs) if verdict is not None]

    def log(self, components: Mapping[str, Sequence[float | None]]) -> None:
        """
        Log the mean of each component as `reward/component`, or as `reward/turn_2/component` in the second turn, and so on. A
        component without any value is not logged.
        """
        turn = self._turn[0] if self._turn else 0
        prefix = f"{self._reward}/turn_{turn + 1}" if turn else self._reward
        for component, values in components.items():
            if self._log_metric is not None and any(value is not None for value in values):
                self._log_metric(f"{prefix}/{component}", EpisodeMean(values))


def with_texts(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages whose contents are text: parts of text are joined, and other parts are left out."""
    return [{**message, "content": _text(message.get("content"))} for message in chat]


def last_text(chat: Sequence[Mapping[str, Any]]) -> str:
    """What an assistant says last in its messages; `""` if it only calls a tool."""
    last = chat[-1] if chat else {}
    return _text(last.get("content")) if last.get("role", "assistant") == "assistant" else ""


def _text(content: Any) -> str:
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def passed_share(verdict: Verdict | None) -> float:
    """Fraction of the tests that pass, 0 if nothing was executed; an [`InfrastructureFailure`] if the executor failed."""
    if verdict is None:
        return 0.0
    return or_failure(verdict, verdict.passed / verdict.total)


def or_failure(verdict: Verdict, reward: float) -> float:
    """The reward, or an [`InfrastructureFailure`] if the executor failed to give the verdict."""
    return InfrastructureFailure(verdict.message) if verdict.status == "infrastructure" else reward


def test_components(results: Sequence[Verdict | None]) -> Components:
    """Values to log about verdicts; `None` where nothing was executed or the executor failed."""

    def each(value: Callable[[Verdict], float]) -> list[float | None]:
        return [None if v is None or v.status == "infrastructure" else float(value(v)) for v in results]

    return {
        "tests_passed": each(lambda verdict: verdict.passed),
        "tests_total": each(lambda verdict: verdict.total),
        "pass_rate": each(lambda verdict: verdict.passed / verdict.total),
        "solved": each(lambda verdict: verdict.passed == verdict.total),
        "timeouts": each(lambda verdict: verdict.status == "timeout"),
    }
