"""CoMLRL's MADPO files and overrides."""

from dataclasses import fields

import pytest
from trl import ModelConfig

from marcog_trl import IterativeMADPOConfig
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.comlrl import check, convert, flatten, implied
from marcog_trl.cli.comlrl_preferences import FIELDS, SECTIONS


KNOWN = {f.name for cls in (TeamArguments, IterativeMADPOConfig, ModelConfig) for f in fields(cls)}
# Every key of the section in CoMLRL's files of code generation
FILE = {
    "parallel_training": "none", "agent_devices": ["cuda:0"], "num_agents": 2, "collaboration_mode": "decentralized",
    "num_turns": 1, "num_iterations": 4, "preference_replay_mode": "lambda_decay", "preference_replay_k": None,
    "preference_replay_lambda": 0.8, "preference_replay_sample_size": 264, "log_reward_distribution": True,
    "policy_checkpoint_dir": None, "num_train_epochs": 2, "agent_learning_rate": 2.0e-05, "logging_steps": 50,
    "preference_num_candidates": 20, "comparator_policy": "current", "comparator_generation_mode": "decentralized",
    "comparator_centralized_agent_index": 0, "comparator_model_name": None, "comparator_agents": None,
    "comparator_devices": None, "comparator_num_candidates": None, "comparator_history_k": None, "comparator_api_url": None,
    "comparator_api_format": "generic", "comparator_api_model": None, "comparator_api_max_n_per_request": None,
    "comparator_api_key_env": None, "preference_pairs_per_sample": 4, "pair_selection": "comparator_reward",
    "dpo_beta": 0.1, "use_environment_step": True, "environment_steps_per_pair": 2, "max_new_tokens": 256, "discount": 1.0,
    "joint_mode": "aligned", "early_termination_threshold": None, "rollout_buffer_size": 4, "train_batch_size": 4,
    "advantage_normalization": True, "eval_interval": 4, "eval_num_samples": 4, "eval_batch_size": 1,
}  # fmt: skip


def converted(**settings):
    flat = flatten({"madpo_iter": settings})
    for name in flat:
        check(name, KNOWN, (*SECTIONS, "trainer"), "--override")
    return convert(flat, KNOWN)


def test_every_key_of_a_file_is_mapped_or_a_label():
    result = converted(**FILE)
    assert result.fields == {
        "num_agents": 2, "centralized": False, "num_turns": 1, "num_rounds": 4, "replay_decay": pytest.approx(0.2),
        "replay_pairs": 264, "num_train_epochs": 2, "learning_rate": 2e-5, "logging_steps": 50, "num_candidates": 20,
        "pairs_per_problem": 4, "pairing": "gap", "beta": 0.1, "max_completion_length": 256,
        "gamma_turn": 1.0, "early_termination_threshold": None, "samples_per_step": 4, "eval_problems": 4,
    }  # fmt: skip
    assert {name.partition(".")[2] for name in result.labels} == {
        "log_reward_distribution", "policy_checkpoint_dir", "comparator_centralized_agent_index", "comparator_api_format",
        "use_environment_step", "environment_steps_per_pair", "advantage_normalization", "eval_interval",
    }  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_a_file_has_no_reference_policy_as_in_comlrl(section):
    assert implied([f"{section}.dpo_beta"]) == {"reference": "none"}


def test_targets_exist():
    assert set(FIELDS.values()) <= KNOWN


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preference_replay_mode": "current"}, {"replay_decay": 1.0}),
        ({"preference_replay_mode": "all_history"}, {"replay_decay": 0.0}),
        ({"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0.5}, {"replay_decay": 0.5}),
        (
            {"pair_selection": "all", "preference_pairs_per_sample": None},
            {"pairing": "all", "pairs_per_problem": 10**6},
        ),
        ({"collaboration_mode": "centralized"}, {"centralized": True}),
        ({"reference": "none", "margin": "agent"}, {"reference": "none", "margin": "agent"}),
    ],
)
def test_names_and_values(settings, expected):
    assert converted(**settings).fields == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preference_replay_mode": "nearest_k"}, "preference_replay_mode='nearest_k' is not supported"),
        ({"preference_replay_mode": "lambda_decay"}, "or 'lambda_decay' with preference_replay_lambda"),
        ({"preference_replay_k": 2}, "Replay decays with the age of a round"),
        ({"comparator_policy": "model"}, "comparator_policy='model' is not supported. Episodes are compared with"),
        ({"comparator_policy": "api"}, "comparator_policy='api' is not supported"),
        ({"comparator_api_url": "http://x"}, "Set comparator_policy=current"),
        ({"comparator_policy": "history"}, "comparator_policy='history' is not supported"),
        ({"joint_mode": "cross"}, "Pairs are of joint actions that were played"),
        ({"reference_kl_enabled": True}, "CoMLRL's MADPO checks it and does not use it"),
        ({"agent_devices": ["cuda:0", "cuda:1"]}, "accelerate chooses its device"),
        ({"preference_num_candidate": 3}, "Did you mean madpo_iter.preference_num_candidates"),
    ],
)
def test_what_there_is_not_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        converted(**settings)
