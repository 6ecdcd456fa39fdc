"""Checkpoints of a team's trainer: complete ones only, from which runs resume exactly."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

from transformers import EarlyStoppingCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.base_trainer import _BaseTrainer

from marcog_trl.team.loading import find_team
from marcog_trl.trainers.checkpoints import (
    COMPLETE_FILE,
    check_disks,
    check_resumable,
    check_same_team,
    checkpoints_in,
    find_checkpoint,
    full_disk_explained,
    lost_process_explained,
    mark_complete,
    only_run_in,
)
from marcog_trl.trainers.layout import generation_cycle, warn_of_schedule


class Checkpointing(_BaseTrainer):
    """The part of a team's trainer that starts, resumes and saves runs."""

    args: Any
    team: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        with only_run_in(self._folder(None)), lost_process_explained(self.args):
            check_disks(self.args)
            checkpoint = find_checkpoint(self.args, resume_from_checkpoint)
            if checkpoint is not None:
                check_resumable(f"resume_from_checkpoint={checkpoint!r}", Path(checkpoint), self.team.description)
            elif (
                self.args.save_strategy != "no"
                and self.is_world_process_zero()
                and (earlier := checkpoints_in(self._folder(None)))
            ):
                warnings.warn(
                    f"output_dir={self.args.output_dir!r} has {earlier[-1].name} of an earlier run, and this run adds its own "
                    "checkpoints. Set another output_dir, or delete the earlier ones.",
                    stacklevel=2,
                )
            return super().train(checkpoint, *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args):
        begin = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        # If a run resumes at its end, no epoch is left; the Trainer would make one more step
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begin

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        each_node = self.args.save_on_each_node
        with full_disk_explained(self._folder(output_dir), self._folder(None)):
            # ZeRO-3 gathers the weights on the first process only
            self.args.save_on_each_node = each_node and not is_deepspeed_zero3_enabled()
            try:
                super().save_model(output_dir, _internal_call)
            finally:
                self.args.save_on_each_node = each_node
            if self.args.should_save:
                self._folder(output_dir).mkdir(parents=True, exist_ok=True)
                self.team.description.write(self._folder(output_dir))

    def _save_checkpoint(self, model, trial) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (checkpoint / COMPLETE_FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        # Delete older checkpoints below, once this one is complete; the Trainer does not wait for the other processes
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with full_disk_explained(checkpoint, checkpoint.parent):
                super()._save_checkpoint(model, trial)
                self._mark_complete(checkpoint)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(checkpoint.parent), limit, best_model_checkpoint=best, use_mtime=True)

    def _mark_complete(self, checkpoint: Path, rollout_begun: bool = False) -> None:
        """Lists the files of a checkpoint that all processes have written."""
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if self.is_deepspeed_enabled and not self.is_world_process_zero():
                # With save_on_each_node. DeepSpeed writes it on the first node only, and cannot load without it
                (checkpoint / "latest").write_text(f"global_step{self.model_wrapped.global_steps}")
            mark_complete(checkpoint, rollout_begun)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        states = cast(dict, self.state.stateful_callbacks)
        for callback in self.callback_handler.callbacks:
            saved = states.get(type(callback).__name__)
            # The Trainer does not restore callbacks by default, so early stopping would lose its patience counter
            if isinstance(callback, EarlyStoppingCallback) and isinstance(saved, dict):
                callback.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            # The Trainer expects every callback's state when it saves the next checkpoint
            if isinstance(callback, ExportableState) and saved is None:
                states[type(callback).__name__] = callback.state()

    def load_team(self, path: str | Path) -> None:
        """
        Loads the adapter and the modules of a saved team.

        Args:
            path (`str` or `Path`): Folder written by `save_model`, a checkpoint, or a repository on the Hub.

        Raises:
            ValueError: If `path` is not a saved team, or not the trainer's team.
        """
        folder = find_team(path)
        check_same_team(f"path={str(path)!r}", folder, self.team.description)
        self._load_from_checkpoint(str(folder))

    def _folder(self, output_dir: str | None) -> Path:
        folder = output_dir or self.args.output_dir
        assert folder is not None
        return Path(folder)


class RolloutCheckpoints(GRPOTrainer):
    """What a trainer that generates adds to [`Checkpointing`]: a run resumes only where a rollout is used up."""

    args: Any

    def train(self, *args, **kwargs):
        if self.is_world_process_zero():
            warn_of_schedule(self)
        return super().train(*args, **kwargs)

    def _mark_complete(self, checkpoint: Path, rollout_begun: bool = False) -> None:
        assert self.args.steps_per_generation is not None
        rollout_begun = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        if rollout_begun and self.accelerator.is_main_process:
            warnings.warn(
                f"A run cannot resume from {checkpoint}: it is written before all rows of the rollout are trained on. Set "
                f"save_steps and max_steps to multiples of {generation_cycle(self.args)}, the steps of a generation cycle.",
                stacklevel=2,
            )
        super()._mark_complete(checkpoint, rollout_begun)  # type: ignore[misc]  # of Checkpointing

    def _issue_warnings_after_load(self, load_result) -> None:
        """Refuses a checkpoint that lacks weights, of which the Trainer only warns."""
        model = self.accelerator.unwrap_model(self.model)
        elsewhere = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
        missing = [name for name in load_result.missing_keys if name not in elsewhere]
        if missing:
            raise ValueError(
                f"The checkpoint lacks {len(missing)} weights of the model, such as {missing[0]}. Use a checkpoint of the same "
                "model."
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # vLLM's weights are out of date, although no step was made
