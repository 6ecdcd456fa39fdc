"""The arguments that recipes and commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from datasets import Dataset

from marcog_trl.checks import COUNT, Count, NaturalNumber, check_fields, documented
from marcog_trl.cli.other_projects import nearest_setting
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.files import read_text
from marcog_trl.problems import load_problems
from marcog_trl.problems.rows import check_file
from marcog_trl.team.base_models import check_model
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.team import Team


@documented
@dataclass
class TeamArguments:
    """
    Arguments of the recipes beside those of the trainer and of the model.

    Args:
        dataset_name (`str`, *optional*, defaults to `"builtin"`):
            Problem set: `"builtin"`, `"humaneval"`, a Hub id, or a path.
        dataset_train_split, dataset_test_split (`str`, *optional*, default to `"train"` and `"test"`):
            Splits, or slices of splits such as `"test[33:163]"`.
        dataset_columns (`list[str]`, *optional*):
            Columns of the data under other names, such as `prompt=question test=asserts`.
        reward (`list[str]`, *optional*, defaults to `["execution_reward"]`):
            Names of reward functions, functions in a file, such as `my_reward.py:shortest`, or folders of saved reward models.
        num_replies (`float`, *optional*):
            Replies to train on, such as `1e6`: those of every agent count. Sets `max_steps`, which counts
            optimizer steps.
        num_test_samples (`int`, *optional*, defaults to `4`):
            Sampled episodes per held-out problem in the evaluations before and after training; 0 skips them.
        num_eval_problems (`int`, *optional*):
            Number of held-out problems, from the first one, in each evaluation: before, during (`eval_strategy`, `eval_steps`) and
            after training. By default those before and after training play all, and those during training 24. During training,
            one episode of each is played.
        console (`str`, *optional*, defaults to `"lines"`):
            What is shown during training: `"lines"`, one short line per log, and after 15 seconds without one, what the trainer
            does; or `"trl"`, TRL's progress bar and dictionaries.
        save_final_model (`bool`, *optional*, defaults to `True`):
            Whether the trained team is saved at the end.
        allow_overlap (`bool`, *optional*, defaults to `False`):
            Whether training problems may be among the held-out ones.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Whether checkpoints of an earlier run in `output_dir` are deleted when training begins. Otherwise they are an
            error, unless the run continues from one.
    """

    dataset_name: str = "builtin"
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_columns: list[str] = field(default_factory=list)
    reward: list[str] = field(default_factory=lambda: ["execution_reward"])
    num_replies: Annotated[float, COUNT] | None = None
    num_test_samples: NaturalNumber = 4
    num_eval_problems: Count | None = None
    console: Literal["lines", "trl"] = "lines"
    save_final_model: bool = True
    allow_overlap: bool = False
    overwrite_output_dir: bool = False

    def __post_init__(self):
        check_fields(self)
        check_file(self.dataset_name)  # before an embedded model is built
        column_names(self.dataset_columns)

    def load_splits(self) -> tuple[Dataset, Dataset]:
        """
        Training and held-out problems.

        Raises:
            ValueError: If a problem is in both, unless `allow_overlap`.
        """
        train, test = self.load(self.dataset_train_split), self.load(self.dataset_test_split)
        seen = {repr((row["prompt"], row["test"])): row["task_id"] for row in train}
        shared = [seen[key] for row in test if (key := repr((row["prompt"], row["test"]))) in seen]
        if shared and not self.allow_overlap:
            raise ValueError(
                f"dataset_train_split={self.dataset_train_split!r} and dataset_test_split={self.dataset_test_split!r} of "
                f"{self.dataset_name!r} share {len(shared)} problems, such as {shared[0]!r}. Choose splits that do not "
                "overlap, such as 'test[33:]' and 'test[:32]', or set --allow_overlap true."
            )
        return train, test.select(range(min(self.num_eval_problems or len(test), len(test))))

    def eval_split(self, test: Dataset) -> Dataset:
        """The held-out problems of the evaluations during training."""
        return test.select(range(min(self.num_eval_problems or 24, len(test))))

    def load(self, split: str) -> Dataset:
        """The problems of a split, with the columns that `dataset_columns` names."""
        return load_problems(self.dataset_name, split, columns=column_names(self.dataset_columns))


def column_names(pairs: Sequence[str]) -> dict[str, str]:
    """
    Parses `--dataset_columns`.

    Args:
        pairs (`list[str]`): Entries `column=name`, such as `prompt=question`.

    Returns:
        `dict[str, str]`: Our column to its name in the data.

    Raises:
        ValueError: If an entry has no `=`.
    """
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(
                f"dataset_columns={pair!r} has no '='. Write --dataset_columns prompt=question, for example."
            )
    return dict(pair.split("=", 1) for pair in pairs)


@documented
@dataclass(kw_only=True)
class SavedTeamArguments:
    """
    Arguments of commands that load a saved team.

    Args:
        adapter (`str`, *optional*):
            Folder or Hub repository of the team. `--team` is the same flag.
        base_model (`str`, *optional*):
            Where the team's base model is now. Defaults to where it was in training.
        num_agents (`int`, *optional*):
            Number of agents. Defaults to the number that was trained.
        agents (`str`, *optional*):
            YAML file: a list of `{name, role}`, which is the whole team, or a mapping of agents' names to role texts.
        workflow (`str`, *optional*):
            Name of the workflow, such as `my_team.py:Debate`. Defaults to the saved one.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run the files of the saved workflow and rewards, if they have some.
        isolation (`str`, *optional*, defaults to `"strict"`):
            How programs are confined: `"strict"`, `"best_effort"` or `"none"`.
        packages (`list[str]`, *optional*):
            Installed packages that programs and tests may import, such as `pandas pytest`. Defaults to those of the training.
    """

    adapter: str | None = field(default=None, metadata={"aliases": ["--team"]})
    base_model: str | None = None
    num_agents: int | None = None
    agents: str | None = None
    workflow: str | None = None
    trust_remote_code: bool = False
    isolation: str = "strict"
    packages: list[str] | None = None

    def team_settings(self) -> dict[str, Any]:
        """The settings that replace those of the team: `isolation`, and `num_agents`, `roles`, `workflow` and `packages` if given."""
        given = read_agents(self.agents, self.num_agents) if self.agents else {"num_agents": self.num_agents}
        given |= {"workflow": self.workflow, "isolation": self.isolation, "packages": self.packages}
        return {name: value for name, value in given.items() if value is not None}

    def load_team(self, load: Callable[..., Team] = Team.from_pretrained) -> Team:
        """The team that the flags name, with their settings."""
        return load(
            str(self.adapter),
            base_model=self.base_model,
            trust_remote_code=self.trust_remote_code,
            **self.team_settings(),
        )


@dataclass(kw_only=True)
class PlayingTeamArguments(SavedTeamArguments):
    """
    Arguments of commands that play with a saved team, or with an untrained model.

    Args:
        model_name_or_path (`str`, *optional*):
            A model, in place of a saved team.
        override (`list[str]`, *optional*):
            Other settings of the team, such as `temperature=0.2 max_completion_length=512`.
    """

    model_name_or_path: str | None = None
    override: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.adapter is None and self.model_name_or_path is None:
            raise ValueError("There is no team. Set --team outputs/quickstart, for example, or --model_name_or_path.")
        if self.adapter is not None and self.model_name_or_path is not None:
            raise ValueError("--team and --model_name_or_path exclude each other. Use one of them.")
        if self.model_name_or_path is not None and self.base_model is not None:
            raise ValueError("--base_model is the model of a --team. Leave it out with --model_name_or_path.")

    def team_settings(self) -> dict[str, Any]:
        """The settings that replace those of the team, and `model_init_kwargs` if they are given."""
        settings, others = super().team_settings(), dict(map(parse_override, self.override))
        known = [f.name for f in fields(TeamSettings)] + ["model_init_kwargs"]
        for name in others:
            if name not in known:
                near = nearest_setting(name, known)
                raise ValueError(f"--override has an unknown key {name!r}." + (near and f" Did you mean {near}?"))
            if name in settings and name != "isolation":
                raise ValueError(f"--override has {name}, which another flag sets, too. Use one of them.")
        return settings | others

    def load_team(self, load: Callable[..., Team] = Team.from_pretrained) -> Team:
        if self.model_name_or_path is None:
            return super().load_team(load)
        settings = self.team_settings()
        loading = settings.pop("model_init_kwargs", None)
        check_model("model_name_or_path", self.model_name_or_path)
        return untrained_team(self.model_name_or_path, TeamSettings(**settings), model_init_kwargs=loading)


def in_home(value: Any) -> Any:
    """A value with the home folder in place of `~`, if it is a path that begins so, or a list of such. Others stay as they are."""
    if isinstance(value, list):
        return list(map(in_home, value))
    is_path = isinstance(value, str) and re.match(r"~[\w.-]*/", value) is not None
    return os.path.expanduser(value) if is_path else value


def parse_override(argument: str) -> tuple[str, Any]:
    """
    Parses an argument of `--override`.

    Args:
        argument (`str`): `key=value`, with the value in YAML: `1`, `[1.5,0.5]`, `null`. `None` also means null.

    Returns:
        `tuple[str, Any]`: Key and value.

    Raises:
        ValueError: If there is no `=`, or a list is not valid YAML.
    """
    name, separator, text = argument.partition("=")
    if not separator:
        raise ValueError(f"--override {argument} has no '='. Write --override num_turns=2, for example.")
    text = in_home(text)
    structured = text.lstrip().startswith(("[", "{"))
    try:
        value = None if text == "None" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        if structured:
            raise ValueError(
                f"--override {argument} is not a valid YAML list. Write {name}=[1.5,0.5], for example."
            ) from error
        return name, text
    # YAML would turn `no` into False, and text that looks like a date or has a colon into other types
    if isinstance(value, bool):
        return name, value if text.lower() in ("true", "false") else text
    return name, value if structured or isinstance(value, str | int | float | None) else text


_AGENTS = "Write [{name: helper, role: Write aux.}, {name: main, role: Write the function.}], for example."


def read_agents(path: str | Path, num_agents: int | None = None) -> dict[str, Any]:
    """
    Reads the YAML file of `--agents` into settings of [`Team.from_pretrained`].

    Args:
        path (`str` or `Path`): The file. A list of `{name: ..., role: ...}` is the whole team. A mapping of names to role texts
            replaces the texts of some agents. The names are those of the workflow's agents.
        num_agents (`int`, *optional*): Number of agents.

    Returns:
        `dict[str, Any]`: `roles`, and `num_agents`, which is `None` where neither the file nor the argument says it.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key, a repeated name, an empty text, or a list whose length
            is not `num_agents`.
    """
    try:
        content = yaml.safe_load(read_text(Path(path)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"agents={str(path)!r} cannot be read: {error}. {_AGENTS}") from error
    if isinstance(content, dict):
        content = [{"name": name, "role": role} for name, role in content.items()]
    elif isinstance(content, list):
        if num_agents not in (None, len(content)):
            raise ValueError(
                f"agents={str(path)!r} lists {len(content)} agents, but num_agents={num_agents}. Set "
                f"num_agents={len(content)}, or write a mapping of names to role texts into the file."
            )
        num_agents = len(content)
    if not content or not isinstance(content, list):
        raise ValueError(f"agents={str(path)!r} has no agents. {_AGENTS}")
    roles: dict[str, str] = {}
    for agent in content:
        texts = list(agent.values()) if isinstance(agent, dict) and agent.keys() == {"name", "role"} else [None]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"agents={str(path)!r} has {agent!r}, but needs the texts name and role. {_AGENTS}")
        if agent["name"] in roles:
            raise ValueError(f"agents={str(path)!r} has {agent['name']!r} twice. Rename one of them.")
        roles[agent["name"]] = agent["role"]
    return {"num_agents": num_agents, "roles": roles}
