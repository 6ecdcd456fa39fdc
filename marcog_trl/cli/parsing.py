"""Reads the command lines of recipes: flags, `--config file.yaml` and `--override key=value`."""

from __future__ import annotations

import copy
import math
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import yaml
from trl import ModelConfig, TrlParser

import marcog_trl
from marcog_trl.checks import COUNT, Range, check_number
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.comlrl import (
    ANY_RECIPE,
    RECIPES,
    SECTIONS,
    SYNONYMS,
    check,
    convert,
    field_of,
    flatten,
    implied,
    nearest_setting,
    split,
)
from marcog_trl.cli.endings import say
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.embedded import MODEL_NAME, ROLES, build_default_model
from marcog_trl.embedded_bugs import BUGS_MODEL_NAME, build_bugs_model
from marcog_trl.preferences.iterative_config import IterativeMADPOConfig
from marcog_trl.preferences.marlhf_config import IterativeMARLHFConfig
from marcog_trl.trainers.config import MultiAgentConfig, MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig
from marcog_trl.workflows import make_workflow


BARE = object()  # the value of a flag that is given without one
# A file serves all recipes, so it may hold the fields of each of these
RECIPE_OF: dict[type, str] = {
    MultiAgentGRPOConfig: "train_magrpo.py",
    MultiAgentPPOConfig: "train_ppo.py",
    SHPPOConfig: "train_shppo.py",
    IterativeMADPOConfig: "train_madpo.py",
    IterativeMARLHFConfig: "train_marlhf.py",
}
_LENGTHS = {"num_train_epochs", "max_steps", "num_steps"}


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows the defaults of flags."""


class _OneLineParser(TrlParser):
    def __init__(self, dataclass_types: tuple[type, ...], **options: Any):
        # An abbreviation changes its meaning when a flag is added
        super().__init__(cast(Any, dataclass_types), allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


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
    structured = text.lstrip().startswith(("[", "{"))
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if structured:
            raise ValueError(
                f"--override {argument} is not a valid YAML list. Write {name}=[1.5,0.5], for example."
            ) from error
        return name, text
    if text == "None":
        return name, None
    # YAML would turn `no` into False, and text that looks like a date or has a colon into other types
    read_as = (str, int, float, type(None), *((list, dict) if structured else ()))
    if not isinstance(value, read_as) or (isinstance(value, bool) and text.lower() not in ("true", "false")):
        return name, text
    return name, value


def read_arguments(
    cls: type, argv: Sequence[str] | None = None, prog: str | None = None, description: str | None = None
) -> Any:
    """
    Reads a command line into a dataclass, whose fields are flags and keys of the file of `--config`.

    Args:
        cls (`type`): The dataclass.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        prog, description (`str`, *optional*): What `--help` calls the program, and says before the flags.

    Raises:
        ValueError: If a flag is unknown (the error suggests the nearest one), a value has the wrong type, or the file cannot
            be read.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[-1:] == ["--config"]:
        raise ValueError("--config needs a file. Write --config file.yaml.")
    parser = _OneLineParser((cls,), prog=prog, description=description, formatter_class=_Help)
    known = [f.name for f in fields(cls)]
    for argument in argv:
        name = argument.partition("=")[0]
        if name.startswith("--") and name != "--config" and name not in parser._option_string_actions:
            raise _unknown_flag(argument, known)
    try:
        arguments, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The file of --config cannot be read: {' '.join(str(error).split())}") from error
    if rest:
        raise _unknown_flag(rest[0], known)
    return arguments


def _unknown_flag(argument: str, known: Collection[str]) -> ValueError:
    if not argument.startswith("--"):
        return ValueError(f"{argument!r} belongs to no flag. Write --flag value.")
    name = argument.removeprefix("--").partition("=")[0]
    recipes = [recipe for cls, recipe in RECIPE_OF.items() if name in {f.name for f in fields(cls)}]
    if recipes:
        return ValueError(f"--{name} is a flag of {' and '.join(recipes)}, not of this recipe. Remove it.")
    near = nearest_setting(name, known)
    return ValueError(f"unknown flag --{name}." + (near and f" Did you mean --{near}?"))


