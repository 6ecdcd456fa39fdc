"""Reads command lines and YAML files into dataclasses, with TRL's parser."""

from __future__ import annotations

import copy
import math
import os
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import yaml
from trl import ModelConfig, TrlParser

import marcog_trl
from marcog_trl.checks import COUNT, check_number
from marcog_trl.cli.arguments import TeamArguments, in_home, parse_override
from marcog_trl.cli.console import log
from marcog_trl.cli.other_projects import FLAGS, check_names, convert, field_of, flatten, merge, nearest_setting
from marcog_trl.cli.recipe import RECIPES, TrainingRecipe, config_file
from marcog_trl.embedded import MODEL_NAME, ROLES, build_default_model
from marcog_trl.files import read_text
from marcog_trl.trainers.config import MultiAgentConfig
from marcog_trl.workflows import make_workflow
from marcog_trl.workflows.from_file import names_file


# A file serves all recipes, so it may hold the fields of each of these
_CONFIG_OF: dict[str, type] = {name: getattr(marcog_trl, recipe.config) for name, recipe in RECIPES.items()}
_FAMILY = {f.name for cls in _CONFIG_OF.values() for f in fields(cls)}
# Flags of TRL and transformers that --help shows; --help-all shows the others, too
_USUAL = frozenset(
    "model_name_or_path dtype load_in_4bit lora_r lora_alpha output_dir learning_rate max_steps num_train_epochs "
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing num_generations max_completion_length "
    "temperature beta num_iterations logging_steps report_to save_strategy save_steps resume_from_checkpoint eval_strategy "
    "eval_steps seed bf16 use_cpu use_vllm push_to_hub".split()
)
_LENGTHS = {"num_train_epochs", "max_steps", "num_replies"}


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows the defaults of flags that have one."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(TrlParser):
    """
    TRL's parser, whose errors are `ValueError`s that name the nearest flag, and that checks the types of a file.

    Args:
        classes (`type`): The dataclasses, whose fields are flags, and keys of the file of `--config`.
        prog, description (`str`, *optional*): What `--help` calls the program, and says before the flags.
    """

    def __init__(self, *classes: type, prog: str | None = None, description: str | None = None):
        # An abbreviation changes its meaning when a flag is added
        super().__init__(
            cast(Any, classes), allow_abbrev=False, prog=prog, description=description, formatter_class=_Help
        )
        self.add_argument("--config", metavar="FILE", default=SUPPRESS, help="YAML file with values of these flags.")
        self.hints = {name: str(hint) for cls in classes for name, hint in get_type_hints(cls).items()}

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """
        Reads a command line.

        Raises:
            ValueError: If a flag or a key of the file is unknown, a value has the wrong type, or the file cannot be read.
        """
        if argv[-1:] == ["--config"]:
            raise ValueError("--config needs a file. Write --config file.yaml.")
        argv = _with_home(argv)
        for argument in argv:
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                raise self.unknown(name)
        try:
            *read, rest = self.parse_args_and_config(argv, return_remaining_strings=True)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"The file of --config cannot be read: {' '.join(str(error).split())}") from error
        if rest:
            raise self.unknown(rest[0])
        return tuple(read)

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Sets defaults, with the types that flags have. Returns what is unknown, as TRL does."""
        for name, value in config.items():
            kind = "None" if value is None else type(value).__name__
            if kind in ("None", "list", "dict") and kind not in self.hints.get(name, kind):
                raise ValueError(
                    f"{name}={value!r} has the wrong type. Set {name}={self.get_default(name)}, for example."
                )
            config[name] = value = in_home(value)
            if isinstance(value, bool | int | float):
                config[name] = str(value)  # read like a flag
            action = self._option_string_actions.get(f"--{name}")
            if action is not None and action.nargs == "+" and value is not None:
                config[name] = [cast(Any, action.type)(entry) for entry in ([value] if kind != "list" else value)]
        return super().set_defaults_with_config(**config)

    def unknown(self, argument: str) -> ValueError:
        """The error for a word that is not a flag, or for an unknown flag."""
        if not argument.startswith("--"):
            return ValueError(f"{argument!r} belongs to no flag. Write --flag value.")
        name = argument.removeprefix("--")
        recipes = [recipe for recipe, cls in _CONFIG_OF.items() if name in {f.name for f in fields(cls)}]
        if recipes:
            where = "train" if len(recipes) == len(_CONFIG_OF) else f"train {', '.join(recipes)}"
            return ValueError(f"--{name} is a flag of {where}, not of this command. Remove it.")
        near = nearest_setting(name, (flag.removeprefix("--") for flag in self._option_string_actions))
        return ValueError(f"unknown flag --{name}." + (near and f" Did you mean --{near}?"))


def read_training_arguments(
    recipe: TrainingRecipe, argv: Sequence[str] | None = None
) -> tuple[TeamArguments, Any, ModelConfig]:
    """
    Reads the command line of a training recipe.

    Every field is a flag. `--config file.yaml` and `--override section.key=value ...` take our fields, and the names of other
    projects (see `other_projects.TABLE`). Flags win over overrides, and these over the file. Without `--config` and without a
    model, the recipe's default file applies.

    Args:
        recipe ([`TrainingRecipe`]): The recipe.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.

    Returns:
        `tuple`: [`TeamArguments`], the trainer's configuration, and [`~trl.ModelConfig`], whose type, revision and attention
        are in the configuration's `model_init_kwargs`, unless these name others.

    Raises:
        ValueError: If a value is not supported, or a flag or a key of `--override` or of the file is unknown; the error
            suggests the nearest name. In a file, fields of other trainers and sections of other algorithms are ignored.
    """
    parser = Parser(TeamArguments, getattr(marcog_trl, recipe.config), ModelConfig)
    parser.add_argument(
        "--override", nargs="+", default=SUPPRESS, help="Settings by name, such as magrpo.num_turns=2 temperature=0.8."
    )
    # A LoRA on all linear layers; with dropout, the ratio of the first update would differ from 1
    parser.set_defaults(use_peft=True, lora_target_modules=["all-linear"], lora_dropout=0.0)
    flags, path, overrides = _split_flags(_with_home(sys.argv[1:] if argv is None else argv))
    if {"-h", "--help", "--help-all"} & {*flags}:
        _print_help(parser, recipe, "--help-all" in flags)
    settings, set_by_user = _read_settings(recipe, parser, flags, path, overrides)
    samples = settings.pop("samples_per_step", None)
    parser.set_defaults_with_config(**settings)
    if samples is not None:
        set_by_user |= settings.keys()
        flags += _fit_step(parser.parse_known_args(flags)[0], samples, "gradient_accumulation_steps" in set_by_user)
    script, args, model = parser.parse(flags)
    for name, value in recipe.fixed.items():
        if getattr(args, name) != value:
            raise ValueError(
                f"{name}={getattr(args, name)} does not fit this recipe, which has {name}={value}. Use {recipe.elsewhere}."
            )
    if args.workflow == "single" and args.num_agents == 1:
        args.num_agents = None  # this workflow always has one agent, and takes no number
    if isinstance(args, MultiAgentConfig) and args.full_finetuning:
        _train_all_weights(model, set_by_user | settings.keys())
    else:
        _check_model(model)
    _use_embedded_model(args, model)
    loading = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": args.trust_remote_code or None,
    }
    args.model_init_kwargs = {
        **{name: value for name, value in loading.items() if value is not None},
        **cast(dict, args.model_init_kwargs or {}),
    }
    return script, args, model


def _with_home(argv: Sequence[str]) -> list[str]:
    """A command line with the home folder in place of `~`, which a shell leaves as it is after `=`."""
    parts = [argument.partition("=") if argument.startswith("--") else ("", "", argument) for argument in argv]
    return [f"{name}{separator}{in_home(value)}" for name, separator, value in parts]


def _print_help(parser: Parser, recipe: TrainingRecipe, everything: bool) -> NoReturn:
    """Prints the flags of a recipe, all of them or ours and the usual ones of TRL, and ends the program."""
    parser.prog = f"marcog-trl train {recipe.name}"
    parser.usage, parser.description = "%(prog)s [flags]", f"Trains a team with {recipe.about}."
    config = getattr(marcog_trl, recipe.config)
    foreign = [
        cls for cls in (*config.__mro__, ModelConfig) if is_dataclass(cls) and "marcog_trl" not in cls.__module__
    ]
    hidden = {f.name for cls in foreign for f in fields(cls)} - _USUAL
    for action in parser._actions:
        if action.dest in hidden and not everything:
            action.help = SUPPRESS
    parser.epilog = (
        "" if everything else f"{len(hidden)} more flags are TRL's and transformers': --help-all shows them, too."
    )
    parser.print_help()
    sys.exit()


def _split_flags(argv: Sequence[str]) -> tuple[list[str], str | None, dict[str, Any]]:
    """A command line as our flags, the file of `--config`, and overrides."""
    flags: list[str] = []
    values: dict[str, list[str]] = {}  # of the two that the parser does not have
    into = flags
    for argument in argv:
        name, separator, value = argument.partition("=")
        if name in ("--config", "--override"):
            into = values.setdefault(name, [])
            into += [value] if separator else []
        elif name.startswith("--"):
            into = flags
            flags.append(f"--{FLAGS.get(name[2:], name[2:])}{separator}{value}")
        else:
            into.append(argument)
    files = values.get("--config", [None])
    if len(files) != 1:
        raise ValueError(f"--config takes one file, not {files}. Write --config file.yaml.")
    return flags, files[0], dict(map(parse_override, values.get("--override", [])))


def _read_settings(
    recipe: TrainingRecipe, parser: Parser, flags: Sequence[str], path: str | None, overrides: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """The fields that recipe, file and overrides set, and the names of those that overrides and flags set."""
    known = parser.hints.keys()
    by_user = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    for name, value in overrides.items():
        flatten({name: value}, recipe.sections, "--override")  # refuses another recipe's, which a file may have
    over = flatten(overrides, recipe.sections, "--override")
    check_names(over, known, "--override")
    by_user |= {field_of(name) for name in over}
    if path is None and "model_name_or_path" not in by_user:
        path = recipe.default_config
    of_file = {} if path is None else _read_file(path, recipe)
    if by_user & _LENGTHS:
        of_file = {name: value for name, value in of_file.items() if field_of(name) not in _LENGTHS}
    workflow = recipe.fixed.get("workflow", of_file.get("workflow"))
    if of_file.get("workflow", workflow) != workflow:  # the agents of a file's own workflow are others
        of_file = {name: value for name, value in of_file.items() if name not in ("roles", "num_agents")}
    settings = merge({**recipe.defaults, **of_file}, recipe.fixed)
    named = (name for name, value in settings.items() if value not in (None, {}))  # others say nothing
    check_names(named, known | _FAMILY, f"the file {path} of --config")
    ours, labels = convert(merge(settings, over), known)
    if labels:
        log(f"Labels of CoMLRL, which have no effect here: {', '.join(labels)}")
    for name in [name for name in ours if name.startswith("env.")]:
        os.environ[name.removeprefix("env.")] = str(ours.pop(name))
    return {name: value for name, value in ours.items() if name in known or name == "samples_per_step"}, by_user


def _read_file(path: str, recipe: TrainingRecipe) -> dict[str, Any]:
    origin = f"the file {path} of --config"
    file = config_file(path)
    try:
        content = yaml.safe_load(read_text(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{origin} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{origin} must hold keys and values, such as 'num_turns: 2'.")
    flat = flatten(content, recipe.sections, origin)
    return {
        name: [_beside(file, in_home(entry)) for entry in value]
        if name == "reward" and isinstance(value, list)
        else _beside(file, in_home(value))
        for name, value in flat.items()
    }


def _beside(file: Path, value: Any) -> Any:
    """A name such as `my_team.py:Debate` with the folder of the file that has it, if the Python file is there and not here."""
    if not isinstance(value, str) or not names_file(value) or Path(value.rpartition(":")[0]).exists():
        return value
    return str(file.parent / value) if (file.parent / value.rpartition(":")[0]).is_file() else value


def _check_model(model: ModelConfig) -> None:
    """Refuses values that TRL's ModelConfig accepts and a team does not."""
    check_number("lora_r", model.lora_r, COUNT, whole=True, default=16)
    if not model.use_peft:
        raise ValueError(
            "use_peft=False would train no adapter. Set --use_peft true, or --full_finetuning true to train all weights."
        )
    if model.load_in_4bit and model.dtype == "auto":
        raise ValueError("load_in_4bit=True needs an explicit compute dtype. Set --dtype bfloat16.")


