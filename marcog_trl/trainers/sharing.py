"""Pushes the team of a trainer to the Hub, with every agent as an ordinary adapter."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo
from transformers.trainer_utils import HubStrategy

from marcog_trl.team.card import AGENTS_FOLDER, write_card
from marcog_trl.team.description import MODULES_FILE
from marcog_trl.team.export import delete_export, export_agents
from marcog_trl.team.hub import check_repo_id, clear_push_errors, drop_other_agents, push_team
from marcog_trl.trainers.checkpointing import Checkpointing


# Default number of problems over which to average the latents of agents with latent_scope="observation"
NUM_PROBLEMS = 64
NUM_PROBLEMS_OF_CHECKPOINT = 16
# Settings shown in the model card, in addition to those in `team.json`
_TRAINING_SETTINGS = (
    "num_generations", "generation_batch_size", "num_iterations", "learning_rate", "critic_learning_rate",
    "latent_learning_rate", "inference_learning_rate", "advantage", "loss_type", "beta", "gamma", "lam", "gamma_turn",
    "temperature", "max_completion_length", "seed",
)  # fmt: skip


class Sharing(Checkpointing):
    """The part of a team's trainer that exports and pushes. Call its methods on all processes."""

    def export_agents(self, path: str | Path, problems: Iterable[Mapping[str, Any]] | None = None) -> dict[str, dict]:
        """
        Writes one ordinary PEFT adapter per agent. See [`~marcog_trl.team.export.export_agents`].

        Args:
            path (`str` or `Path`): Folder to write.
            problems (`Dataset` or `list[dict]`, *optional*): Defaults to the first 64 training problems.
        """
        return export_agents(self.team, path, self._first_problems(NUM_PROBLEMS) if problems is None else problems)

    def _first_problems(self, number: int) -> Iterable[Mapping[str, Any]]:
        return itertools.islice(cast(Iterable, self.train_dataset), number)

    def _save_repository(
        self,
        problems: Iterable[Mapping[str, Any]] | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
    ) -> None:
        """Saves the team, its agents as ordinary adapters, and a model card to `output_dir`, ready for `push_team`."""
        self.save_model(_internal_call=True)
        if not self.team.description.full_finetuning:
            self.export_agents(self._folder(None) / AGENTS_FOLDER, problems)
        self.create_model_card(model_name or self._folder(None).absolute().name, dataset_name)

    def push_agents_to_hub(
        self,
        repo_id: str,
        problems: Iterable[Mapping[str, Any]] | None = None,
        dataset_name: str | None = None,
        **options: Any,
    ) -> CommitInfo | None:
        """
        Saves the team and its agents as ordinary adapters to `output_dir`, then pushes them to the Hub.

        Args:
            repo_id (`str`): Repository, such as `"user/team"`. Created if it does not exist.
            problems (`Dataset` or `list[dict]`, *optional*): See [`export_agents`].
            dataset_name (`str`, *optional*): Name of the problem set, for the model card.
            **options: `token`, `private`, `revision` and `commit_message`, see [`~marcog_trl.team.hub.push_team`].

        Returns:
            `CommitInfo`, *optional*: The commit. `None` on the processes that do not push.

        Raises:
            ValueError: If `repo_id` is not a valid name, or agents cannot be exported.
            PushError: If the push fails. The saved files remain, and `push_team` can push them again.
        """
        check_repo_id(repo_id)
        self._save_repository(problems, repo_id.rpartition("/")[2], dataset_name)
        return push_team(self._folder(None), repo_id, **options) if self.is_world_process_zero() else None

    def push_to_hub(self, *args, **kwargs):
        # Save first, so that nothing is lost if the push fails
        names = {name: kwargs[name] for name in ("model_name", "dataset_name") if name in kwargs}
        self._save_repository(**names)
        with clear_push_errors(self.args.hub_model_id, self._folder(None)):
            commit = super().push_to_hub(*args, **kwargs)
            if self.is_world_process_zero():
                token, revision = kwargs.get("token"), kwargs.get("revision")  # as the Trainer understands them
                drop_other_agents(
                    cast(str, self.hub_model_id),
                    self._folder(None),
                    token or self.args.hub_token,
                    revision or self.args.hub_revision,
                )
        return commit

    def init_hf_repo(self, *args, **kwargs) -> None:
        with clear_push_errors(self.args.hub_model_id, self._folder(None)):
            super().init_hf_repo(*args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            description = self.team.description.to_dict()
            write_card(self._folder(None), self.hub_model_id, description, self._training_settings())

    def _training_settings(self) -> dict[str, Any]:
        """Settings for the model card; none of a loaded team, whose training the trainer does not know."""
        if not self.state.global_step:
            return {}
        shown = {f"`{f.name}`": getattr(self.args, f.name) for f in fields(self.args) if f.name in _TRAINING_SETTINGS}
        return {"optimizer steps": self.state.global_step, **shown}

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._mark_complete(Path(checkpoint_folder))  # so that runs can resume from the pushed checkpoint
        if self._begin_checkpoint_push(Path(checkpoint_folder)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _begin_checkpoint_push(self, checkpoint: Path) -> bool:
        """
        Writes the team of a checkpoint, its agents as ordinary adapters and a model card to `output_dir`. The Trainer then
        pushes them together with the adapter of the checkpoint.

        Returns:
            `bool`: Whether to push, the same on all processes. If `False`, no file has changed, because the previous push may
            still read them.
        """
        busy = [False]
        if self.is_world_process_zero():
            busy = [self.push_in_progress is not None and not self.push_in_progress.is_done()]
        broadcast_object_list(busy)
        if self.args.hub_strategy == HubStrategy.END or (busy[0] and not self.args.hub_always_push):
            return False
        folder = self._folder(None)
        if self.is_world_process_zero():
            self._finish_current_push()
            # The Trainer copies the other files
            self.team.description.write(folder)
            if (checkpoint / MODULES_FILE).is_file():
                shutil.copy(checkpoint / MODULES_FILE, folder)
        self.accelerator.wait_for_everyone()
        try:
            if not self.team.description.full_finetuning:
                self.export_agents(folder / AGENTS_FOLDER, self._first_problems(NUM_PROBLEMS_OF_CHECKPOINT))
        except ValueError as error:
            # The run goes on. Remove the agents of an earlier step, which do not fit this adapter
            warnings.warn(f"Step {self.state.global_step} is pushed without {AGENTS_FOLDER}: {error}", stacklevel=2)
            if self.is_world_process_zero():
                delete_export(folder / AGENTS_FOLDER)
        if self.is_world_process_zero():
            write_card(folder, self.hub_model_id, self.team.description.to_dict())
        return True
