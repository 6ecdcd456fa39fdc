"""
The files of a saved team beside its PEFT adapter, or beside its model if all of its weights were trained.

`team.json` describes the team. `team_modules.safetensors` has the value head, the core decoder and the latent
networks, if the team has them, under the keys of [`TeamModule`]. If the workflow was loaded from a file, the file is there, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel

from marcog_trl.agents import Tools, Workflow, WorkflowFile
from marcog_trl.files import read_json, write_json, write_whole
from marcog_trl.team.base_models import fingerprint, same_weights
from marcog_trl.team.settings import MACHINE_SETTINGS, TeamSettings
from marcog_trl.workflows import is_own
from marcog_trl.workflows.from_file import file_of, in_folder, names_file


TEAM_FILE = "team.json"
MODULES_FILE = "team_modules.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT names them
MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")  # one of them, as transformers names them
TEAM_FORMAT = 4
# Settings that change what a saved team generates, and how it was trained
OF_TRAINING = {"full_finetuning", "critic", "critic_backprop", "optim"}
_SAVED_SETTINGS = {f.name for f in fields(TeamSettings)} - MACHINE_SETTINGS | OF_TRAINING
# A checkpoint can be resumed only if these agree
_IDENTITY = (
    "format_version", "trainer", "base_model", "full_finetuning", "agents", "workflow", "num_turns", "modules"
)  # fmt: skip
_FILES = {"source_file", "reward_files", "trusted"}  # what is known of the files beside a `team.json`
USE_SAVED_TEAM = "Use a folder that a trainer's save_model wrote."


@dataclass
class TeamDescription:
    """
    The content of `team.json`.

    Args:
        trainer (`str`): Class of the trainer that trained the team.
        base_model (`str`): Name or path of the base model.
        agents (`list[dict]`): `name` and `role` of every agent, and the names of its `tools` if it has some.
        workflow (`str`): Class of the workflow.
        num_turns (`int`): Maximum number of turns of an episode.
        modules (`dict`): Settings that determine the shapes of the team's modules, such as the size of the latent.
        rewards (`list[str]`): Names of the reward functions, such as `"execution_reward"` or `"my_reward.py:shortest"`.
        settings (`dict`): Settings that change what the team generates.
        versions (`dict[str, str]`): Versions of the packages that wrote the file.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the base model's weights in training.
        quantization_config (`dict`, *optional*): How the base model was quantised in training.
        revision (`str`, *optional*): Branch, tag or commit of the base model on the Hub, if one was named.
        base_fingerprint (`dict[str, int]`, *optional*): What tells the base model from others of its name: see [`fingerprint`].
        note (`str`, *optional*): A note for readers of the file.
        trained_as (`list[dict]`, *optional*): The agents of the training, if they differ from `agents`.
        source_file ([`WorkflowFile`], *optional*): The file of the workflow, if it was loaded from one. It is written beside
            `team.json`, which has its name in `settings["workflow"]` and its SHA-256 in `workflow_sha256`.
        reward_files (`tuple[WorkflowFile, ...]`, *optional*): The files of reward functions, which are there, too.
        trusted (`bool`, *optional*, defaults to `True`): Whether these files may be run.
    """

    trainer: str
    base_model: str
    agents: list[dict[str, Any]]
    workflow: str
    num_turns: int
    modules: dict[str, Any]
    rewards: list[str]
    settings: dict[str, Any]
    versions: dict[str, str] = field(
        default_factory=lambda: {
            name: version(name) for name in ("marcog-trl", "trl", "transformers", "peft", "torch")
        }
    )
    dtype: str = "float32"
    quantization_config: dict[str, Any] | None = None
    revision: str | None = None
    base_fingerprint: dict[str, int] | None = None
    note: str | None = None
    trained_as: list[dict[str, Any]] | None = None
    source_file: WorkflowFile | None = field(default=None, repr=False)
    reward_files: tuple[WorkflowFile, ...] = field(default=(), repr=False)
    trusted: bool = field(default=True, repr=False, compare=False)
    format_version: int = TEAM_FORMAT

    def __post_init__(self) -> None:
        if "workflow" in self.settings:  # its file is in the same folder, as are those of the rewards
            self.settings = {**self.settings, "workflow": in_folder(str(self.settings["workflow"]), Path())}
        self.rewards = [Path(name).name if names_file(name) else name for name in self.rewards]

    @classmethod
    def of(
        cls,
        trainer: str,
        model: Any,
        workflow: Workflow,
        rewards: Sequence[str],
        settings: Any,
        modules: dict[str, Any],
        note: str | None = None,
    ) -> TeamDescription:
        """
        Describes a team. `rewards` has names, which may be of files, and `settings` is the trainer's configuration, or a
        [`TeamSettings`].
        """
        quantised = getattr(model.config, "quantization_config", None)
        described = cls(
            trainer=trainer,
            base_model=model.config.name_or_path,
            agents=agents_of(workflow),
            workflow=type(workflow).__name__,
            num_turns=workflow.num_turns,
            modules=modules,
            rewards=list(rewards),
            settings=saved_settings(settings),
            dtype=dtype_of(model),
            quantization_config=None if quantised is None else quantised.to_dict(),
            revision=model.peft_config["default"].revision if isinstance(model, PeftModel) else None,
            base_fingerprint=fingerprint(model) if isinstance(model, PeftModel) else None,
            note=note,
            source_file=workflow.source_file if is_own(settings.workflow) else None,
            reward_files=tuple(WorkflowFile.read(Path(file_of(name))) for name in rewards if names_file(name)),
        )
        for other in described.reward_files:
            for file in filter(None, (described.source_file, *described.reward_files)):
                if file.path.name == other.path.name and file.content != other.content:
                    raise ValueError(
                        f"The files {str(file.path)!r} and {str(other.path)!r} are saved with the team under one name. Rename one "
                        "of them."
                    )
        return described

    @classmethod
    def read(cls, path: Path) -> TeamDescription:
        """
        Reads a `team.json`.

        Raises:
            ValueError: If the file is not valid, or has another format version.
        """
        needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        content = read_json(path, "format_version", *sorted(needed))
        if content["format_version"] != TEAM_FORMAT:
            raise ValueError(
                f"{str(path)!r} has format_version={content['format_version']}, but this version reads {TEAM_FORMAT}. Train the team "
                "again, or install the version that saved it."
            )
        known = {f.name for f in fields(cls)} - _FILES
        description = cls(**{key: value for key, value in content.items() if key in known})
        if description.workflow_file and (path.parent / description.workflow_file).is_file():
            description.source_file = WorkflowFile.read(path.parent / description.workflow_file)
        description.reward_files = tuple(
            WorkflowFile.read(file)
            for file in (path.parent / file_of(reward) for reward in description.rewards if names_file(reward))
            if file.is_file()
        )
        return description

    def write(self, folder: Path) -> None:
        """Writes `team.json` and the files of the workflow and of the rewards into a folder."""
        write_json(folder / TEAM_FILE, self.to_dict())
        for source in (self.source_file, *self.reward_files):
            if source is not None and source.path.resolve() != (folder / source.path.name).resolve():
                write_whole(folder / source.path.name, source.content)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `team.json`, without fields that are `None`."""
        content = {"format_version": self.format_version, **asdict(self)}
        content["workflow_sha256"] = self.workflow_sha256
        return {key: value for key, value in content.items() if value is not None and key not in _FILES}

    @property
    def workflow_file(self) -> str:
        """Name of the file that the workflow was loaded from; empty if it has none."""
        return file_of(self.settings.get("workflow", ""))

    @property
    def workflow_sha256(self) -> str | None:
        """SHA-256 of the file that the workflow was loaded from; `None` if it has none."""
        return None if self.source_file is None else hashlib.sha256(self.source_file.content).hexdigest()

    @property
    def full_finetuning(self) -> bool:
        """Whether all weights of the model were trained. They are in the team's folder, in place of an adapter."""
        return self.settings.get("full_finetuning", False)

    @property
    def names(self) -> list[str]:
        """Names of the agents."""
        return [agent["name"] for agent in self.agents]

    def difference(self, other: TeamDescription, but: tuple[str, ...] = ()) -> tuple[str, Any, Any] | None:
        """
        Compares this team with another one.

        Args:
            other ([`TeamDescription`]): The other team.
            but (`tuple[str, ...]`, *optional*): Keys that may differ.

        Returns:
            `tuple`, *optional*: The first key that differs, its value in this team, and in the other one. `None` if the teams
            agree.
        """
        if self.base_fingerprint and other.base_fingerprint:
            if same_weights(self.base_fingerprint, other.base_fingerprint):
                but += ("base_model",)  # a folder has many names
            elif self.base_model == other.base_model and "base_model" not in but:
                return "base_fingerprint", self.base_fingerprint, other.base_fingerprint
        for key in _IDENTITY:
            here, there = getattr(self, key), getattr(other, key)
            if key not in but and here != there:
                return key, here, there
        return None


def dtype_of(model: Any) -> str:
    """Returns the type of a model's weights, such as `"bfloat16"`."""
    return str(model.dtype).removeprefix("torch.")


def saved_settings(settings: Any) -> dict[str, Any]:
    """Returns the part of a [`TeamSettings`] or of a trainer's configuration that `team.json` has."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if f.name in _SAVED_SETTINGS}


def agents_of(workflow: Workflow) -> list[dict[str, Any]]:
    """Returns the names, role texts and, if there are some, tools of a workflow's agents, in the format of `team.json`."""
    return [
        {"name": agent.name, "role": agent.role} | ({"tools": names} if (names := _names(agent.tools)) else {})
        for agent in workflow.agents
    ]


def _names(tools: Tools) -> list[str]:
    return [tool.__name__ for tool in tools]
