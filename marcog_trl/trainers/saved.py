"""Makes a trainer again from a saved team, to measure it or to go on from it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
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
    path: str | Path,
    problems: Dataset | IterableDataset,
    workflow: Workflow | None = None,
    reward_funcs: Any = None,
    base_model: str | None = None,
    **settings: Any,
) -> MultiAgentTrainer:
    """
    A trainer that holds a saved team, or one of another size or with other roles that shares its weights.

    Args:
        path (`str`): Folder that `save_model` wrote, a checkpoint, or a repository of the Hub.
        problems (`Dataset`): Problems with tests.
        workflow (`Workflow`, *optional*): The team's workflow, where it is not a built-in one.
        reward_funcs (`str`, `Callable` or `list`, *optional*): As in [`MultiAgentTrainer`]. By default those of the run,
            which must then be functions of this package.
        base_model (`str`, *optional*): Where the base model is, if not where it was.
        **settings: Fields of the trainer's configuration that replace the saved ones. With `num_agents` or `roles` the team
            may be another one than was trained.

    Returns:
        [`MultiAgentTrainer`]: With the team's adapter and modules; of the class that saved it.

    Raises:
        ValueError: If the folder is not a saved team of this format, lacks a file, its team is not that of the workflow, or
            agents with adapters of their own would have to be others.
    """
    path = find_team(path)
    team = json.loads((path / TEAM_FILE).read_text())
    if team["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{str(path / TEAM_FILE)!r} has format_version={team['format_version']}; {FORMAT_VERSION} works"
        )
    trainer_class, saved = TRAINERS[team["trainer"]], team["settings"]
    # Where each agent has an adapter of its own, the trainer stacks them itself
    separate = saved.get("parameter_sharing") == "separate"
    others = tuple(name for name in ("num_agents", "roles") if settings.get(name) is not None)
    if separate and "num_agents" in others:
        raise ValueError(
            f"num_agents={settings['num_agents']} differs from the adapters of {str(path)!r}, one for each of "
            f"{[agent['name'] for agent in team['agents']]}; a team that shares its adapter works"
        )
    adapter = path / "agents" / team["agents"][0]["name"] if separate else path
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{str(adapter)!r} has no adapter_config.json; a folder written by save_model works")
    args = trainer_class._config_class(
        output_dir=tempfile.mkdtemp(prefix="marcog-trl-"), report_to="none", **{**saved, **settings}
    )
    peft_config = PeftConfig.from_pretrained(str(adapter))
    if peft_config.base_model_name_or_path != team["base_model"]:
        raise ValueError(
            f"{str(adapter)!r} has an adapter of {peft_config.base_model_name_or_path!r}, but {TEAM_FILE} is of a team on "
            f"{team['base_model']!r}; the adapter that was saved with it works"
        )
    peft_config.inference_mode = False  # as which PEFT saves it, and which would freeze it
    trainer = trainer_class(
        model=base_model or team["base_model"],
        reward_funcs=team["rewards"] if reward_funcs is None else reward_funcs,
        args=args,
        train_dataset=problems,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        peft_config=peft_config,
        workflow=workflow,
    )
    but = (*(("agents",) if others else ()), *(("base_model",) if base_model else ()))
    check_checkpoint(trainer, str(path), but)
    trainer._load_from_checkpoint(str(path))
    return trainer


def find_team(path: str | Path) -> Path:
    """
    The folder of a saved team.

    Args:
        path (`str`): A folder, or a repository of the Hub, which is downloaded.

    Returns:
        `Path`: A folder with a `team.json`.

    Raises:
        ValueError: If there is none.
    """
    folder = Path(path)
    if not folder.is_dir() and len(folder.parts) == 2 and not folder.is_absolute():
        try:
            folder = Path(snapshot_download(str(path)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            cause = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{str(path)!r} is no folder, and no repository that can be read: {cause}; a folder written by save_model works"
            ) from error
    if not (folder / TEAM_FILE).is_file():
        raise ValueError(f"{str(path)!r} has no {TEAM_FILE}; a folder written by a trainer's save_model works")
    return folder
