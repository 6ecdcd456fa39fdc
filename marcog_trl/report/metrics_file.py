"""Writes all metrics of a run to a file, one line per log."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """
    Writes every log of a run, evaluations included, as a line of `metrics.jsonl` in the output folder. A new run begins a
    new file. A resumed run keeps the lines up to its checkpoint. Only the main process writes. If the file cannot be written,
    the callback logs a warning, and training goes on.

    ```python
    >>> trainer.add_callback(MetricsFile())
    >>> trainer.train()
    >>> metrics = pandas.read_json("outputs/team/metrics.jsonl", lines=True)
    ```

    """

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._write(args.output_dir, state.log_history, "w")

    def on_log(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._write(args.output_dir, state.log_history[-1:], "a")

    @staticmethod
    def _write(output_dir: str, logs: Sequence[Mapping[str, Any]], mode: str) -> None:
        path = Path(output_dir) / METRICS_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.writelines(map(_line, logs))
        except OSError as error:
            logger.warning("The metrics of the run were not written to %s: %s", path, error.strerror)


def _line(log: Mapping[str, Any]) -> str:
    """JSON has no NaN and no infinity: they become null."""
    numbers = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in log.items()
    }
    return json.dumps(numbers) + "\n"
