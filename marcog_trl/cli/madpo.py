"""Trains a team with MADPO from a command line."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from trl import get_quantization_config

from marcog_trl.cli.endings import Kept
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.cli.rounds import RoundsRun, train_in_rounds
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.rounds import Phase, Round
from marcog_trl.processes import on_main, this_process
from marcog_trl.trainers.checkpointing import delete_checkpoints, last_whole_checkpoint


def train(recipe: TrainingRecipe, argv: Sequence[str] | None = None, kept: Kept | None = None) -> None:
    """Runs rounds of MADPO. See [`train_in_rounds`]."""
    train_in_rounds(recipe, argv, kept, madpo_phases)


def madpo_phases(run: RoundsRun) -> tuple[Phase, Mapping[str, Phase]]:
    """The phase that trains a team with MADPO."""
    args = run.args
    if args.reference == "round" and args.num_rounds > 1 and this_process().is_main_process:
        warnings.warn(
            f"reference='round' with num_rounds={args.num_rounds} holds the team back as little as one round with "
            f"beta={args.beta / args.num_rounds:.3g} would. Raise beta, or set reference='initial'.",
            stacklevel=2,
        )

    def train_round(this: Round, path: Path) -> None:
        trainer = MADPOTrainer(
            this.policy,
            this.initial if args.reference == "initial" else None,
            args=dataclasses.replace(args, output_dir=str(path), resume_from_checkpoint=None),
            train_dataset=this.pairs,
            quantization_config=get_quantization_config(run.model),
            trust_remote_code=run.trust_remote_code,
        )
        begun = on_main(lambda: last_whole_checkpoint(path) is not None)
        run.fit(trainer, resume_from_checkpoint=True if begun else None)
        trainer.save_model()
        delete_checkpoints(path)

    return train_round, {}
