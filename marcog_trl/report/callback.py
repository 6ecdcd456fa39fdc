"""Writes the report of a run while it trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from marcog_trl.files import write_whole
from marcog_trl.report.page import make_page


logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"


class ReportCallback(TrainerCallback):
    """
    Writes `report.html` into the output folder, at every save and when training ends. `write_report=True` adds it to a trainer.

    The report is made from `trainer.state.log_history`. Checkpoints hold it, so the report of a resumed run shows the whole
    run. Only the main process writes. If the report cannot be written, the callback logs a warning and training goes on.

    Args:
        algorithm (`str`): Name of the algorithm.
        team (`Mapping`): The content of `team.json`.
        warnings (`Mapping[str, str]`): The warnings of the run so far, see [`Diagnosis`].
    """

    def __init__(self, algorithm: str, team: Mapping[str, Any], warnings: Mapping[str, str]):
        self.algorithm = algorithm
        self.team = team
        self.warnings = warnings

    def on_save(self, args, state, control, **kwargs):
        self.write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self.write(args, state)

    def write(
        self,
        args: TrainingArguments,
        state: TrainerState,
        results: Mapping[str, Any] | None = None,
        examples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """
        Writes the report as of now. Does nothing on other processes than the main one.

        Args:
            args (`TrainingArguments`): The trainer's configuration.
            state (`TrainerState`): The trainer's state.
            results (`Mapping`, *optional*): `{"untrained": {...}, "trained": {...}}` of what [`evaluate_team`] returned.
            examples (`list[dict]`, *optional*): What [`~marcog_trl.report.results.examples`] returned.
        """
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir or "") / REPORT_FILE
        try:
            page = make_page(self.algorithm, self.team, args, state, list(self.warnings.values()), results, examples)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, page.encode())
        except Exception as error:  # a run must not fail because of its report
            logger.warning("The report of the run was not written to %s: %r", path, error)
