"""The names of CoMLRL's MADPO and MARLHF, in the sections `madpo`, `madpo_iter`, `marlhf` and `marlhf_iter`; see `comlrl.py`."""

from collections.abc import Callable
from typing import Any


SECTIONS = ("madpo", "madpo_iter")

FIELDS = {
    "agent_learning_rate": "learning_rate",
    "max_new_tokens": "max_completion_length",
    "discount": "gamma_turn",
    "termination_threshold": "early_termination_threshold",
    "train_batch_size": "gradient_accumulation_steps",
    "rollout_buffer_size": "gradient_accumulation_steps",
    "collaboration_mode": "centralized",
    "eval_num_samples": "eval_problems",
    "num_iterations": "num_rounds",
    "preference_num_candidates": "num_candidates",
    "preference_pairs_per_sample": "pairs_per_problem",
    "pair_selection": "pairing",
    "dpo_beta": "beta",
    "preference_replay_mode": "replay_decay",
    "preference_replay_lambda": "replay_decay",
    "preference_replay_sample_size": "replay_pairs",
}
VALUES: dict[str, dict[Any, Any]] = {"pairing": {"reward_gap": "gap", "comparator_reward": "gap"}}

LABELS = (
    # Of logging: steps are optimizer steps here, and the team is evaluated after every round
    "use_environment_step", "environment_steps_per_pair", "log_reward_distribution", "eval_interval",
    # Folders: a run has one, with all of its rounds
    "policy_checkpoint_dir", "preference_replay_dir",
    # Of MAGRPO, without effect on CoMLRL's MADPO
    "advantage_normalization", "advantage_mode",
    # Of comparators that are not in use
    "comparator_centralized_agent_index", "comparator_api_format", "comparator_api_timeout", "comparator_api_key_header",
    "comparator_api_key_prefix", "comparator_api_response_field",
)  # fmt: skip

_COMPARED = (
    "Episodes are compared with each other. Set comparator_policy=current and remove the other options of comparators."
)
_REFERENCE = "CoMLRL's MADPO checks it and does not use it. Remove the option, or set reference: initial for a reference in the loss."
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "joint_mode": (("aligned", "align"), "Pairs are of joint actions that were played. Remove the option."),
    "reference_kl_enabled": ((None, False), _REFERENCE),
    "reference_kl_coef": ((None, 0.1), _REFERENCE),
    "preference_replay_k": (
        (None,), "Replay decays with the age of a round. Set preference_replay_mode=lambda_decay and preference_replay_lambda.",
    ),
    "comparator_policy": (("current", "current_copy", "self"), _COMPARED),
    "comparator_generation_mode": ((None, "decentralized"), _COMPARED),
    **{
        f"comparator_{name}": ((None,), _COMPARED)
        for name in (
            "history_k", "num_candidates", "model_name", "agents", "devices", "api_url", "api_model", "api_max_n_per_request", "api_headers", "api_key",
            "api_key_env", "api_extra_body",
        )
    },
}  # fmt: skip


def _replay(value: Any, get: Callable) -> dict[str, Any]:
    """A round has the weight (1 − λ)^age; in CoMLRL λ^age."""
    theirs = get("preference_replay_lambda")
    decay = {"current": 1.0, "all_history": 0.0}.get(value)
    if value == "lambda_decay" and isinstance(theirs, int | float):
        decay = 1 - theirs
    if decay is None:
        raise ValueError(
            f"preference_replay_mode={value!r} is not supported. Set 'current', 'all_history', or 'lambda_decay' with "
            "preference_replay_lambda."
        )
    return {"replay_decay": decay}


# Keys that set several fields, or whose meaning depends on other keys of their section, which `get` returns
RULES: dict[str, Callable[[Any, Callable], dict[str, Any]]] = {
    "preference_replay_mode": _replay,
    "preference_replay_lambda": lambda value, get: {},  # read with the mode
    # null: no limit
    "preference_pairs_per_sample": lambda value, get: {"pairs_per_problem": 10**6 if value is None else value},
}

# MARLHF: the same, then a reward model, and reinforcement learning with it

MARLHF_SECTIONS = ("marlhf", "marlhf_iter")

MARLHF_FIELDS = {
    **{key: field for key, field in FIELDS.items() if key != "dpo_beta"},
    "advantage_mode": "advantage",
    "advantage_normalization": "scale_rewards",
    "rl_algorithm": "advantage",
    "reference_kl_enabled": "beta",
    "reference_kl_coef": "beta",
    "reward_train_batch_size": "reward_batch_size",
}

MARLHF_LABELS = (
    *(label for label in LABELS if not label.startswith("advantage")),
    "dpo_beta",  # without effect on CoMLRL's MARLHF
    # Of the critic, which MAGRPO does not have
    "critic_model_name", "critic_learning_rate", "critic_devices", "use_separate_critic", "critic_type", "value_loss_coef",
    "value_clip_range", "critic_value_head_hidden_dim", "value_head_hidden_dim",
)  # fmt: skip

MARLHF_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **{key: what for key, what in UNSUPPORTED.items() if not key.startswith("reference_kl")},
    "reward_model_name": (
        (None,), "The reward model is trained on the team's base model. Remove the option, or set reward_model to a trained one.",
    ),
    "reward_model_device": (
        (None, "cuda:0", "cpu"), "The reward model is where the team is. Remove the option.",
    ),
    "reward_freeze_backbone": (
        (False,), "The reward model trains a LoRA and its head. Set reward_freeze_backbone=false.",
    ),
    "preference_scoring_reward": (
        ("task",),
        "New pairs that the old reward model labels would confirm it. Set preference_scoring_reward=task.",
    ),
}  # fmt: skip

_ADVANTAGES = {"magrpo": "mean", "marloo": "rloo", "maremax": "max", "mareinforce": "none"}


def _algorithm(value: Any, get: Callable) -> dict[str, Any]:
    if value not in _ADVANTAGES:
        raise ValueError(
            f"rl_algorithm={value!r} is not supported: MARLHF trains without a critic. Set one of {', '.join(_ADVANTAGES)}, or "
            "train with a critic on a saved reward model: train_maac.py --reward OUTPUT_DIR/round_01/reward_model."
        )
    return {"advantage": _ADVANTAGES[value]}


MARLHF_RULES: dict[str, Callable[[Any, Callable], dict[str, Any]]] = {
    **RULES,
    "num_iterations": lambda value, get: {"num_rounds": value},  # GRPO's own field of this name means something else
    "rl_algorithm": _algorithm,
    "advantage_mode": lambda value, get: (
        {} if get("rl_algorithm") else {"advantage": {"raw": "none"}.get(value, value)}
    ),
    "reference_kl_enabled": lambda value, get: {"beta": get("reference_kl_coef", 0.1) if value else 0.0},
    "reference_kl_coef": lambda value, get: {} if get("reference_kl_enabled") is False else {"beta": value},
    # null: no limit
    "reward_max_length": lambda value, get: {"reward_max_length": 10**6 if value is None else value},
}