def read_training_arguments(
    recipe: TrainingRecipe, argv: Sequence[str] | None = None
) -> tuple[TeamArguments, Any, ModelConfig]:
    """
    Reads the command line of a training recipe.

    Every field is a flag. `--config file.yaml` and `--override section.key=value ...` take our fields, and the names of CoMLRL
    (see `comlrl.FIELDS`). The command line wins over the file, and within either, what comes later wins. Without `--config`
    and without a model, the recipe's default file applies.

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
    argv = sys.argv[1:] if argv is None else list(argv)
    classes = (TeamArguments, getattr(marcog_trl, recipe.config), ModelConfig)
    parser = _OneLineParser(classes)
    # A LoRA on all linear layers; with dropout, the ratio of the first update would differ from 1
    parser.set_defaults(use_peft=True, lora_target_modules=["all-linear"], lora_dropout=0.0)
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    ours, environment = _read_settings(recipe, argv, {f.name for cls in classes for f in fields(cls)})
    script, args, model = _construct(parser, ours, classes)
    if "wandb" in args.report_to:
        os.environ |= environment
        if "WANDB_DIR" in environment:
            Path(environment["WANDB_DIR"]).mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
    if isinstance(args, MultiAgentConfig) and args.full_finetuning:
        _train_all_weights(model, ours)
    else:
        _check_model(model, parser)
    if model.model_name_or_path == MODEL_NAME and args.workflow == "collaboration":  # it knows no other texts
        args.roles = {**ROLES, **cast(dict, args.roles or {})}
    copy.copy(args).make_workflow()  # an unusable one is refused before a model is built
    if model.model_name_or_path in (MODEL_NAME, BUGS_MODEL_NAME):
        with args.main_process_first(desc="build the embedded model"):
            build = build_default_model if model.model_name_or_path == MODEL_NAME else build_bugs_model
            model.model_name_or_path = build()
        if args.workflow == "single" and args.roles is None:
            args.roles = {"solver": ""}  # a chat with another text than those of its agents means nothing to it
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


def _read_settings(
    recipe: TrainingRecipe, argv: Sequence[str], known: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields that command line, file and recipe set, and variables of the environment."""
    sections = (*recipe.sections, ANY_RECIPE)
    given, config = _read_flags(argv, known, sections)
    fields_given = {field_of(name) for name in given if name not in SECTIONS}
    names_model = "model_name_or_path" in fields_given or isinstance(given.get("agents"), list)
    path = config or (None if names_model else recipe.default_config)
    of_file = {} if path is None else _read_file(Path(path), known, sections)
    settings: Mapping[str, Any] = {}
    for source in (recipe.defaults, implied(of_file), _drop_replaced(of_file, given), implied(given), given):
        settings = _merge(settings, source)
    ours, environment, labels = convert(settings, known)
    if labels:
        say(f"Labels of CoMLRL, which have no effect here: {', '.join(labels)}")
    ours = {name: value for name, value in ours.items() if name in known or name == "samples_per_step"}
    _fix(ours, recipe, fields_given)
    return ours, environment


def _check_model(model: ModelConfig, parser: TrlParser) -> None:
    """Refuses values that TRL's ModelConfig accepts and a team does not."""
    for name, allowed in (("lora_r", COUNT), ("lora_alpha", COUNT), ("lora_dropout", Range(0, 1, below=True))):
        default = parser.get_default(name)
        check_number(name, getattr(model, name), allowed, whole=isinstance(default, int), default=default)
    if not model.use_peft:
        raise ValueError(
            "use_peft=False would train no adapter. Set --use_peft true, or --full_finetuning true to train all weights."
        )
    if model.load_in_4bit and model.dtype == "auto":
        raise ValueError("load_in_4bit=True needs an explicit compute dtype. Set --dtype bfloat16.")


