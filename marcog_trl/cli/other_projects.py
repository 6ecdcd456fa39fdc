"""
Names and values of CoMLRL's files and flags, and of MARCOG's command lines, as those of this package.

CoMLRL writes settings in sections (`magrpo.num_turns`, `agent_model.name`). Here they are one flat mapping with dots in its
keys, in which later settings win. `TABLE` says what each key becomes, and is applied before anything is parsed. This module
reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from marcog_trl.checks import nearest
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.workflows import is_own


# Section of an algorithm -> the recipe that it is for
SECTIONS = {section: name for name, recipe in RECIPES.items() for section in recipe.sections}
# Section of an algorithm -> the settings that its name stands for
IMPLIED = {
    "marloo": {"advantage": "rloo"},
    "maremax": {"advantage": "max"},
    "mareinforce": {"advantage": "none"},
    "ac": {"workflow": "single"},
    "madpo": {"reference": "none"},  # CoMLRL's MADPO has no reference policy
    "madpo_iter": {"reference": "none"},
}


class Only(NamedTuple):
    """
    An option that this package does not have.

    Args:
        values (`tuple`): Values that change nothing, and are accepted.
        instead (`str`): What to do instead of another value.
    """

    values: tuple[Any, ...]
    instead: str


# `rule(value, get)` returns fields, and may ask `get(key, default)` for other keys of the section, or of the whole
Rule = Callable[[Any, Callable[..., Any]], dict[str, Any]]
Entry = str | Only | Rule | None


def _agents(value: Any, get: Callable) -> dict[str, Any]:
    if isinstance(value, int):
        return {"num_agents": value}
    if isinstance(value, list) and is_own(str(get("workflow", ""))):
        return {"agents": value}  # those of a program, as here
    if isinstance(value, list) and value and len(set(map(str, value))) == 1:
        return {"model_name_or_path": value[0], "num_agents": len(value)}
    raise ValueError(
        f"agents={value!r} is not supported: the team shares one model. Set agent_model.name, and agents=2 for two agents. The "
        "agents of a program need its workflow beside them, such as workflow: my_agents.py:solve."
    )


def _critic(value: Any, get: Callable) -> dict[str, Any]:
    policies = [get(name) for name in ("agent_model.name", "model.name", "model_name", "model_name_or_path")]
    critics = value if isinstance(value, list) else [value]
    if not {*critics} <= {*policies}:
        policy = next(filter(None, policies), None)
        raise ValueError(f"The critic {value!r} is not supported: it is a head on the policy, {policy!r}. Set null.")
    return {}


def _reward(value: Any, get: Callable) -> dict[str, Any]:
    sets = ("humaneval", "coophumaneval", "mbpp")
    if value not in sets:
        raise ValueError(
            f"dataset.type={value!r} is not supported. Use one of {', '.join(sets)}, or remove it, and set workflow and reward."
        )
    return {} if get("reward") else {"reward": ["collaboration_reward"]}


def _samples(value: Any, get: Callable) -> dict[str, Any]:
    return {"samples_per_step": get("train_batch_size") or get("rollout_buffer_size") or value}


def _one_problem(value: Any, get: Callable) -> dict[str, Any]:
    if value != 1:
        raise ValueError(
            f"per_device_train_batch_size={value!r} is ambiguous: CoMLRL counts problems, and this package counts replies. Set "
            "train_batch_size for problems, or per_device_train_batch_size outside the section for replies."
        )
    return _samples(value, get)


def _wandb(variable: str) -> Rule:
    def rule(value: Any, get: Callable) -> dict[str, Any]:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return {"report_to": "wandb", f"env.{variable}": text}

    return rule


def _replay(value: Any, get: Callable) -> dict[str, Any]:
    """A round has the weight (1 − λ)^age; in CoMLRL λ^age."""
    decays = {"current": 1.0, "all_history": 0.0}
    if get("preference_replay_lambda") is not None:
        decays["lambda_decay"] = 1 - get("preference_replay_lambda")
    return {"replay_decay": decays.get(value, value)}


_HISTORY = "Agents always see their whole history. Remove the option."
_COMPARED = "Episodes are compared with each other. Remove the options of comparators."
_REFERENCE = (
    "CoMLRL's MADPO does not use it. Remove the option, or set reference: initial for a reference in the loss."
)

# Section -> key -> our field; None: a label without effect; or what accepts some values, or converts several keys together.
# Our own field names are accepted in every section, and without one, as are the keys of "", which are flags, too. Keys of a
# file that are null, and have no row, are left out
TABLE: dict[str, dict[str, Entry]] = {
    "": {
        "agents": _agents,
        "critics": _critic,
        # MARCOG's flags, and CoMLRL's
        "base_model": "model_name_or_path",
        "model_name": "model_name_or_path",
        "lora_rank": "lora_r",
        "save_dir": "output_dir",
        "output_base_dir": "output_dir",
        "num_steps": "num_replies",
        "num_epochs": "num_train_epochs",
        "turn_gradient_weights": "turn_weights",
        # Our own earlier names
        "num_samples": "num_test_samples",
        "eval_problems": "num_eval_problems",
    },
    "agent_model": {
        "name": "model_name_or_path",
        "torch_dtype": "dtype",
        "model_kwargs": lambda value, get: {"dtype" if key == "torch_dtype" else key: own for key, own in value.items()},
        **dict.fromkeys(("type", "max_length", "tokenizer_kwargs")),
    },
    "critic_model": {
        "name": _critic,
        **dict.fromkeys(("type", "temperature", "top_p", "top_k", "max_length", "torch_dtype", "dtype")),
    },
    "dataset": {
        "name": "dataset_name",
        "type": _reward,
        "train_split": "dataset_train_split",
        "eval_split": "dataset_test_split",
        "private": None,
    },
    "output": {"base_dir": "output_dir", "verbose": "log_completions", "save_path": None},
    "external": {
        "mode": "feedback",
        "sandbox_slice": "visible_tests",
        "expert_model": lambda value, get: {"expert": {"model": value}},
        "external_prompt_passthrough": Only((False,), _HISTORY),
        "original_prompt": Only((True,), _HISTORY),
        "previous_response": Only((True,), _HISTORY),
    },
    "reward_processor": {
        "enabled": lambda value, get: {},  # read with the others
        "scale_factor": lambda value, get: {"reward_weights": [value]} if get("enabled", True) else {},
        "shift": lambda value, get: {"reward_shift": value} if get("enabled", True) else {},
    },
    "wandb": {
        **{key: _wandb(f"WANDB_{key.upper()}") for key in ("project", "entity", "dir", "tags")},
        "name": lambda value, get: {"report_to": "wandb", "run_name": str(value)},
    },
    "algorithm": {
        "agent_learning_rate": "learning_rate",
        "actor_learning_rate": "learning_rate",
        "max_new_tokens": "max_completion_length",
        "discount": "gamma_turn",
        "termination_threshold": "early_termination_threshold",
        "train_batch_size": _samples,
        "rollout_buffer_size": _samples,
        "advantage_mode": "advantage",
        "advantage_normalization": "scale_rewards",
        "normalize_advantage": "scale_rewards",
        # In CoMLRL, every joint action of a turn branches
        "joint_mode": lambda value, get: {"joint_mode": value, "turn_tree": True},
        "collaboration_mode": "centralized",
        "reference_kl_enabled": lambda value, get: {"beta": get("reference_kl_coef", 0.1) if value else 0.0},
        "reference_kl_coef": lambda value, get: {} if get("reference_kl_enabled") is False else {"beta": value},
        "value_loss_coef": "vf_coef",
        "value_clip_range": "cliprange_value",
        "use_separate_critic": lambda value, get: {"critic_backprop": not value},
        "critic_model": _critic,
        "critic_type": Only(("v",), "The critic estimates V(h). Set critic_type='v'."),
        "eval_interval": lambda value, get: (
            {"eval_strategy": "steps", "eval_steps": value} if value else {"eval_strategy": "no"}
        ),
        "eval_num_samples": "num_eval_problems",
        "external_prompt_passthrough": Only((False,), _HISTORY),
        # The team shares one model, and accelerate chooses its device
        **dict.fromkeys(("parallel_training", "agent_devices", "critic_devices", "reference_devices", "eval_batch_size")),
    },
    "comlrl": {"per_device_train_batch_size": _one_problem},
    "preferences": {
        "num_iterations": lambda value, get: {"num_rounds": value},  # GRPO's own field of this name means something else
        "preference_num_candidates": "num_candidates",
        "preference_pairs_per_sample": "pairs_per_problem",
        "pair_selection": "pairing",
        "preference_replay_mode": _replay,
        "preference_replay_lambda": lambda value, get: {},  # read with the mode
        "preference_replay_sample_size": "replay_pairs",
        "comparator_policy": Only(("current", "current_copy"), _COMPARED),
        "comparator_generation_mode": Only(("decentralized",), _COMPARED),
        "joint_mode": Only(("aligned", "align"), "Pairs are of joint actions that were played. Remove the option."),
        # Steps are optimizer steps here, the team is evaluated after every round, and a run has one folder
        **dict.fromkeys((
            "use_environment_step", "environment_steps_per_pair", "log_reward_distribution", "eval_interval",
            "policy_checkpoint_dir", "preference_replay_dir", "comparator_centralized_agent_index", "comparator_api_format",
            "comparator_api_timeout", "comparator_api_key_header", "comparator_api_key_prefix", "comparator_api_response_field",
        )),
    },
    "madpo": {
        "dpo_beta": "beta",
        "reference_kl_enabled": Only((False,), _REFERENCE),
        "reference_kl_coef": Only((0.1,), _REFERENCE),
        **dict.fromkeys(("advantage_normalization", "advantage_mode")),
    },
    "marlhf": {
        "rl_algorithm": "advantage",
        "reward_train_batch_size": "reward_batch_size",
        "reward_freeze_backbone": Only((False,), "The reward model trains a LoRA and its head. Set false."),
        "preference_scoring_reward": Only(
            ("task",), "New pairs that the old reward model labels would confirm it. Set 'task'."
        ),
        # Of MADPO, and of a critic, which MAGRPO does not have
        **dict.fromkeys((
            "dpo_beta", "reward_model_device", "critic_model_name", "critic_learning_rate", "critic_devices",
            "use_separate_critic", "critic_type", "value_loss_coef", "value_clip_range", "critic_value_head_hidden_dim",
            "value_head_hidden_dim",
        )),
    },
    "env": {},
}  # fmt: skip
# Section -> the tables of its keys
_TABLES_OF = {
    **{name: (name,) for name in TABLE},
    "model": ("agent_model",),
    **dict.fromkeys(SECTIONS, ("comlrl", "algorithm")),
    **dict.fromkeys(("ppo", "shppo", "trainer"), ("algorithm",)),
    **dict.fromkeys(("madpo", "madpo_iter"), ("madpo", "preferences", "comlrl", "algorithm")),
    **dict.fromkeys(("marlhf", "marlhf_iter"), ("marlhf", "preferences", "comlrl", "algorithm")),
}
_SECTIONS = _TABLES_OF.keys() - {"", "algorithm", "comlrl", "preferences"}
# Flags of other projects -> ours
FLAGS = {key: entry for key, entry in TABLE[""].items() if isinstance(entry, str)}
# Our field, or a key of a section -> values with another name in CoMLRL
VALUES: dict[str, dict[Any, Any]] = {
    "advantage": {"raw": "none", "magrpo": "mean", "marloo": "rloo", "maremax": "max", "mareinforce": "none"},
    "advantage_normalization": {True: "agent", False: "none"},
    "centralized": {"centralized": True, "decentralized": False},
    "cliprange_value": {None: "inf"},
    "dataset_name": {"openai/openai_humaneval": "humaneval"},  # also found without network
    "joint_mode": {"aligned": "align"},
    "pairing": {"reward_gap": "gap", "comparator_reward": "gap"},
    "pairs_per_problem": {None: 10**6},  # no limit
    "reward_max_length": {None: 10**6},
    "external.sandbox_slice": {0: None, "all": None},
    "scale_rewards": {True: "group", False: "none"},
    "top_k": {None: 0},
}


def flatten(content: Mapping[str, Any], sections: Collection[str], origin: str) -> dict[str, Any]:
    """
    Settings in sections, without sections, or both, as one flat mapping.

    Args:
        content (`Mapping`): What a YAML file holds, or names with dots.
        sections (`Collection[str]`): Sections of algorithms that the recipe reads. Those of others are left out.
        origin (`str`): Where the settings were found, for errors.

    Returns:
        `dict[str, Any]`: `section.key`, or the key alone, to value, after what the names of its sections stand for. An empty
        section stays, as `None`.

    Raises:
        ValueError: If a section holds a value instead of keys, or only other recipes read the algorithms' sections.
    """
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if name not in _SECTIONS or value is None:
            flat[str(name)] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": below for key, below in value.items()}
        else:
            example = next(iter(TABLE[_TABLES_OF[name][-1]]), "NAME")
            raise ValueError(
                f"{name}={value!r}: {name!r} is a section, and needs keys. Write {name}.{example}=..., for example."
            )
    others = {_split(name)[0] for name in flat} & SECTIONS.keys() - set(sections)
    if others and not {_split(name)[0] for name in flat} & set(sections):
        raise ValueError(
            f"{origin} has the section {min(others)!r} of the recipe {SECTIONS[min(others)]}, and none of this recipe, such as "
            f"{next(iter(sections))!r}. Run that recipe, or rename the section."
        )
    flat = {name: value for name, value in flat.items() if _split(name)[0] not in others}
    return {key: own for name in flat for key, own in IMPLIED.get(_split(name)[0], {}).items()} | flat


def merge(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both in order, so that a later setting also wins over another name of its field. A section that is null is emptied."""
    emptied = tuple(f"{name}." for name, value in later.items() if name in _SECTIONS and value is None)
    kept = {name: own for name, own in settings.items() if name not in later and not name.startswith(emptied)}
    return kept | dict(later)


