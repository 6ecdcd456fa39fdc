"""
Settings under the names that users of CoMLRL's code-generation experiments write, brought to this package's own.

They come in sections (`magrpo.num_turns`, `agent_model.name`), here as one flat mapping with dots in its keys; what is
given later wins. This module knows names and values only: it reads no command line and no file, and loads nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml


# Section of an algorithm -> what it settles beside its keys
ALGORITHMS: dict[str, dict[str, str]] = {
    "grpo": {},
    "magrpo": {},
    "marloo": {"advantage": "rloo"},
    "maremax": {"advantage": "max"},
    "mareinforce": {"advantage": "none"},
    "ac": {"workflow": "single"},
    "iac": {},
    "maac": {},
    "ppo": {},
    "shppo": {},
    "trainer": {},
}
ANY_RECIPE = "trainer"  # the section of whichever algorithm the recipe trains with
RECIPES = {
    "grpo": "train_grpo.py",
    **dict.fromkeys(("magrpo", "marloo", "maremax", "mareinforce"), "train_magrpo.py"),
    **dict.fromkeys(("ac", "iac"), "train_iac.py"),
    "maac": "train_maac.py",
    "ppo": "train_ppo.py",
    "shppo": "train_shppo.py",
    "trainer": "every recipe",
}
# Sections in which a batch size counts problems, as in CoMLRL; in the others it counts replies
_COUNT_PROBLEMS = frozenset(ALGORITHMS) - {"ppo", "shppo", "trainer"}
# Sections of CoMLRL's that have no counterpart
_PREFERENCES = "Training on preferences (MADPO, MARLHF) is not supported. Use train_magrpo.py and a section 'magrpo'."
_UNSUPPORTED = {
    **dict.fromkeys(("madpo", "madpo_iter", "marlhf", "marlhf_iter"), _PREFERENCES),
    "tokenizer": "The tokenizer is loaded as it was saved. Remove the section.",
    "ippo": "Its newer name is 'iac'. Rename the section.",
    "mappo": "Its newer name is 'maac'. Rename the section.",
}

# Names without a section
SYNONYMS = {
    "base_model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "lora_rank": "lora_r",
    "save_dir": "output_dir",
    "output_base_dir": "output_dir",
    "num_epochs": "num_train_epochs",
    "turn_gradient_weights": "turn_weights",
}

# Section -> key -> the field that it sets. The name of a field itself works in every section, and without one.
NAMES: dict[str, dict[str, str]] = {
    "": {"agents": "num_agents", "critics": "critic"},
    "agent_model": {"name": "model_name_or_path", "torch_dtype": "dtype"},
    "critic_model": {"name": "critic"},
    "dataset": {
        "name": "dataset_name",
        "type": "reward",
        "train_split": "dataset_train_split",
        "eval_split": "dataset_test_split",
    },
    "output": {"base_dir": "output_dir", "verbose": "log_completions", "save_path": "output_dir"},
    "external": {"mode": "feedback", "sandbox_slice": "visible_tests"},
    "reward_processor": {"enabled": "reward_scale", "scale_factor": "reward_scale", "shift": "reward_shift"},
    "wandb": {
        "project": "report_to",
        "entity": "report_to",
        "name": "run_name",
        "dir": "report_to",
        "tags": "report_to",
    },
    "algorithm": {
        "agent_learning_rate": "learning_rate",
        "max_new_tokens": "max_completion_length",
        "discount": "gamma_turn",
        "turn_gradient_weights": "turn_weights",
        "termination_threshold": "early_termination_threshold",
        "train_batch_size": "gradient_accumulation_steps",
        "rollout_buffer_size": "gradient_accumulation_steps",
        "advantage_mode": "advantage",
        "advantage_normalization": "scale_rewards",
        "joint_mode": "joint_mode",
        "collaboration_mode": "centralized",
        "reference_kl_enabled": "beta",
        "reference_kl_coef": "beta",
        "value_loss_coef": "vf_coef",
        "value_clip_range": "cliprange_value",
        "use_separate_critic": "critic_backprop",
        "eval_interval": "eval_steps",
        "eval_num_samples": "eval_problems",
    },
}
SECTIONS = [name for name in NAMES if name not in ("", "algorithm")] + ["model", *ALGORITHMS]
_KINDS = {**{name: name for name in NAMES}, "model": "agent_model", **dict.fromkeys(ALGORITHMS, "algorithm")}

# Field -> values that are called otherwise there
VALUES: dict[str, dict[Any, Any]] = {
    "advantage": {"raw": "none"},
    "advantage_normalization": {True: "agent", False: "none"},
    "centralized": {"centralized": True, "decentralized": False},
    "cliprange_value": {None: "inf"},
    "dataset_name": {"openai/openai_humaneval": "humaneval"},  # also found without network
    "joint_mode": {"aligned": "align"},
    "reward_scale": {None: 1.0},
    "reward_shift": {None: 0.0},
    "scale_rewards": {True: "group", False: "none"},
    "top_k": {None: 0},
    "visible_tests": {None: 0, "all": 0},
}

# CoMLRL options that only label a run
_LABELS = {"agent_model.type", "agent_model.max_length", "dataset.private"} | {
    f"critic_model.{key}" for key in ("type", "temperature", "top_p", "top_k", "max_length", "torch_dtype", "dtype")
}
# CoMLRL options that we do not support: the values that we accept, and what to do instead
_HISTORY = "Agents always see their whole history. Remove the option."
_ONE_DEVICE = (None, "cuda:0", ["cuda:0"], ["cuda:0", "cuda:0"])
_PLACED = (
    "The team shares one model, and accelerate chooses its device. Run `accelerate launch --num_processes 2` for two."
)
_SETTLED: dict[str, tuple[tuple[Any, ...], str]] = {
    "agent_model.special_tokens": ((None, {}), "The tokenizer has its own. Remove the option."),
    "agent_model.model_kwargs": ((None, {}), "Set agent_model.torch_dtype and model_init_kwargs."),
    "agent_model.tokenizer_kwargs": ((None, {}), "The tokenizer is loaded as it was saved. Remove the option."),
    "critic_model.special_tokens": ((None, {}), "The tokenizer has its own. Remove the option."),
    "dataset.size": ((None,), "Set dataset.train_split='train[:100]', for example."),
    "dataset.eval_size": ((None,), "Set dataset.eval_split='test[:100]', for example."),
    "external.external_prompt_passthrough": ((None, False), _HISTORY),
    "external.original_prompt": ((None, True), _HISTORY),
    "external.previous_response": ((None, True), _HISTORY),
    "algorithm.external_prompt_passthrough": ((None, False), _HISTORY),
    "algorithm.parallel_training": ((None, "none", "auto"), _PLACED),
    "algorithm.agent_devices": (_ONE_DEVICE, _PLACED),
    "algorithm.critic_devices": (_ONE_DEVICE, _PLACED),
    "algorithm.reference_devices": (_ONE_DEVICE, _PLACED),
    "algorithm.critic_type": (("v",), "The critic estimates V(h). Set critic_type='v'."),
    "algorithm.critic_value_head_hidden_dim": (
        (None,),
        "The value head is as wide as the policy's hidden states. Remove the option.",
    ),
    "algorithm.value_head_hidden_dim": (
        (None,),
        "The value head is as wide as the policy's hidden states. Remove the option.",
    ),
    "algorithm.eval_batch_size": ((None, 1), "Set per_device_eval_batch_size, which counts replies."),
}
_CODE_SETS = ("humaneval", "coophumaneval", "mbpp")


def parse_override(argument: str) -> tuple[str, Any]:
    """
    An argument of `--override`.

    Args:
        argument (`str`): `key=value`. The value is read as YAML: `1`, `[1.5,0.5]`, `null`; `None` is null, too.

    Returns:
        `tuple[str, Any]`: Key and value.

    Raises:
        ValueError: If there is no `=`, or if a list is not closed.
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
    # YAML also makes something of `no`, of a date, and of a colon
    read_as = (str, int, float, type(None), *((list, dict) if structured else ()))
    if not isinstance(value, read_as) or (isinstance(value, bool) and text.lower() not in ("true", "false")):
        return name, text
    return name, value


