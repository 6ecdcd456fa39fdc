"""Output on the console: a line per log, tables of results, and episodes to read."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from marcog_trl.report.results import LABELS, shown_interval
from marcog_trl.report.traces import episode_trace


MOST_EPISODES = 2  # that `log_completions` prints per log
SILENCE = 15.0  # seconds without a line after which one says what the trainer does
# Names of the metrics that a line shows, and their labels
_OF_TEAMS = {"reward": "reward", "episodes/solved": "solved"}
_OF_PREFERENCES = {  # of MADPO and of a reward model, which log no reward
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "accuracy": "accuracy", "margin": "margin"
}  # fmt: skip


class ConsoleCallback(TrainerCallback):
    """
    Prints a line per log (reward, share of solved problems, rewards of agents that differ, entropy, tokens per second, and time
    left), and after 15 seconds without one, what the trainer does: which agents write, judging, or learning. It takes the place of
    transformers' progress bar:

    ```python
    >>> trainer = MultiAgentGRPOTrainer(..., callbacks=[ConsoleCallback(), MetricsFile()])
    ```

    Only the main process prints.
    """

    def __init__(self) -> None:
        self._state: TrainerState | None = None  # on the main process, while it trains
        self._first_step = 0
        self._began = self._printed = time.monotonic()

    def attach(self, trainer: Trainer) -> None:
        """Takes the place of the trainer's progress bar. Trainers of teams do so with a `ConsoleCallback` that they are given."""
        for callback in (ProgressCallback, PrinterCallback):  # which of them is there depends on disable_tqdm
            trainer.remove_callback(callback)
        trainer.on_activity = self.tell  # type: ignore[attr-defined]

    def on_train_begin(self, args, state, control, **kwargs):
        self._state = state if state.is_world_process_zero else None
        self._first_step = state.global_step
        self._began = self._printed = time.monotonic()

    def on_train_end(self, args, state, control, **kwargs):
        self._state = None

    def on_log(self, args, state, control, logs, **kwargs):
        if not state.is_world_process_zero:
            return
        evaluation = next((name for name in logs if re.fullmatch("eval_(.+_)?runtime", name)), None)
        if "train_runtime" in logs:
            text = f"trained in {_duration(logs['train_runtime'])}"
        elif evaluation is not None:
            found = _summary(logs, evaluation.removesuffix("runtime"))
            text = f"held-out problems: {found}  in {_duration(logs[evaluation])}"
        else:
            text, done = _summary(logs), state.global_step - self._first_step
            if done and state.global_step < state.max_steps:
                left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
                text += f"  {_duration(left)} left"
        self._print(state.global_step, state.max_steps, text)

    def tell(self, activity: str) -> None:
        """
        Prints what the trainer does within a step, after 15 seconds without a line.

        Args:
            activity (`str`): Such as `"judging 16 episodes"`.
        """
        if self._state is not None and time.monotonic() - self._printed >= SILENCE:
            self._print(self._state.global_step + 1, self._state.max_steps, activity)

    def _print(self, step: int, max_steps: int, text: str) -> None:
        print(f"step {step} of {max_steps}  {text}", flush=True)
        self._printed = time.monotonic()


def _summary(log: Mapping[str, Any], prefix: str = "") -> str:
    """The most important figures of a log, or of an evaluation whose metrics have this prefix."""
    metrics = _OF_TEAMS if f"{prefix}reward" in log else _OF_PREFERENCES
    values = [(label, log.get(prefix + name)) for name, label in metrics.items()]
    if not prefix:
        own = [(match[1], log[name]) for name in log if (match := re.fullmatch("agents/([^/]+)/reward", name))]
        values += own if len({value for _, value in own}) > 1 else []  # agents that share the reward earn the same
        values.append(("entropy", log.get("entropy")))
    texts = [f"{label} {value:.3f}" for label, value in values if value is not None]
    if log.get("tokens_per_second") is not None:
        texts.append(f"tokens/s {log['tokens_per_second']:,.0f}")
    return "  ".join(texts)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> None:
    """
    Prints a table of results.

    Args:
        columns (`Sequence[str]` of length C): Headings of the figures.
        rows (`Iterable[Sequence[str]]`): The label of a result and its C figures, such as [`change_rows`] returns.
        title (`str`): Title of the table.
    """
    table = Table("", title=title)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_evaluation(results: Mapping[str, float], title: str) -> None:
    """
    Prints the results of one evaluation.

    Args:
        results (`Mapping`): What [`evaluate_team`] returned.
        title (`str`): Title of the table.
    """
    rows = [
        (
            LABELS.get(name, name),
            str(value) if isinstance(value, int) else f"{value:.3f}",
            shown_interval(results, name),
        )
        for name, value in results.items()
        if not name.endswith("_interval")
    ]
    print_table(("mean", "95 %"), rows, title)


def print_episodes(rows: Sequence[Mapping[str, Any]]) -> None:
    """
    Prints episodes to read.

    Args:
        rows (`list[dict]`): Rows that [`~marcog_trl.report.episodes.episode_row`] made.
    """
    for i, row in enumerate(rows):
        number = f" ({i + 1} of {len(rows)})" if len(rows) > 1 else ""
        Console().print(episode_trace(row, f"an episode of step {row['step']}{number}"))
