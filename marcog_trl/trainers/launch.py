"""What recipes share: flags, their synonyms, and the settings that follow from them."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from trl import ModelConfig, ScriptArguments, TrlParser

from marcog_trl.embedded import MODEL_NAME, build_default_model
from marcog_trl.problems import load_problems
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig
from marcog_trl.trainers.multi_agent_grpo_config import MultiAgentGRPOConfig
from marcog_trl.trainers.multi_agent_ppo_config import MultiAgentPPOConfig
from marcog_trl.trainers.shppo_config import SHPPOConfig


# Flags that users of other multi-agent scripts know, and the fields that they stand for
SYNONYMS = {"base_model": "model_name_or_path", "lora_rank": "lora_r", "save_dir": "output_dir"}
MODEL_ALIASES = {"qwen": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}


@dataclass
class TeamArguments(ScriptArguments):
    """
    Arguments of the recipes beside those of the trainer and of the model.

    Args:
        dataset_name (`str`, *optional*, defaults to `"builtin"`):
            Problem set: `"builtin"`, `"humaneval"`, a Hub id, or a path.
        dataset_train_split, dataset_test_split (`str`, *optional*, default to `"train"` and `"test"`):
            Splits, slices as in `"test[33:163]"` included.
        dataset_columns (`list[str]`, *optional*):
            Columns of the data under other names, such as `prompt=question test=asserts`.
        reward (`list[str]`, *optional*, defaults to `["execution_reward"]`):
            Names of reward functions.
        num_steps (`float`, *optional*):
            Replies to train on, such as `1e6`; one step is one reply of one agent. Sets `max_steps`, which counts
            optimizer steps.
        num_samples (`int`, *optional*, defaults to `4`):
            Sampled episodes per held-out problem in the evaluation before and after training; 0 leaves it out.
        allow_overlap (`bool`, *optional*, defaults to `False`):
            Whether training problems may be among the held-out ones.
    """

    dataset_name: str = field(
        default="builtin", metadata={"help": "Problem set: 'builtin', 'humaneval', a Hub id, or a path."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split of the training problems."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the held-out problems."})
    dataset_columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns under other names, such as prompt=question test=asserts."}
    )
    reward: list[str] = field(
        default_factory=lambda: ["execution_reward"], metadata={"help": "Names of reward functions."}
    )
    num_steps: float | None = field(
        default=None,
        metadata={"help": "Replies to train on, such as 1e6 (one step is one reply of one agent); sets max_steps."},
    )
    num_samples: int = field(
        default=4,
        metadata={"help": "Sampled episodes per held-out problem, before and after training; 0: no such evaluation."},
    )

    allow_overlap: bool = field(
        default=False, metadata={"help": "Whether training problems may be among the held-out ones."}
    )

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
                f"{self.dataset_name!r} share {len(shared)} problems, such as {shared[0]!r}; splits that do not overlap, such "
                "as 'test[33:]' and 'test[:32]', or --allow_overlap true, work"
            )
        return train, test

    def load(self, split: str) -> Dataset:
        """The problems of a split, with the columns that `dataset_columns` says."""
        return load_problems(
            self.dataset_name, split, columns=dict(pair.split("=", 1) for pair in self.dataset_columns)
        )


def parse(
    config_class: type[MultiAgentConfig], default_config: str | Path, argv: Sequence[str] | None = None
) -> tuple[TeamArguments, Any, ModelConfig]:
    """
    Reads a recipe's command line.

    `--config file.yaml` gives defaults, every field is a flag, and `--override a.b=c` is a synonym of `--b c`. Without
    `--config` and without a model, the settings of the embedded default apply.

    Args:
        config_class (`type`): The trainer's configuration.
        default_config (`str` or `Path`): YAML file of the embedded default.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.

    Returns:
        `tuple`: [`TeamArguments`], the trainer's configuration, and [`~trl.ModelConfig`].

    Raises:
        ValueError: If a flag, or a key of `--override` or of the file, is unknown; it names the nearest one. Keys of the
            file that another trainer of the family reads are left aside.
    """
    argv = _expand(sys.argv[1:] if argv is None else argv)
    known = {f.name for cls in (TeamArguments, config_class, ModelConfig) for f in fields(cls)}
    for argument in argv:
        name = argument.removeprefix("--").partition("=")[0]
        if (
            argument.startswith("--")
            and name != "config"
            and name not in known
            and name.removeprefix("no_") not in known
        ):
            raise ValueError(f"unknown flag --{name}" + _nearest(name, known, "--"))
    given = {argument.partition("=")[0] for argument in argv}
    if not given & {"--config", "--model_name_or_path"}:
        argv = ["--config", str(default_config), *argv]
    parser = TrlParser(cast(Any, (TeamArguments, config_class, ModelConfig)))
    # A LoRA on all linear layers; dropout would make the ratio of the first update differ from 1
    parser.set_defaults(use_peft=True, lora_target_modules=["all-linear"], lora_dropout=0.0)
    script, args, model, left, stray = cast(
        Any, parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)
    )
    # One file serves all recipes: what another trainer of the family would read is left aside
    family = {f.name for cls in (MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig) for f in fields(cls)}
    for name in (string.removeprefix("--") for string in left if string.startswith("--")):
        if name not in family:
            raise ValueError(f"the file of --config has an unknown key {name!r}" + _nearest(name, known))
    if stray:
        raise ValueError(f"the command line has {stray[0]!r}, which belongs to no flag; --flag value works")
    for pair in script.dataset_columns:
        if "=" not in pair:
            raise ValueError(f"dataset_columns={pair!r} has no '='; prompt=question works")
    model.model_name_or_path = MODEL_ALIASES.get(model.model_name_or_path, model.model_name_or_path)
    if model.model_name_or_path == MODEL_NAME:
        with args.main_process_first(desc="build the embedded default model"):
            model.model_name_or_path = build_default_model()
    if args.model_init_kwargs is None and model.dtype not in (None, "auto"):
        args.model_init_kwargs = {"dtype": model.dtype}
    return script, args, model


def _nearest(name: str, known: set[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name, [*known, *SYNONYMS], n=1)
    return f"; {prefix}{nearest[0]} works" if nearest else ""


def set_max_steps(args: MultiAgentConfig, num_steps: float | None) -> None:
    """
    Turns a number of replies into `max_steps`.

    Args:
        args (`MultiAgentConfig`): Changed in place.
        num_steps (`float`, *optional*): Replies of agents to train on; `None` leaves `args` as it is.

    Raises:
        ValueError: If it is smaller than 1.
    """
    if num_steps is None:
        return
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} trains on no reply; 1e4 works")
    replies = (
        args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps / args.num_iterations
    )
    args.max_steps = math.ceil(num_steps / replies)


def _expand(argv: Sequence[str]) -> list[str]:
    """Synonyms become flags; `--override a.b=c d=e` becomes `--b c --d e`."""
    expanded: list[str] = []
    overriding = False
    for argument in argv:
        if argument == "--override":
            overriding = True
        elif overriding and not argument.startswith("--"):
            key, separator, value = argument.partition("=")
            if not separator:
                raise ValueError(f"--override {argument} has no '='; --override num_turns=2 works")
            name = key.rpartition(".")[2]
            expanded += [f"--{SYNONYMS.get(name, name)}", value]
        else:
            overriding = False
            name, separator, value = argument.removeprefix("--").partition("=")
            is_synonym = argument.startswith("--") and name in SYNONYMS
            expanded.append(f"--{SYNONYMS[name]}{separator}{value}" if is_synonym else argument)
    return expanded
