"""
Converts settings under the names of CoMLRL's code-generation experiments to the fields of this package.

CoMLRL writes settings in sections (`magrpo.num_turns`, `agent_model.name`). Here they are one flat mapping with dots in its
keys, in which later settings win. The tables say what each key becomes. This module reads no command line and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from marcog_trl.checks import nearest
from marcog_trl.cli import comlrl_preferences as preferences


# Section of an algorithm -> the recipe that reads it
RECIPES = {
    "grpo": "train_grpo.py",
    **dict.fromkeys(("magrpo", "marloo", "maremax", "mareinforce"), "train_magrpo.py"),
    **dict.fromkeys(("ac", "iac"), "train_iac.py"),
    "maac": "train_maac.py",
    "ppo": "train_ppo.py",
    "shppo": "train_shppo.py",
    **dict.fromkeys(preferences.SECTIONS, "train_madpo.py"),
    **dict.fromkeys(preferences.MARLHF_SECTIONS, "train_marlhf.py"),
    "trainer": "every recipe",
}
ANY_RECIPE = "trainer"
# Section of an algorithm -> the settings that its name stands for
IMPLIED: dict[str, dict[str, str]] = {
    "marloo": {"advantage": "rloo"},
    "maremax": {"advantage": "max"},
    "mareinforce": {"advantage": "none"},
    "ac": {"workflow": "single"},
    **{section: {"reference": "none"} for section in preferences.SECTIONS},  # CoMLRL's MADPO has no reference policy
}
# Sections in which batch sizes count problems, as in CoMLRL; in the others they count replies
COUNT_PROBLEMS = frozenset(RECIPES) - {"ppo", "shppo", "trainer"}

# Flags of CoMLRL's scripts, and other keys that may stand outside of a section
SYNONYMS = {
    "base_model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "lora_rank": "lora_r",
    "save_dir": "output_dir",
    "output_base_dir": "output_dir",
    "num_epochs": "num_train_epochs",
    "turn_gradient_weights": "turn_weights",
}

# Section -> key -> our field. Our own field names are accepted in every section, and without one.
FIELDS: dict[str, dict[str, str]] = {
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
    "wandb": {**dict.fromkeys(("project", "entity", "dir", "tags"), "report_to"), "name": "run_name"},
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
    "preferences": preferences.FIELDS,
    "marlhf": preferences.MARLHF_FIELDS,
}
_TABLES = ("", "algorithm", "preferences", "marlhf")  # of which a section is only that of an algorithm
SECTIONS = [name for name in FIELDS if name not in _TABLES] + ["model", *RECIPES]
_TABLE_OF = {
    **{name: name for name in FIELDS},
    "model": "agent_model",
    **dict.fromkeys(RECIPES, "algorithm"),
    **dict.fromkeys(preferences.SECTIONS, "preferences"),
    **dict.fromkeys(preferences.MARLHF_SECTIONS, "marlhf"),
}

# Our field -> values with another name in CoMLRL
VALUES: dict[str, dict[Any, Any]] = {
    "advantage": {"raw": "none"},
    "advantage_normalization": {True: "agent", False: "none"},
    "centralized": {"centralized": True, "decentralized": False},
    "cliprange_value": {None: "inf"},
    "dataset_name": {"openai/openai_humaneval": "humaneval"},  # also found without network
    "joint_mode": {"aligned": "align"},
    **preferences.VALUES,
    "reward_scale": {None: 1.0},
    "reward_shift": {None: 0.0},
    "scale_rewards": {True: "group", False: "none"},
    "top_k": {None: 0},
    "visible_tests": {0: None, "all": None},
}

# Keys that only label a run: accepted, and without effect
RUN_LABELS = {"agent_model.type", "agent_model.max_length", "dataset.private"} | {
    f"critic_model.{key}" for key in ("type", "temperature", "top_p", "top_k", "max_length", "torch_dtype", "dtype")
}
RUN_LABELS |= {f"preferences.{key}" for key in preferences.LABELS}
RUN_LABELS |= {f"marlhf.{key}" for key in preferences.MARLHF_LABELS}

# Keys that we do not support -> the values that change nothing, which we accept, and what to do instead
_HISTORY = "Agents always see their whole history. Remove the option."
_TOKENIZER = "The tokenizer has its own. Remove the option."
_HEAD = "The value head is as wide as the policy's hidden states. Remove the option."
_ONE_DEVICE = (None, "cuda:0", ["cuda:0"], ["cuda:0", "cuda:0"])
_PLACED = (
    "The team shares one model, and accelerate chooses its device. Run `accelerate launch --num_processes 2` for two."
)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "agent_model.special_tokens": ((None, {}), _TOKENIZER),
    "agent_model.model_kwargs": ((None, {}), "Set agent_model.torch_dtype and model_init_kwargs."),
    "agent_model.tokenizer_kwargs": ((None, {}), "The tokenizer is loaded as it was saved. Remove the option."),
    "critic_model.special_tokens": ((None, {}), _TOKENIZER),
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
    "algorithm.critic_value_head_hidden_dim": ((None,), _HEAD),
    "algorithm.value_head_hidden_dim": ((None,), _HEAD),
    "algorithm.eval_batch_size": ((None, 1), "Set per_device_eval_batch_size, which counts replies."),
}
UNSUPPORTED |= {
    f"{table}.{name}": UNSUPPORTED[f"algorithm.{name}"]
    for table in ("preferences", "marlhf")
    for name in (
        "external_prompt_passthrough", "parallel_training", "agent_devices", "reference_devices", "eval_batch_size"
    )
}  # fmt: skip
UNSUPPORTED |= {f"preferences.{key}": what for key, what in preferences.UNSUPPORTED.items()}
UNSUPPORTED |= {f"marlhf.{key}": what for key, what in preferences.MARLHF_UNSUPPORTED.items()}
UNSUPPORTED_SECTIONS = {
    "tokenizer": "The tokenizer is loaded as it was saved. Remove the section.",
    "ippo": "Its newer name is 'iac'. Rename the section.",
    "mappo": "Its newer name is 'maac'. Rename the section.",
}
_CODE_SETS = ("humaneval", "coophumaneval", "mbpp")


def _samples(value: Any, get: Callable) -> dict[str, Any]:
    sizes = (get("train_batch_size"), get("rollout_buffer_size"))
    return next(({"samples_per_step": size} for size in sizes if size is not None), {})


def _agents(value: Any, get: Callable) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, int):
        return {"num_agents": value}
    if isinstance(value, list) and value and len(set(map(str, value))) == 1:
        return {"model_name_or_path": value[0], "num_agents": len(value)}
    raise ValueError(
        f"agents={value!r} is not supported: the team shares one model. Set agent_model.name, and agents=2 for two agents."
    )


# Keys that set several fields, or whose meaning depends on other keys of their section, which `get` returns
RULES: dict[str, Callable[[Any, Callable], dict[str, Any]]] = {
    "agents": _agents,
    "algorithm.train_batch_size": _samples,
    "algorithm.rollout_buffer_size": _samples,
    # In CoMLRL, every joint action of a turn branches
    "algorithm.joint_mode": lambda value, get: {"joint_mode": value, "turn_tree": True},
    "algorithm.use_separate_critic": lambda value, get: {"critic_backprop": not value},
    "algorithm.reference_kl_enabled": lambda value, get: {"beta": get("reference_kl_coef", 0.1) if value else 0.0},
    "algorithm.reference_kl_coef": lambda value, get: {} if get("reference_kl_enabled") is False else {"beta": value},
    "algorithm.eval_interval": lambda value, get: (
        {"eval_strategy": "steps", "eval_steps": value} if value else {"eval_strategy": "no"}
    ),
    **{f"preferences.{name}": _samples for name in ("train_batch_size", "rollout_buffer_size")},
    **{f"preferences.{key}": rule for key, rule in preferences.RULES.items()},
    **{f"marlhf.{name}": _samples for name in ("train_batch_size", "rollout_buffer_size")},
    **{f"marlhf.{key}": rule for key, rule in preferences.MARLHF_RULES.items()},
    "reward_processor.enabled": lambda value, get: {} if value else {"reward_scale": 1.0, "reward_shift": 0.0},
    "reward_processor.scale_factor": lambda value, get: {"reward_scale": value} if get("enabled", True) else {},
    "reward_processor.shift": lambda value, get: {"reward_shift": value} if get("enabled", True) else {},
    "wandb.name": lambda value, get: {} if value is None else {"report_to": "wandb", "run_name": str(value)},
    # Checked in the end, when all other settings are known
    **dict.fromkeys(("critics", "critic_model.name", "output.save_path", "dataset.type"), lambda value, get: {}),
}
# Keys that become variables of the environment
WANDB_VARIABLES = {f"wandb.{key}": f"WANDB_{key.upper()}" for key in ("project", "entity", "dir", "tags")}


class Converted(NamedTuple):
    """
    Settings of this package.

    Args:
        fields (`dict[str, Any]`): Field to value, with `samples_per_step` for a batch size that counts groups of replies of
            every agent.
        environment (`dict[str, str]`): Variables of the environment.
        labels (`list[str]`): Keys that only label a run in CoMLRL, and have no effect here.
    """

    fields: dict[str, Any]
    environment: dict[str, str]
    labels: list[str]


def convert(settings: Mapping[str, Any], known: Collection[str]) -> Converted:
    """
    Converts settings to the fields of this package.

    Args:
        settings (`Mapping[str, Any]`): `section.key`, or a key alone, to value. [`check`] has accepted all names.
        known (`Collection[str]`): Fields that exist.

    Returns:
        [`Converted`]: Fields, variables of the environment, and labels.

    Raises:
        ValueError: If a value is not supported.
    """
    ours: dict[str, Any] = {}
    environment: dict[str, str] = {}
    labels = [name for name in settings if _full(name) in RUN_LABELS]
    for name, value in settings.items():
        section, key = split(name)
        full = _full(name)

        def get(key: str, default: Any = None, section: str = section) -> Any:
            return settings.get(f"{section}.{key}", default)

        if full in RUN_LABELS or name in SECTIONS:
            continue
        if full in UNSUPPORTED:
            accepted, instead = UNSUPPORTED[full]
            if value not in accepted:
                raise ValueError(f"{name}={value!r} is not supported. {instead}")
        elif full in WANDB_VARIABLES:
            if value is not None:
                ours["report_to"] = "wandb"
                environment[WANDB_VARIABLES[full]] = (
                    ",".join(map(str, value)) if isinstance(value, list) else str(value)
                )
        elif full in RULES:
            ours |= RULES[full](value, get)
        elif key == "per_device_train_batch_size" and section in COUNT_PROBLEMS:
            _check_counts_problems(name, value)
            ours |= _samples(value, get) or {"samples_per_step": value}
        else:
            ours[key if key in known else field_of(name)] = value
    for name, value in ours.items():
        if not isinstance(value, list | dict):
            ours[name] = VALUES.get(name, {}).get(value, value)
    _check_together(settings, ours)
    if settings.get("dataset.type") is not None:
        ours.setdefault("reward", ["collaboration_reward"])
    return Converted(ours, environment, labels)


def _check_counts_problems(name: str, value: Any) -> None:
    """CoMLRL counts problems here and allows 1 only; any other value may be meant to count replies."""
    if value != 1:
        raise ValueError(
            f"{name}={value!r} is ambiguous: CoMLRL counts problems, and this package counts replies. Set "
            f"{split(name)[0]}.train_batch_size for problems, or per_device_train_batch_size outside the section for replies."
        )


def _check_together(settings: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses settings that contradict others."""
    policy = ours.get("model_name_or_path")
    for name in ("critics", "critic_model.name"):
        critics = settings.get(name) or []
        if any(critic != policy for critic in (critics if isinstance(critics, list) else [critics])):
            raise ValueError(
                f"{name}={critics!r} is not supported: the critic is a head on the policy, {policy!r}. Use that name, or "
                f"--override {name.partition('.')[0]}=null."
            )
    path, saves = settings.get("output.save_path"), str(ours.get("save_final_model", True)).lower() == "true"
    if saves and path not in (None, ours.get("output_dir")):
        raise ValueError(
            f"output.save_path={path!r} is not supported: the team is saved in output.base_dir. Remove output.save_path."
        )
    kind = settings.get("dataset.type")
    if kind == "classeval":
        raise ValueError(
            "dataset.type='classeval' is not supported. Remove it, and set workflow: classeval and reward: [class_reward]."
        )
    if kind not in (None, *_CODE_SETS):
        raise ValueError(
            f"dataset.type={kind!r} is unknown. Use one of {', '.join(_CODE_SETS)}."
            + _did_you_mean(nearest_setting(str(kind), _CODE_SETS), repr)
        )


