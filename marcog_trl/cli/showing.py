"""What commands and training recipes show while they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import datasets
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.utils.logging import disable_progress_bar

from marcog_trl.cli.endings import is_main
from marcog_trl.report.live import ConsoleCallback
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def hide_bars_of_libraries() -> None:
    """Hides the progress bars of loading models and data in files and logs, and on other processes than the main one."""
    if not (is_main() and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        disable_progress_bar()


def shown(trainer: Trainer, agents: Sequence[str], title: str, console: str) -> AbstractContextManager:
    """
    Shows the training of a trainer, within the context.

    Args:
        trainer (`Trainer`): The trainer. Its own progress bar is removed.
        agents (`list[str]`): Names of the agents.
        title (`str`): Title of the block.
        console (`str`): See [`TeamArguments`].
    """
    if console == "trl":
        return nullcontext()
    for callback in (ProgressCallback, PrinterCallback):  # which of them is there depends on disable_tqdm
        trainer.remove_callback(callback)
    shows = ConsoleCallback(agents, title, live=False if console == "lines" else None)
    trainer.add_callback(shows)
    if isinstance(trainer, MultiAgentTrainer):
        trainer.on_activity = shows.tell
    return shows
