"""Writes all metrics of a run to a file, one line per log."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from marcog_trl.files import write_whole


logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """
    Writes every log of a run, evaluations included, as a line of `metrics.jsonl` in the output folder. A new run begins a
    new file. A resumed run keeps the lines up to its checkpoint. Only the main process writes. If the file cannot be written
    while training, the callback logs a warning, and training goes on.

    ```python
    >>> trainer.add_callback(MetricsFile("outputs/team"))
    >>> trainer.train()
    >>> metrics = pandas.read_json("outputs/team/metrics.jsonl", lines=True)
    ```

    Args:
        output_dir (`str` or `Path`): The folder.

    Raises:
        ValueError: If a folder is where the file would be written.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / METRICS_FILE
        if self.path.is_dir():
            raise ValueError(
                f"The metrics cannot be written to {str(self.path)!r}, which is a folder. Use another output_dir."
            )

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.path, "".join(map(_line, state.log_history)).encode())
            except OSError as error:
                self._warn(error)

    def on_log(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            try:
                with self.path.open("a") as file:
                    file.write(_line(state.log_history[-1]))
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        logger.warning("The metrics of the run were not written to %s: %s", self.path, error.strerror)


def _line(log: Mapping[str, Any]) -> str:
    """JSON has no NaN and no infinity: they become null."""
    numbers = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in log.items()
    }
    return json.dumps(numbers) + "\n"