def flatten(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """
    Settings in sections, or without, or both, as one flat mapping.

    Args:
        mapping (`Mapping`): What a YAML file holds.

    Returns:
        `dict[str, Any]`: `section.key`, or the key alone, to value. An empty section stays, as `None`.

    Raises:
        ValueError: If a section holds no keys but a value.
    """
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in SECTIONS or value is None:
            flat[str(name)] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": below for key, below in value.items()}
        else:
            raise ValueError(
                f"{name}={value!r}: {name!r} is a section, and needs keys. Write {name}.{next(iter(_keys(name)))}=..., for "
                "example."
            )
    return flat


def implied(settings: Iterable[str]) -> dict[str, Any]:
    """What the sections of algorithms among the names of settings settle."""
    return {k: value for name in settings for k, value in ALGORITHMS.get(split(name)[0], {}).items()}


def split(name: str) -> tuple[str, str]:
    """Section and key of a name; the section is empty where it has none."""
    section, dot, key = name.partition(".")
    return (section, key) if dot else ("", section)


def field_of(name: str) -> str:
    """The field that a name sets: the first one, if it sets several."""
    section, key = split(name)
    return NAMES[_KINDS[section]].get(key) or SYNONYMS.get(key, key)


def check(name: str, known: Collection[str], sections: Iterable[str], origin: str) -> None:
    """
    Refuses a name that stands for nothing.

    Args:
        name (`str`): `section.key`, or a key alone.
        known (`Collection[str]`): Fields that there are.
        sections (`Iterable[str]`): Sections of algorithms that the recipe reads.
        origin (`str`): Where the name was found.

    Raises:
        ValueError: If section or key is unknown, with the nearest that is known.
    """
    if name in SECTIONS:
        return
    section, key = split(name)
    readable = [s for s in SECTIONS if s not in ALGORITHMS or s in sections]
    if section in ALGORITHMS and section not in readable:
        raise ValueError(
            f"{origin} has {name!r}, but the section {section!r} belongs to {RECIPES[section]}. Write "
            f"{next(iter(sections))}.{key}, or run that recipe."
        )
    if (section or key) in _UNSUPPORTED:
        raise ValueError(f"{origin} has the section {section or key!r}. {_UNSUPPORTED[section or key]}")
    if section not in _KINDS or section == "algorithm":
        near = nearest(section, readable)
        raise ValueError(
            f"{origin} has an unknown section {section!r} in {name!r}." + (near and f" Did you mean {near!r}?")
        )
    if f"{_KINDS[section]}.{key}" in {*_LABELS, *_SETTLED}:
        return
    if field_of(name) in known:
        return
    if key in NAMES[_KINDS[section]]:
        raise ValueError(
            f"{origin} has {name!r}, which sets {field_of(name)}, but this recipe has no {field_of(name)}. Remove the key."
        )
    near = nearest(key, [*_keys(section), *known, *SYNONYMS])
    raise ValueError(
        f"{origin} has an unknown key {name!r}."
        + (near and f" Did you mean {f'{section}.' if section else ''}{near}?")
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """What a name was perhaps meant to be: the field that it is called elsewhere, or the most similar; else empty."""
    known = list(known)
    renamed = next((table[name] for table in NAMES.values() if name in table), None)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return renamed if renamed in known else close[0] if close else ""


def _keys(section: str) -> list[str]:
    """The keys of a section that are not fields of this package."""
    kind = _KINDS[section]
    return [*NAMES[kind], *(name.partition(".")[2] for name in (*_LABELS, *_SETTLED) if name.startswith(f"{kind}."))]


def translate(settings: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Brings settings to the fields of this package.

    Args:
        settings (`Mapping[str, Any]`): `section.key`, or a key alone, to value; all of them were checked.
        known (`Collection[str]`): Fields that there are.

    Returns:
        `tuple[dict[str, Any], dict[str, str]]`: Field to value, with `samples_per_step` for a batch size that counts groups
        of replies of every agent; and variables of the environment.

    Raises:
        ValueError: If a value is not supported.
    """
    ours: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for name, value in settings.items():
        section, key = split(name)
        kind = _KINDS[section]
        full = f"{kind}.{key}" if kind else key
        if full in _LABELS or name in SECTIONS:
            continue
        if full in _SETTLED:
            agreeing, works = _SETTLED[full]
            if value not in agreeing:
                raise ValueError(f"{name}={value!r} is not supported. {works}")
            continue
        if key == "per_device_train_batch_size" and section in _COUNT_PROBLEMS:
            sizes = (settings.get(f"{section}.{size}") for size in ("train_batch_size", "rollout_buffer_size"))
            _check_batch_of_problems(name, value)
            if all(size is None for size in sizes):
                ours["samples_per_step"] = value
            continue
        match full:
            case "agents":
                ours |= _agents(value)
            case "critics" | "critic_model.name" | "output.save_path" | "dataset.type":
                pass  # below, where all else is known
            case "algorithm.joint_mode":
                ours |= {"joint_mode": value, "turn_tree": True}  # there, every joint action branches
            case "algorithm.train_batch_size":
                if value is not None:
                    ours["samples_per_step"] = value
            case "algorithm.rollout_buffer_size":
                if settings.get(f"{section}.train_batch_size") is None:
                    ours["samples_per_step"] = value
            case "algorithm.advantage_normalization":
                ours[key if key in known else "scale_rewards"] = value
            case "algorithm.use_separate_critic":
                ours["critic_backprop"] = not value
            case "algorithm.reference_kl_enabled":
                ours["beta"] = settings.get(f"{section}.reference_kl_coef", 0.1) if value else 0.0
            case "algorithm.reference_kl_coef":
                if settings.get(f"{section}.reference_kl_enabled") is not False:
                    ours["beta"] = value
            case "algorithm.eval_interval":
                ours |= {"eval_strategy": "steps", "eval_steps": value} if value else {"eval_strategy": "no"}
            case "reward_processor.enabled":
                if not value:
                    ours |= {"reward_scale": 1.0, "reward_shift": 0.0}
            case "reward_processor.scale_factor" | "reward_processor.shift":
                if settings.get("reward_processor.enabled", True):
                    ours[field_of(name)] = value
            case "wandb.project" | "wandb.entity" | "wandb.dir" | "wandb.tags" | "wandb.name":
                if value is not None:
                    ours["report_to"] = "wandb"
                    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                    if key == "name":
                        ours["run_name"] = text
                    else:
                        environment[f"WANDB_{key.upper()}"] = text
            case _:
                ours[field_of(name)] = value
    ours = {
        name: value if isinstance(value, list | dict) else VALUES.get(name, {}).get(value, value)
        for name, value in ours.items()
    }
    _check_rest(settings, ours)
    if settings.get("dataset.type") is not None:
        ours.setdefault("reward", ["collaboration_reward"])
    return ours, environment


def _agents(value: Any) -> dict[str, Any]:
    """What `agents` says: how many there are, or a list with the model of each."""
    if value is None:
        return {}
    if isinstance(value, int):
        return {"num_agents": value}
    if isinstance(value, list) and value and len(set(map(str, value))) == 1:
        return {"model_name_or_path": value[0], "num_agents": len(value)}
    raise ValueError(
        f"agents={value!r} is not supported: the team shares one model. Set agent_model.name, and agents=2 for two agents."
    )


def _check_batch_of_problems(name: str, value: Any) -> None:
    """Refuses a batch size that counts problems in CoMLRL, which allows 1 only, and is perhaps meant to count replies."""
    if value != 1:
        raise ValueError(
            f"{name}={value!r} is ambiguous: CoMLRL counts problems, and this package counts replies. Set "
            f"{name.partition('.')[0]}.train_batch_size for problems, or per_device_train_batch_size outside the section for "
            "replies."
        )


def _check_rest(settings: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses what disagrees with other settings."""
    policy = ours.get("model_name_or_path")
    for name in ("critics", "critic_model.name"):
        critics = settings.get(name) or []
        if any(critic != policy for critic in (critics if isinstance(critics, list) else [critics])):
            raise ValueError(
                f"{name}={critics!r} is not supported: the critic is a head on the policy, {policy!r}. Use that name, or "
                f"--override {name.partition('.')[0]}=null."
            )
    path = settings.get("output.save_path")
    if (
        path is not None
        and path != ours.get("output_dir")
        and str(ours.get("save_final_model", True)).lower() == "true"
    ):
        raise ValueError(
            f"output.save_path={path!r} is not supported: the team is saved in output.base_dir. Remove output.save_path."
        )
    kind = settings.get("dataset.type")
    if kind == "classeval":
        raise ValueError(
            "dataset.type='classeval' is not supported. Remove it, and set workflow: classeval and reward: [class_reward]."
        )
    if kind is not None and kind not in _CODE_SETS:
        near = nearest(str(kind), _CODE_SETS)
        raise ValueError(
            f"dataset.type={kind!r} is unknown. Use one of {', '.join(_CODE_SETS)}."
            + (near and f" Did you mean {near!r}?")
        )