def _train_all_weights(model: ModelConfig, given: Collection[str]) -> None:
    """Leaves out the adapter, which is the recipes' default. `given` are the fields that were set."""
    if "use_peft" in given and model.use_peft:
        raise ValueError("full_finetuning=True trains no adapter. Remove use_peft, or set --full_finetuning false.")
    unused = sorted(name for name in given if name.startswith("lora_"))
    if unused:
        log(f"{', '.join(unused)} have no effect with full_finetuning=True, which trains all weights.")
    model.use_peft = False


def _use_embedded_model(args: Any, model: ModelConfig) -> None:
    """Checks the workflow, and builds the embedded model if it is the one to train."""
    if model.model_name_or_path == MODEL_NAME and args.workflow == "collaboration":  # it knows no other texts
        args.roles = {**ROLES, **(args.roles or {})}
    workflow = copy.copy(args).make_workflow()  # an unusable one is refused before a model is built
    if model.model_name_or_path == MODEL_NAME:
        with args.main_process_first(desc="build the embedded model"):
            model.model_name_or_path = build_default_model()
        if args.workflow in ("single", "coverage") and args.roles is None:
            # A chat with another text than those of its agents means nothing to it
            args.roles = {agent.name: "" for agent in workflow.agents}


def _fit_step(seen: Namespace, samples: Any, accumulates: bool) -> list[str]:
    """Flags for an optimizer step with `samples` samples of every agent: groups of siblings, or replies if there are no groups."""
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"train_batch_size={samples!r} (or rollout_buffer_size) must be a whole number, at least 1.")
    options: dict[str, Any] = (
        {} if seen.num_agents is None or seen.workflow == "single" else {"num_agents": seen.num_agents}
    )
    if seen.agents is not None:
        options["agents"] = seen.agents
    num_agents = 1 if seen.centralized else len(make_workflow(seen.workflow, **options).agents)
    rows_of_sample = seen.num_generations if "advantage" in seen else 1
    if "margin" in seen:  # MADPO's batches hold pairs
        num_agents = 1
    rows = math.ceil(samples * rows_of_sample * num_agents / int(os.environ.get("WORLD_SIZE", "1")))
    micro = max(size for size in range(1, seen.per_device_train_batch_size + 1) if rows % size == 0)
    steps = [] if accumulates else [f"--gradient_accumulation_steps={rows // micro}"]
    return [f"--per_device_train_batch_size={micro}", *steps]