# Names


def flatten(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """
    Settings in sections, without sections, or both, as one flat mapping.

    Args:
        mapping (`Mapping`): What a YAML file holds.

    Returns:
        `dict[str, Any]`: `section.key`, or the key alone, to value. An empty section stays, as `None`.

    Raises:
        ValueError: If a section holds a value instead of keys.
    """
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in SECTIONS or value is None:
            flat[str(name)] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": below for key, below in value.items()}
        else:
            example = next(iter(_keys(name)))
            raise ValueError(
                f"{name}={value!r}: {name!r} is a section, and needs keys. Write {name}.{example}=..., for example."
            )
    return flat


def implied(names: Iterable[str]) -> dict[str, Any]:
    """The settings that the sections of algorithms among the names stand for."""
    return {key: value for name in names for key, value in IMPLIED.get(split(name)[0], {}).items()}


def split(name: str) -> tuple[str, str]:
    """Section and key of a name; the section is empty where there is none."""
    section, dot, key = name.partition(".")
    return (section, key) if dot else ("", section)


def field_of(name: str) -> str:
    """The field that a name sets: the first one, if it sets several."""
    section, key = split(name)
    return FIELDS[_TABLE_OF[section]].get(key) or SYNONYMS.get(key, key)


def _full(name: str) -> str:
    """A name as the tables have it: with `algorithm` for the section of any algorithm."""
    section, key = split(name)
    return f"{_TABLE_OF[section]}.{key}" if section else key


def _keys(section: str) -> list[str]:
    """The keys of a section that are not fields of this package."""
    table = _TABLE_OF[section]
    others = (name.partition(".") for name in (*RUN_LABELS, *UNSUPPORTED))
    return [*FIELDS[table], *(key for own, _, key in others if own == table)]


def check(name: str, known: Collection[str], sections: Collection[str], origin: str) -> None:
    """
    Refuses an unknown name.

    Args:
        name (`str`): `section.key`, or a key alone.
        known (`Collection[str]`): Fields that exist.
        sections (`Collection[str]`): Sections of algorithms that the recipe reads.
        origin (`str`): Where the name was found.

    Raises:
        ValueError: If section or key is unknown; suggests the nearest one.
    """
    if name in SECTIONS:
        return
    section, key = split(name)
    if section in RECIPES and section not in sections:
        raise ValueError(
            f"{origin} has {name!r}, but the section {section!r} belongs to {RECIPES[section]}. Write "
            f"{next(iter(sections))}.{key}, or run that recipe."
        )
    if (section or key) in UNSUPPORTED_SECTIONS:
        raise ValueError(f"{origin} has the section {section or key!r}. {UNSUPPORTED_SECTIONS[section or key]}")
    if section not in ("", *SECTIONS):
        near = nearest_setting(section, [s for s in SECTIONS if s not in RECIPES or s in sections])
        raise ValueError(f"{origin} has an unknown section {section!r} in {name!r}." + _did_you_mean(near, repr))
    if _full(name) in RUN_LABELS or _full(name) in UNSUPPORTED or field_of(name) in known:
        return
    if key in FIELDS[_TABLE_OF[section]]:
        raise ValueError(
            f"{origin} has {name!r}, which sets {field_of(name)}, but this recipe has no {field_of(name)}. Remove the key."
        )
    near = nearest_setting(key, [*_keys(section), *known, *SYNONYMS])
    raise ValueError(
        f"{origin} has an unknown key {name!r}." + _did_you_mean(near and f"{section}.{near}".removeprefix("."))
    )


def nearest_setting(name: str, known: Iterable[str]) -> str:
    """Returns our field for a name of CoMLRL, or the closest known name, or `""`."""
    known = list(known)
    renamed = next((table[name] for table in FIELDS.values() if name in table), None)
    return renamed if renamed in known else nearest(name, known)


def _did_you_mean(near: str, show: Callable[[str], str] = str) -> str:
    return near and f" Did you mean {show(near)}?"
