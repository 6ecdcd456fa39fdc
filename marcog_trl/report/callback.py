"""Writes the report of a run while it trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from marcog_trl.files import write_whole
from marcog_trl.report.drawing import draw, to_png
from marcog_trl.report.figures import LATENTS, Plot, make_plots
from marcog_trl.report.page import make_page
from marcog_trl.report.pictures import PICTURES


logger = logging.getLogger(__name__)

REPORT_FILE, PICTURES_FOLDER = "report.html", "pictures"


class ReportCallback(TrainerCallback):
    """
    Writes `report.html` and `pictures/*.png` into the output folder, at every save and when training ends. At the end it
    also sends the pictures to wandb and TensorBoard if the run reports to them.

    The report is made from `trainer.state.log_history`, to which the callback adds the mean latents of the agents at every
    log. Checkpoints hold it, so the report of a resumed run shows the whole run. Only the main process writes. If a picture
    or the report cannot be written, the callback logs a warning and training goes on.

    Example:

    ```python
    >>> args = SHPPOConfig("team", write_report=True)  # or, with any trainer of this package,
    >>> trainer.add_callback(ReportCallback(trainer))
    ```

    Args:
        trainer ([`MultiAgentTrainer`]): The trainer whose run is reported.

    Raises:
        ValueError: If a folder or a file is where the report would be written.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.folder = Path(trainer.args.output_dir or "")
        self.results: Mapping[str, Any] = {}
        self.examples: Sequence[Mapping[str, Any]] = ()
        for path, wrong in (
            (self.folder / REPORT_FILE, Path.is_dir),
            (self.folder / PICTURES_FOLDER, Path.is_file),
            (self.folder, Path.is_file),
        ):
            if wrong(path):
                raise ValueError(
                    f"The report cannot be written to output_dir={str(self.folder)!r}: {str(path)!r} is in the way. Use "
                    "another output_dir, or set write_report=False."
                )

    def on_log(self, args, state, control, **kwargs):
        if self.trainer.agent_latents is not None:
            state.log_history[-1][LATENTS] = self.trainer.agent_latents

    def on_save(self, args, state, control, **kwargs):
        self.write()

    def on_train_end(self, args, state, control, **kwargs):
        self.write()
        if state.is_world_process_zero:
            try:
                self._show_in_trackers()
            except Exception as error:
                logger.warning("The pictures of the run were not sent to report_to=%s: %r", args.report_to, error)

    def write(
        self, results: Mapping[str, Any] | None = None, examples: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """
        Writes the report as of now. Does nothing on other processes than the main one.

        Args:
            results (`Mapping`, *optional*): `{"untrained": {...}, "trained": {...}}` of what [`evaluate_team`] returned.
                Later reports show them too.
            examples (`list[dict]`, *optional*): What [`~marcog_trl.report.results.examples`] returned. Likewise.
        """
        self.results = self.results if results is None else results
        self.examples = self.examples if examples is None else examples
        if not self.trainer.state.is_world_process_zero:
            return
        try:
            plots = make_plots(self.trainer.state.log_history, self.trainer.agents)
            images = {plot.title: _draw_png(plot) for shown in plots.values() for plot in shown}
            (self.folder / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
            for title, path in self._pictures().items():
                image = images.get(title)
                if image is not None:
                    write_whole(path, image)
                else:
                    path.unlink(missing_ok=True)  # of an earlier run in the same folder
            page = make_page(self.trainer, images, self.results, self.examples)
            write_whole(self.folder / REPORT_FILE, page.encode())
        except Exception as error:  # a run must not fail because of its report
            logger.warning("The report of the run was not written to %s: %r", self.folder, error)

    def _pictures(self) -> dict[str, Path]:
        panels = (panel for picture in PICTURES for panel in picture.panels)
        return {panel.title: self.folder / PICTURES_FOLDER / f"{panel.file}.png" for panel in panels}

    def _show_in_trackers(self) -> None:
        paths = [path for path in self._pictures().values() if path.is_file()]
        step = self.trainer.state.global_step
        if "wandb" in (self.trainer.args.report_to or ()):
            import wandb

            if wandb.run is not None:
                images = {f"report/{path.stem}": wandb.Image(str(path)) for path in paths}
                wandb.log({**images, "train/global_step": step})
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                from matplotlib.image import imread
                from torch.utils.tensorboard import SummaryWriter

                # The callback's own writer may be closed by now. A second one adds to the same run.
                with SummaryWriter(callback.logging_dir) as writer:
                    for path in paths:
                        writer.add_image(f"report/{path.stem}", imread(path), step, dataformats="HWC")


def _draw_png(plot: Plot) -> bytes | None:
    try:
        return to_png(draw([plot]))
    except Exception as error:
        logger.warning("The picture %r was not drawn: %r", plot.title, error)
        return None