def convert(settings: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """
    Converts settings to the fields of this package.

    Args:
        settings (`Mapping[str, Any]`): What [`flatten`] returns. [`check_names`] has accepted all names.
        known (`Collection[str]`): Fields that exist.

    Returns:
        `tuple[dict[str, Any], list[str]]`: Field to value, with `samples_per_step` for a batch size that counts groups of
        replies of every agent, and `env.NAME` for variables of the environment; and the keys that have no effect here.

    Raises:
        ValueError: If a value is not supported.
    """
    ours: dict[str, Any] = {}
    labels: list[str] = []
    for name, value in settings.items():
        section, key = _split(name)

        def get(key: str, default: Any = None, section: str = section) -> Any:
            return settings.get(f"{section}.{key}", settings.get(key, default))

        entry = _entry(name)
        if name in _SECTIONS or (value in (None, {}) and not isinstance(entry, str)):
            continue
        if entry is None:
            labels.append(name)
        elif isinstance(entry, Only):
            if value not in entry.values:
                raise ValueError(f"{name}={value!r} is not supported. {entry.instead}")
        elif isinstance(entry, str):
            ours[key if key in known else entry] = _renamed(name, value)
        else:
            ours |= entry(value, get)
    return {name: _renamed(name, value) for name, value in ours.items()}, labels


def _renamed(name: str, value: Any) -> Any:
    return value if isinstance(value, list | dict) else VALUES.get(name, {}).get(value, value)


def check_names(names: Iterable[str], known: Collection[str], origin: str) -> None:
    """
    Refuses unknown names.

    Args:
        names (`Iterable[str]`): `section.key`, or a key alone.
        known (`Collection[str]`): Fields that exist.
        origin (`str`): Where the names were found.

    Raises:
        ValueError: If section or key is unknown; suggests the nearest one.
    """
    for name in names:
        section, key = _split(name)
        if section not in _TABLES_OF:
            near = nearest(section, _SECTIONS)
            raise ValueError(f"{origin} has an unknown section {section!r} in {name!r}." + _did_you_mean(near))
        entry = _entry(name)
        if name in _SECTIONS or section == "env" or not isinstance(entry, str) or {entry, key} & {*known}:
            continue
        if entry != key:
            raise ValueError(f"{origin} has {name!r}, which sets {entry}, but this recipe has no {entry}. Remove it.")
        near = nearest_setting(key, [*(other for table in _TABLES_OF[section] for other in TABLE[table]), *known])
        raise ValueError(f"{origin} has an unknown key {name!r}." + _did_you_mean(near and name[: -len(key)] + near))


def field_of(name: str) -> str:
    """The field that a name sets: the first one, if it sets several."""
    entry = _entry(name)
    return entry if isinstance(entry, str) else {"agents": "model_name_or_path"}.get(name, name)


def _entry(name: str) -> str | Only | Rule | None:
    """The entry of the table for a name; its key, if there is none."""
    section, key = _split(name)
    if section == "env":
        return name
    return next((TABLE[table][key] for table in (*_TABLES_OF[section], "") if key in TABLE[table]), key)


def nearest_setting(name: str, known: Iterable[str]) -> str:
    """Returns our field for a name of other projects, or the closest known name, or `""`."""
    known = list(known)
    renamed = next((table[name] for table in TABLE.values() if name in table), None)
    return str(renamed) if renamed in known else nearest(name, known)


def _split(name: str) -> tuple[str, str]:
    """Section and key of a name; the section is empty where there is none."""
    section, dot, key = name.partition(".")
    return (section, key) if dot else ("", section)


def _did_you_mean(near: str) -> str:
    return near and f" Did you mean {near}?"