def _train_all_weights(model: ModelConfig, given: Mapping[str, Any]) -> None:
    """Leaves out the adapter, which is the recipes' default. `given` has the fields that were set."""
    if given.get("use_peft"):
        raise ValueError("full_finetuning=True trains no adapter. Remove use_peft, or set --full_finetuning false.")
    unused = sorted(name for name in given if name.startswith("lora_"))
    if unused:
        say(f"{', '.join(unused)} have no effect with full_finetuning=True, which trains all weights.")
    model.use_peft = False


def _read_flags(
    argv: Sequence[str], known: Collection[str], sections: Sequence[str]
) -> tuple[dict[str, Any], str | None]:
    """Settings of the command line, in order, and the file of `--config`."""
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
    """Settings of a YAML file, without those that only other recipes read."""
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
    algorithms = {split(name)[0] for name in settings} & set(RECIPES)
    if algorithms and not algorithms & set(sections):
        raise ValueError(
            f"{origin} has the section {min(algorithms)!r} of {RECIPES[min(algorithms)]}, and none of this recipe, such as "
            f"{sections[0]!r}. Run that recipe, or rename the section."
        )
    settings = {name: value for name, value in settings.items() if split(name)[0] not in algorithms - set(sections)}
    family = {f.name for cls in RECIPE_OF for f in fields(cls)}
    for name in settings:
        check(name, {*known, *family}, sections, origin)
    return settings


def _drop_replaced(of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings, without those that the command line replaces under another name."""
    fields_given = {field_of(name) for name in given if name not in SECTIONS}
    emptied = {name for name, value in given.items() if name in SECTIONS and value is None}
    lengths = _LENGTHS if fields_given & _LENGTHS else set()
    return {
        name: value
        for name, value in of_file.items()
        if split(name)[0] not in emptied and (name in SECTIONS or field_of(name) not in lengths)
    }


def _fix(ours: dict[str, Any], recipe: TrainingRecipe, fields_given: Collection[str]) -> None:
    """Replaces settings of a file by the recipe's fixed settings."""
    fixed = recipe.fixed.get("workflow")
    if fixed and ours.get("workflow", fixed) != fixed and "roles" not in fields_given:
        ours.pop("roles", None)  # the agents of a file's own workflow are others
    for name, value in recipe.fixed.items():
        if name in fields_given and str(ours.get(name, value)) != str(value):
            raise ValueError(
                f"{name}={ours[name]} does not fit this recipe, which has {name}={value}. Use {recipe.elsewhere}."
            )
        ours[name] = value
    of_file = "workflow" in recipe.fixed and "num_agents" not in fields_given
    if ours.get("workflow") == "single" and (of_file or str(ours.get("num_agents")) == "1"):
        ours.pop("num_agents", None)  # this workflow always has one agent, and takes no number


def _merge(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both in order, so that the later setting comes last, also if it has another name for the same field."""
    return {name: value for name, value in settings.items() if name not in later} | dict(later)


def _construct(parser: TrlParser, settings: dict[str, Any], classes: tuple[type, ...]) -> tuple[Any, ...]:
    """The dataclasses with these settings, converted and checked like flags."""
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
    """Flags for an optimizer step with `samples` samples of every agent: groups of siblings, or replies if there are no groups."""
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"train_batch_size={samples!r} (or rollout_buffer_size) must be a whole number, at least 1.")
    options: dict[str, Any] = {} if seen.num_agents is None else {"num_agents": seen.num_agents}
    num_agents = 1 if seen.centralized else len(make_workflow(seen.workflow, **options).agents)
    rows_of_sample = seen.num_generations if "advantage" in seen else 1
    if "margin" in seen:  # MADPO's batches hold pairs
        num_agents = 1
    rows = math.ceil(samples * rows_of_sample * num_agents / int(os.environ.get("WORLD_SIZE", "1")))
    micro = max(size for size in range(1, seen.per_device_train_batch_size + 1) if rows % size == 0)
    steps = [] if accumulates else [f"--gradient_accumulation_steps={rows // micro}"]
    return [f"--per_device_train_batch_size={micro}", *steps]
