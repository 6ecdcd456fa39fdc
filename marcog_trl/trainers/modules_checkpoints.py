"""Checkpoints of a team that has modules of its own beside the adapter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import safetensors.torch
import torch

from marcog_trl.team.description import MODULES_FILE
from marcog_trl.team.modules import ATTRIBUTE
from marcog_trl.trainers.checkpointing import Checkpointing


class ModulesCheckpoints(Checkpointing):
    """The part of a team's trainer that saves and loads the team's own modules, where it has some."""

    def _other_modules(self) -> dict[str, torch.Tensor]:
        """Weights of modules that the trainer does not hold or change, to be saved with the others."""
        return {}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        marker, gathered = f"{ATTRIBUTE}.", dict(state_dict or {})  # by DeepSpeed: names start at the wrapped model
        super()._save(output_dir, state_dict=state_dict)
        if not self.args.should_save or self.team.modules is None:
            return
        if state_dict is None:
            modules = self.team.modules.state_dict()
        else:
            modules = {key.partition(marker)[2]: tensor for key, tensor in gathered.items() if marker in key}
        modules |= self._other_modules()
        if modules:
            path = self._folder(output_dir) / MODULES_FILE
            modules = {key: tensor.detach().cpu().contiguous() for key, tensor in modules.items()}
            safetensors.torch.save_file(modules, f"{path}.partial", metadata={"format": "pt"})
            os.replace(f"{path}.partial", path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_modules(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_deepspeed_enabled:  # which has restored all trainable parameters
            self._load_modules(cast(str, self.state.best_model_checkpoint))

    def _load_modules(self, checkpoint: str) -> None:
        modules = self.team.modules
        if modules is not None and any(True for _ in modules.parameters()):
            weights = safetensors.torch.load_file(Path(checkpoint) / MODULES_FILE)
            own, others = modules.state_dict(), self._other_modules()
            modules.load_state_dict({name: x for name, x in weights.items() if name in own or name not in others})
