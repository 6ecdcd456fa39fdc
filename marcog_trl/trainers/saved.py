"""Makes a trainer again from a saved team, to measure it or to go on from it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftConfig
from transformers import AutoTokenizer

from marcog_trl.agents import Workflow
from marcog_trl.trainers.multi_agent_grpo_trainer import MultiAgentGRPOTrainer
from marcog_trl.trainers.multi_agent_ppo_trainer import MultiAgentPPOTrainer
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.shppo_trainer import SHPPOTrainer
from marcog_trl.trainers.team_files import FORMAT_VERSION, TEAM_FILE, check_checkpoint


TRAINERS = {
    cls.__name__: cls for cls in (MultiAgentTrainer, MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer)
}


def load_trainer(
    path: str | Path, problems: Dataset, workflow: Workflow | None = None, **settings: Any
) -> MultiAgentTrainer:
    """
    A trainer that holds a saved team.

    Args:
        path (`str`): Folder that `save_model` wrote, or a checkpoint.
        problems (`Dataset`): Problems with tests.
        workflow (`Workflow`, *optional*): The team's workflow, where it is not a built-in one.
        **settings: Fields of the trainer's configuration that replace the saved ones.

    Returns:
        [`MultiAgentTrainer`]: With the team's adapter and modules; of the class that saved it.

    Raises:
        ValueError: If the folder is not a saved team of this format, or its team is not that of the workflow.
    """
    file = Path(path) / TEAM_FILE
    if not file.is_file():
        raise ValueError(f"{str(path)!r} has no {TEAM_FILE}; a folder written by a trainer's save_model works")
    team = json.loads(file.read_text())
    if team["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{str(file)!r} has format_version={team['format_version']}; {FORMAT_VERSION} works")
    trainer_class, saved = TRAINERS[team["trainer"]], team["settings"]
    args = trainer_class._config_class(
        output_dir=tempfile.mkdtemp(prefix="marcog-trl-"), report_to="none", **{**saved, **settings}
    )
    # Where each agent has an adapter of its own, the trainer stacks them itself
    separate = saved.get("parameter_sharing") == "separate"
    adapter = Path(path) / "agents" / team["agents"][0]["name"] if separate else path
    peft_config = PeftConfig.from_pretrained(str(adapter))
    peft_config.inference_mode = False  # as which PEFT saves it, and which would freeze it
    trainer = trainer_class(
        model=team["base_model"],
        reward_funcs=team["rewards"],
        args=args,
        train_dataset=problems,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        peft_config=peft_config,
        workflow=workflow,
    )
    check_checkpoint(trainer, str(path))
    trainer._load_from_checkpoint(str(path))
    return trainer
