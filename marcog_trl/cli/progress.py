"""Output of commands and training recipes while they run."""

from __future__ import annotations

import sys

import datasets
from transformers import Trainer
from transformers.utils.logging import disable_progress_bar

from marcog_trl.cli.console import is_main
from marcog_trl.report.console import ConsoleCallback


def hide_bars_of_libraries() -> None:
    """Hides the progress bars of loading models and data in files and logs, and on other processes than the main one."""
    if not (is_main() and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        disable_progress_bar()


def show(trainer: Trainer, console: str) -> None:
    """
    Shows the training of a trainer.

    Args:
        trainer (`Trainer`): The trainer. Its own progress bar is removed, unless it is asked for.
        console (`str`): See [`TeamArguments`].
    """
    if console != "trl":
        lines = ConsoleCallback()
        trainer.add_callback(lines)
        lines.attach(trainer)
