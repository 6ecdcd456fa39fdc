"""A trained team at work: problems in, code out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from datasets import Dataset, IterableDataset

from marcog_trl.agents import Workflow
from marcog_trl.execution import Verdict
from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.prompts import context_of
from marcog_trl.problems import solution_job
from marcog_trl.problems.schema import list_faults
from marcog_trl.team.data_checks import fault_in, needed_columns
from marcog_trl.trainers.saved import load_trainer


@dataclass(frozen=True)
class Answer:
    """
    What a team made of a problem.

    Args:
        code (`str`): The solution's code; empty if none could be read.
        messages (`list[dict]`): Every reply in order: `agent`, `turn` (from 1), `prompt` (text or chat messages) and `reply`.
        verdict (`Verdict`, *optional*): What the problem's tests say, where it has some.
    """

    code: str
    messages: list[dict[str, Any]] = field(repr=False)
    verdict: Verdict | None = None


class Team:
    """
    A saved team, ready to solve problems.

    Example:

    ```python
    >>> from marcog_trl import Team

    >>> team = Team.from_pretrained("outputs/quickstart")
    >>> problem = {"prompt": "def double(x):  # twice x", "entry_point": "double"}
    >>> print(team.solve(problem).code)
    ```
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.trainer.model.eval()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        num_agents: int | None = None,
        roles: Mapping[str, str] | None = None,
        workflow: Workflow | None = None,
        base_model: str | None = None,
        quantization_config: Any = None,
        **settings: Any,
    ) -> Team:
        """
        Load a team.

        Args:
            path (`str`): Folder that a trainer's `save_model` wrote, a checkpoint, or a repository of the Hub.
            num_agents (`int`, *optional*): Size of the team, if not that which was trained.
            roles (`Mapping[str, str]`, *optional*): Role texts that replace those of the training, by agent name.
            workflow (`Workflow`, *optional*): The team's workflow, where it is not a built-in one.
            base_model (`str`, *optional*): Where the base model is, if not where it was.
            quantization_config (`BitsAndBytesConfig`, *optional*): How the base model is quantised.
            **settings: Other fields of the configuration, such as `max_completion_length`, `num_turns` or `isolation`.

        Returns:
            [`Team`].

        Raises:
            ValueError: If the folder is no saved team, or the team cannot have that size or those roles.
        """
        if num_agents is not None:
            settings["num_agents"] = num_agents
        if roles is not None:
            settings["roles"] = dict(roles)
        # A trainer wants problems to train on; a stream without any is what it can do without reading one
        nothing = IterableDataset.from_generator(_no_problems)
        settings = {"max_steps": 1, **settings}
        return cls(load_trainer(path, nothing, workflow, [_no_reward], base_model, quantization_config, **settings))

    @property
    def agents(self) -> list[str]:
        """Names of the agents."""
        return self.trainer.agents

    @overload
    def solve(self, problems: Mapping[str, Any] | str, greedy: bool = ..., batch_size: int = ...) -> Answer: ...

    @overload
    def solve(
        self, problems: list[Mapping[str, Any] | str] | Dataset, greedy: bool = ..., batch_size: int = ...
    ) -> list[Answer]: ...

    def solve(self, problems, greedy=True, batch_size=128):
        """
        Let the team work on a problem, or on many at once.

        Args:
            problems (`Mapping`, `str`, or a list of them, or a `Dataset`): Problems: `prompt`, `entry_point` where the workflow asks for a
                function by name, `test` and `test_format` where it has tests; a `str` is a prompt.
            greedy (`bool`, *optional*, defaults to `True`): Whether agents write what is most likely, or sample.
            batch_size (`int`, *optional*, defaults to `128`): Problems that are worked on together.

        Returns:
            [`Answer`], or a list of them in the order of `problems`.

        Raises:
            TypeError: If `problems` are not problems.
            ValueError: If problems lack what the workflow needs, or have tests that cannot be run; all of them are named.
        """
        if isinstance(problems, Mapping | str):
            return self.solve([problems], greedy, batch_size)[0]
        if not isinstance(problems, Iterable):
            raise TypeError(f"problems={problems!r} is not a problem, nor a list of them. Pass a dict or a text.")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not positive; 128 works")
        rows = []
        for i, problem in enumerate(problems):
            if not isinstance(problem, Mapping | str):
                raise TypeError(f"problems[{i}]={problem!r:.80} is not a problem. Pass a dict or a text.")
            rows.append({"prompt": problem} if isinstance(problem, str) else dict(problem))
        workflow = self.trainer.workflow
        needed = needed_columns(workflow, ())
        tested = dict.fromkeys(("test", "test_format"), "a problem with tests")
        faults = [fault_in(row, workflow, tested | needed if row.get("test") else needed) for row in rows]
        list_faults(
            "problems",
            [(row.get("task_id"), i, fault) for i, (row, fault) in enumerate(zip(rows, faults, strict=True))],
        )
        answers: list[Answer] = []
        for start in range(0, len(rows), batch_size):
            answers += self._solve(rows[start : start + batch_size], greedy)
        return answers

    def _solve(self, rows: list[dict[str, Any]], greedy: bool) -> list[Answer]:
        with torch.no_grad(), self.trainer.greedy() if greedy else nullcontext():
            episodes = self.trainer.play_unscored(rows)
        jobs = {
            e: solution_job(episode.problem, episode.turns[-1].solution)
            for e, episode in enumerate(episodes)
            if episode.problem.get("test")
        }
        verdicts = dict(zip(jobs, self.trainer.executor.run(list(jobs.values())), strict=True)) if jobs else {}
        answers = []
        for e, episode in enumerate(episodes):
            solution = episode.turns[-1].solution
            found = extract_code(solution, episode.problem.get("entry_point"), context_of(episode.problem))
            messages = [
                {"agent": row.slot.agent, "turn": row.slot.turn + 1, "prompt": row.prompt, "reply": row.text}
                for row in episode.rows
            ]
            answers.append(Answer(found, messages, verdicts.get(e)))
        return answers

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        self.trainer.close_executor()


def _no_problems() -> Iterator[dict]:
    yield from ()


def _no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)
