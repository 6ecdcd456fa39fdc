"""
What sets a training recipe apart.

This module imports no library: they take seconds, in which Ctrl-C already ends with one line.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from marcog_trl.cli.console import begin, interrupts, warnings_once
from marcog_trl.cli.other_projects import RECIPES


TEAM: Mapping[str, Any] = MappingProxyType({"workflow": "collaboration"})


@dataclass(frozen=True)
class TrainingRecipe:
    """
    A training script's trainer and settings.

    Args:
        trainer (`str`): Name of the trainer, such as `"SHPPOTrainer"`. Its configuration is `"SHPPOConfig"`, unless
            `config_name` is given.
        default_config (`str` or `Path`, *optional*): YAML file that applies where the command line names neither a file nor a
            model.
        sections (`tuple[str, ...]`, *optional*): Sections of algorithms that the recipe reads (see `other_projects.RECIPES`).
            Defaults to all.
        defaults (`dict`, *optional*): Settings that apply where nothing else is given.
        fixed (`dict`, *optional*): Settings that define the recipe. They replace those of a file; on the command line, other
            values are refused.
        elsewhere (`str`, *optional*): The recipe that accepts other values of the fixed settings.
        module (`str`, *optional*, defaults to `"train"`): Module of `marcog_trl.cli` whose `train` runs the recipe.
        config_name (`str`, *optional*): Name of the configuration.
    """

    trainer: str
    default_config: str | Path | None
    sections: tuple[str, ...] = tuple(RECIPES)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: str = ""
    module: str = "train"
    config_name: str = ""

    @property
    def config(self) -> str:
        """Name of the trainer's configuration."""
        return self.config_name or self.trainer.removesuffix("Trainer") + "Config"

    def run(self, argv: Sequence[str] | None = None) -> None:
        """
        Trains a team with the settings of a command line, and ends the program with one line if something is wrong.

        Args:
            argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        """
        with warnings_once(), interrupts() as status:
            begin("Loading PyTorch and TRL")
            importlib.import_module(f"marcog_trl.cli.{self.module}").train(self, argv, status)
