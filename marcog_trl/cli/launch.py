"""What recipes share: flags, their synonyms, and the settings that follow from them."""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import torch
import yaml
from datasets import Dataset
from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import SchedulerType, get_scheduler
from transformers.utils import is_liger_kernel_available
from trl import ModelConfig, ScriptArguments, TrlParser

from marcog_trl.cli.arguments import (
    ALGORITHMS,
    ANY_RECIPE,
    RECIPES,
    SECTIONS,
    SYNONYMS,
    check,
    field_of,
    flatten,
    implied,
    nearest,
    parse_override,
    split,
    translate,
)
from marcog_trl.embedded import MODEL_NAME, build_default_model
from marcog_trl.problems import load_problems
from marcog_trl.team.base_models import check_model
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig
from marcog_trl.trainers.multi_agent_grpo_config import MultiAgentGRPOConfig
from marcog_trl.trainers.multi_agent_ppo_config import MultiAgentPPOConfig
from marcog_trl.trainers.ranges import COUNT, NOT_NEGATIVE, Range, check_number, check_numbers
from marcog_trl.trainers.shppo_config import SHPPOConfig
from marcog_trl.workflows import make_workflow


MODEL_ALIASES = {"qwen": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}
BARE = object()  # the value of a flag that has none
# Fields of TRL's ScriptArguments that teams do not support: the only value that we accept, and what to do instead
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "dataset_config": (None, "Save the problems to a file, and set --dataset_name problems.jsonl."),
    "dataset_streaming": (
        False,
        "Problems are held in memory. Take fewer of them with --dataset_train_split 'train[:1000]'.",
    ),
    "ignore_bias_buffers": (False, "These models have no such buffers. Set --ignore_bias_buffers false."),
}
_FAMILY: dict[type[MultiAgentConfig], str] = {
    MultiAgentGRPOConfig: "train_magrpo.py",
    MultiAgentPPOConfig: "train_ppo.py",
    SHPPOConfig: "train_shppo.py",
}
_LENGTHS = {"num_train_epochs", "max_steps", "num_steps"}


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
        eval_problems (`int`, *optional*):
            Held-out problems, from the first on, that each evaluation during training takes (`eval_strategy`). All by
            default.
        save_final_model (`bool`, *optional*, defaults to `True`):
            Whether the trained team is saved at the end.
        allow_overlap (`bool`, *optional*, defaults to `False`):
            Whether training problems may be among the held-out ones.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Whether checkpoints that an earlier run left in `output_dir` are deleted when training begins. Without it, a new
            run beside them is refused.
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
    eval_problems: int | None = field(
        default=None, metadata={"help": "Held-out problems in each evaluation during training. Default: all."}
    )
    save_final_model: bool = field(default=True, metadata={"help": "Whether the trained team is saved at the end."})
    allow_overlap: bool = field(
        default=False, metadata={"help": "Whether training problems may be among the held-out ones."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Whether checkpoints of an earlier run in output_dir are deleted."}
    )

    def __post_init__(self):
        check_numbers(self, {"num_samples": NOT_NEGATIVE, "eval_problems": COUNT, "num_steps": COUNT})
        column_names(self.dataset_columns)
        for name, (accepted, instead) in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value != accepted:
                raise ValueError(f"{name}={value!r} is not supported. {instead}")

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
        return train, test

    def eval_split(self, test: Dataset) -> Dataset:
        """The held-out problems of the evaluations during training."""
        return test if self.eval_problems is None else test.select(range(min(self.eval_problems, len(test))))

    def load(self, split: str) -> Dataset:
        """The problems of a split, with the columns that `dataset_columns` says."""
        return load_problems(self.dataset_name, split, columns=column_names(self.dataset_columns))


def column_names(pairs: Sequence[str]) -> dict[str, str]:
    """
    What `--dataset_columns` says: our columns, and what they are called in the data.

    Raises:
        ValueError: If an entry is not of the form `ours=theirs`.
    """
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(
                f"dataset_columns={pair!r} has no '='. Write --dataset_columns prompt=question, for example."
            )
    return dict(pair.split("=", 1) for pair in pairs)


@dataclass(frozen=True)
class Recipe:
    """
    What sets a recipe apart.

    Args:
        sections (`tuple[str, ...]`, *optional*, defaults to all): Sections of algorithms that it reads (see
            `overrides.ALGORITHMS`).
        defaults (`dict`, *optional*): Settings that hold where nothing else is given.
        fixed (`dict`, *optional*): Settings that make the recipe. A file's others give way to them; the command line's are
            refused.
        elsewhere (`str`, *optional*): The recipe that takes others.
    """

    sections: tuple[str, ...] = tuple(ALGORITHMS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: str = ""


class _Parser(TrlParser):
    def __init__(self, dataclass_types: tuple[type, ...]):
        # Of an abbreviation nobody can say what it will mean when there are more flags
        super().__init__(cast(Any, dataclass_types), allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_arguments(cls: type, argv: Sequence[str] | None = None) -> Any:
    """
    Reads a command line into one dataclass: its fields as flags, or in the file of `--config`.

    Args:
        cls (`type`): The dataclass.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.

    Raises:
        ValueError: If a flag is unknown; it suggests the nearest one. If a value has the wrong type, or the file cannot be
            read.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[-1:] == ["--config"]:
        raise ValueError("--config needs a file. Write --config file.yaml.")
    parser = _Parser((cls,))
    for argument in argv:
        name = argument.partition("=")[0]
        if name.startswith("--") and name != "--config" and name not in parser._option_string_actions:
            raise _unknown_flag(argument, [f.name for f in fields(cls)])
    (arguments,) = parser.parse_args_and_config(argv)
    return arguments


def _unknown_flag(argument: str, known: Collection[str]) -> ValueError:
    if not argument.startswith("--"):
        return ValueError(f"{argument!r} belongs to no flag. Write --flag value.")
    name = argument.removeprefix("--").partition("=")[0]
    recipes = [recipe for cls, recipe in _FAMILY.items() if name in {f.name for f in fields(cls)}]
    if recipes:
        return ValueError(f"--{name} is a flag of {' and '.join(recipes)}, not of this recipe. Remove it.")
    near = nearest(name, known)
    return ValueError(f"unknown flag --{name}." + (near and f" Did you mean --{near}?"))


def parse(
    config_class: type[MultiAgentConfig],
    default_config: str | Path,
    argv: Sequence[str] | None = None,
    recipe: Recipe | None = None,
) -> tuple[TeamArguments, Any, ModelConfig]:
    """
    Reads a recipe's command line.

    Every field is a flag. `--config file.yaml` and `--override section.key=value ...` take fields, and the sections and
    names of `overrides.NAMES`. The command line wins over the file, and what comes later in either over what comes before.
    Without `--config` and without a model, the settings of the embedded default apply.

    Args:
        config_class (`type`): The trainer's configuration.
        default_config (`str` or `Path`): YAML file of the embedded default.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        recipe ([`Recipe`], *optional*): What the recipe settles.

    Returns:
        `tuple`: [`TeamArguments`], the trainer's configuration, and [`~trl.ModelConfig`], whose type, revision and attention
        are in the configuration's `model_init_kwargs`, unless these name others.

    Raises:
        ValueError: If a field has a value that teams have no use for. If a flag, or a key of `--override` or of the file, is
            unknown; it names the nearest one. Fields that only another trainer of the family has, and sections of other
            algorithms, are left aside in a file.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    recipe = recipe or Recipe()
    classes = (TeamArguments, config_class, ModelConfig)
    parser = _Parser(classes)
    # A LoRA on all linear layers; dropout would make the ratio of the first update differ from 1
    parser.set_defaults(use_peft=True, lora_target_modules=["all-linear"], lora_dropout=0.0)
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    known = {f.name for cls in classes for f in fields(cls)}
    sections = (*recipe.sections, ANY_RECIPE)

    given, config = _read_flags(argv, known, sections)
    fields_given = {field_of(name) for name in given if name not in SECTIONS}
    names_model = "model_name_or_path" in fields_given or isinstance(given.get("agents"), list)
    path = config or (None if names_model else default_config)
    of_file = {} if path is None else _read_file(Path(path), known, sections)
    settings: Mapping[str, Any] = {}
    for source in (recipe.defaults, implied(of_file), _drop_replaced(of_file, given), implied(given), given):
        settings = _merge(settings, source)
    ours, environment = translate(settings, known)
    ours = {name: value for name, value in ours.items() if name in known or name == "samples_per_step"}
    _fix(ours, recipe, fields_given)
    script, args, model = _construct(parser, ours, classes)
    if "wandb" in args.report_to:
        os.environ |= environment
        if "WANDB_DIR" in environment:
            Path(environment["WANDB_DIR"]).mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
    for name, allowed in (("lora_r", COUNT), ("lora_alpha", COUNT), ("lora_dropout", Range(0, 1, below=True))):
        default = parser.get_default(name)
        check_number(name, getattr(model, name), allowed, whole=isinstance(default, int), default=default)
    if not model.use_peft:
        raise ValueError("use_peft=False is not supported: a team trains an adapter. Set --use_peft true.")
    if model.load_in_4bit and model.dtype == "auto":
        raise ValueError("load_in_4bit=True needs an explicit compute dtype. Set --dtype bfloat16.")
    model.model_name_or_path = MODEL_ALIASES.get(model.model_name_or_path, model.model_name_or_path)
    if model.model_name_or_path == MODEL_NAME:
        with args.main_process_first(desc="build the embedded default model"):
            model.model_name_or_path = build_default_model()
    loading = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
    }
    args.model_init_kwargs = {
        **{name: value for name, value in loading.items() if value is not None},
        **cast(dict, args.model_init_kwargs or {}),
    }
    return script, args, model


def _read_flags(
    argv: Sequence[str], known: Collection[str], sections: Sequence[str]
) -> tuple[dict[str, Any], str | None]:
    """Settings of the command line in order, the later ones last, and the file of `--config`."""
    flags: list[tuple[str, list[str]]] = []
    for argument in argv:
        if argument.startswith("--"):
            name, separator, value = argument.removeprefix("--").partition("=")
            flags.append((SYNONYMS.get(name, name), [value] if separator else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            raise _unknown_flag(argument, known)
    settings: dict[str, Any] = {}
    config = None
    for name, values in flags:
        if name == "config":
            if len(values) != 1:
                raise ValueError(f"--config takes one file, not {values}. Write --config file.yaml.")
            config = values[0]
        elif name == "override":
            for key, value in map(parse_override, values):
                leaves = flatten({key: value})
                for leaf in leaves:
                    check(leaf, known, sections, "--override")
                settings = _merge(settings, leaves)
        elif name in known:
            settings = _merge(settings, {name: values[0] if len(values) == 1 else values or BARE})
        elif name.removeprefix("no_") in known and not values:
            settings = _merge(settings, {name.removeprefix("no_"): False})
        else:
            raise _unknown_flag(f"--{name}", [*known, *SYNONYMS])
    return settings, config


def _read_file(path: Path, known: Collection[str], sections: Sequence[str]) -> dict[str, Any]:
    """Settings of a YAML file. One file serves all recipes: what only another one reads is left aside."""
    origin = f"the file {path} of --config"
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{origin} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{origin} must hold keys and values, such as 'num_turns: 2'.")
    variables = content.pop("env", {})
    if not isinstance(variables, dict):
        raise ValueError(
            f"{origin} has env={variables!r}. Write names and values of environment variables below 'env:'."
        )
    os.environ |= {str(name): str(value) for name, value in variables.items()}
    settings = flatten(content)
    algorithms = {split(name)[0] for name in settings} & set(ALGORITHMS)
    if algorithms and not algorithms & set(sections):
        raise ValueError(
            f"{origin} has the section {min(algorithms)!r} of {RECIPES[min(algorithms)]}, and none of this recipe, such as "
            f"{sections[0]!r}. Run that recipe, or rename the section."
        )
    settings = {name: value for name, value in settings.items() if split(name)[0] not in algorithms - set(sections)}
    family = {f.name for cls in _FAMILY for f in fields(cls)}
    for name in settings:
        check(name, {*known, *family}, sections, origin)
    return settings


def _drop_replaced(of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings without those that the command line replaces under other names."""
    fields_given = {field_of(name) for name in given if name not in SECTIONS}
    emptied = {name for name, value in given.items() if name in SECTIONS and value is None}
    lengths = _LENGTHS if fields_given & _LENGTHS else set()
    return {
        name: value
        for name, value in of_file.items()
        if split(name)[0] not in emptied and (name in SECTIONS or field_of(name) not in lengths)
    }


def _fix(ours: dict[str, Any], recipe: Recipe, fields_given: Collection[str]) -> None:
    """What makes the recipe, in place of what a file says."""
    for name, value in recipe.fixed.items():
        if name in fields_given and str(ours.get(name, value)) != str(value):
            raise ValueError(
                f"{name}={ours[name]} does not fit this recipe, which has {name}={value}. Use {recipe.elsewhere}."
            )
        ours[name] = value
    of_file = "workflow" in recipe.fixed and "num_agents" not in fields_given
    if ours.get("workflow") == "single" and (of_file or str(ours.get("num_agents")) == "1"):
        ours.pop("num_agents", None)  # the workflow for one agent has no number of them


def _merge(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both, in order: also where they say the same thing under two names, the later one is the last."""
    return {name: value for name, value in settings.items() if name not in later} | dict(later)


def _construct(parser: TrlParser, settings: dict[str, Any], classes: tuple[type, ...]) -> tuple[Any, ...]:
    """The dataclasses with these settings, which the parser converts and checks as it does flags."""
    samples = settings.pop("samples_per_step", None)
    hints = {name: str(hint) for cls in classes for name, hint in get_type_hints(cls).items()}
    argv: list[str] = []
    for name, value in settings.items():
        hint, kind = hints[name], "None" if value is None else type(value).__name__
        if kind in ("None", "list", "dict") and kind not in hint:
            raise ValueError(
                f"{name}={value!r} has the wrong type. Set {name}={parser.get_default(name)}, for example."
            )
        if value is BARE:
            argv.append(f"--{name}")
        elif isinstance(value, list) and value and hint.startswith("list"):
            argv += [f"--{name}", *map(str, value)]
        elif value is None or isinstance(value, list | dict):
            parser.set_defaults(**{name: value})
        else:
            argv.append(f"--{name}={value}")
    if samples is not None:
        argv += _fit_step(parser.parse_known_args(argv)[0], samples, "gradient_accumulation_steps" in settings)
    return parser.parse_args_into_dataclasses(argv)


def _fit_step(seen: Namespace, samples: Any, accumulates: bool) -> list[str]:
    """Flags for an optimizer step of so many samples of every agent: groups of siblings, or replies where there are none."""
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"train_batch_size={samples!r} (or rollout_buffer_size) must be a whole number, at least 1.")
    options = {} if seen.num_agents is None else {"num_agents": seen.num_agents}
    num_agents = 1 if seen.centralized else len(make_workflow(seen.workflow, **options).agents)
    rows_of_sample = seen.num_generations if "advantage" in seen else 1
    rows = math.ceil(samples * rows_of_sample * num_agents / int(os.environ.get("WORLD_SIZE", "1")))
    micro = max(size for size in range(1, seen.per_device_train_batch_size + 1) if rows % size == 0)
    steps = [] if accumulates else [f"--gradient_accumulation_steps={rows // micro}"]
    return [f"--per_device_train_batch_size={micro}", *steps]


def resume_choice(value: str | None) -> str | bool | None:
    """
    What `--resume_from_checkpoint` asks for.

    Args:
        value (`str`, *optional*): The flag's value.

    Returns:
        `str` or `bool`, *optional*: As `Trainer.train` takes it: `True` for `"true"`, which is the last whole checkpoint,
        `None` for `"false"`, and else the folder of a checkpoint.
    """
    return {"true": True, "false": None, "none": None}.get(str(value).lower(), value)


def check_run(script: TeamArguments, args: MultiAgentConfig, model: ModelConfig) -> None:
    """
    Checks what a run needs beside its settings: accounts, packages, and the files of its models.

    Args:
        script ([`TeamArguments`]): The recipe's arguments.
        args (`MultiAgentConfig`): The trainer's configuration.
        model ([`~trl.ModelConfig`]): The model, as [`parse`] returns it.

    Raises:
        ValueError: If there is no account for Weights & Biases or the Hub, a package or a setting of the scheduler is missing,
            or a model cannot be loaded.
    """
    if "wandb" in cast(list[str], args.report_to):
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "report_to='wandb' needs an account. Run `wandb login`, set WANDB_MODE=offline, or set --report_to none."
            )
    if args.push_to_hub:
        name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise ValueError(
                f"push_to_hub=True has no valid name for the repository: {name!r}. Set --hub_model_id user/team."
            ) from None
        if not (args.hub_token or get_token()):
            raise ValueError(
                f"push_to_hub=True needs a token with write access, to push to {name!r}. Run `hf auth login`, or set "
                "--push_to_hub false."
            )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("use_liger_kernel=True needs the package liger-kernel. Run `pip install liger-kernel`.")
    try:
        get_scheduler(
            args.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)]),
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=cast(dict, args.lr_scheduler_kwargs),
        )
    except (TypeError, ValueError) as error:  # of the scheduler's own arguments
        raise ValueError(
            f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r} does not work with "
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}: {error}."
        ) from error
    for name in script.reward:
        if "/" in name:  # a reward model; others are names of functions
            check_model("reward", name)
    check_model("model_name_or_path", str(model.model_name_or_path), **cast(dict, args.model_init_kwargs))


def set_max_steps(args: MultiAgentConfig, num_steps: float | None) -> None:
    """
    Turns a number of replies into `max_steps`.

    Args:
        args (`MultiAgentConfig`): Changed in place.
        num_steps (`float`, *optional*): Replies of agents to train on; `None` leaves `args` as it is.

    Raises:
        ValueError: If it is smaller than 1, or not finite.
    """
    if num_steps is None:
        return
    check_number("num_steps", num_steps, COUNT)
    replies = (
        args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps / args.num_iterations
    )
    args.max_steps = math.ceil(num_steps / replies)
