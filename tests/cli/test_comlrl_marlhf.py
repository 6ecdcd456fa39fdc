"""CoMLRL's MARLHF files and overrides."""

from dataclasses import fields

import pytest
from trl import ModelConfig

from marcog_trl import IterativeMARLHFConfig
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.comlrl import check, convert, flatten
from marcog_trl.cli.comlrl_preferences import MARLHF_FIELDS, MARLHF_SECTIONS


KNOWN = {f.name for cls in (TeamArguments, IterativeMARLHFConfig, ModelConfig) for f in fields(cls)}
# Every key of the section in CoMLRL's files of code generation
FILE = {
    "parallel_training": "none", "agent_devices": ["cuda:0"], "num_agents": 2, "collaboration_mode": "decentralized",
    "num_turns": 1, "num_iterations": 4, "preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0.8,
    "preference_replay_sample_size": 264, "log_reward_distribution": True, "preference_scoring_reward": "task",
    "policy_checkpoint_dir": None, "num_train_epochs": 4, "agent_learning_rate": 2.0e-05, "logging_steps": 50,
    "num_generations": 4, "preference_num_candidates": 20, "comparator_policy": "current",
    "comparator_generation_mode": "decentralized", "comparator_centralized_agent_index": 0, "comparator_model_name": None,
    "comparator_agents": None, "comparator_devices": None, "comparator_num_candidates": None, "comparator_history_k": None,
    "comparator_api_url": None, "comparator_api_format": "generic", "comparator_api_model": None,
    "comparator_api_max_n_per_request": None, "comparator_api_key_env": None, "preference_pairs_per_sample": 4,
    "pair_selection": "comparator_reward", "dpo_beta": 0.1, "use_environment_step": True, "environment_steps_per_pair": 2,
    "rl_algorithm": "magrpo", "reward_model_name": None, "reward_model_device": "cuda:0", "reward_learning_rate": 1.0e-05,
    "reward_num_train_epochs": 2, "reward_train_batch_size": 4, "reward_max_length": 2048, "reward_freeze_backbone": False,
    "max_new_tokens": 256, "discount": 1.0, "joint_mode": "aligned", "early_termination_threshold": None,
    "rollout_buffer_size": 4, "train_batch_size": 4, "advantage_normalization": True, "eval_interval": 4,
    "eval_num_samples": 4, "eval_batch_size": 1,
}  # fmt: skip


def converted(section="marlhf_iter", **settings):
    flat = flatten({section: settings})
    for name in flat:
        check(name, KNOWN, (*MARLHF_SECTIONS, "trainer"), "--override")
    return convert(flat, KNOWN)


def test_every_key_of_a_file_is_mapped_or_a_label():
    result = converted(**FILE)
    assert result.fields == {
        "num_agents": 2, "centralized": False, "num_turns": 1, "num_rounds": 4, "replay_decay": pytest.approx(0.2),
        "replay_pairs": 264, "num_train_epochs": 4, "learning_rate": 2e-5, "logging_steps": 50, "num_generations": 4,
        "num_candidates": 20, "pairs_per_problem": 4, "pairing": "gap", "advantage": "mean",
        "reward_learning_rate": 1e-5, "reward_num_train_epochs": 2, "reward_batch_size": 4, "reward_max_length": 2048,
        "scale_rewards": "group", "max_completion_length": 256, "gamma_turn": 1.0, "early_termination_threshold": None,
        "samples_per_step": 4, "eval_problems": 4,
    }  # fmt: skip
    assert {name.partition(".")[2] for name in result.labels} == {
        "log_reward_distribution", "policy_checkpoint_dir", "comparator_centralized_agent_index", "comparator_api_format",
        "use_environment_step", "environment_steps_per_pair", "dpo_beta", "eval_interval",
    }  # fmt: skip


def test_offline_files_have_the_same_names():
    keys = {key: value for key, value in FILE.items() if key != "num_iterations"}
    assert converted("marlhf", **keys).fields == {
        name: value for name, value in converted(**FILE).fields.items() if name != "num_rounds"
    }


def test_targets_exist():
    assert set(MARLHF_FIELDS.values()) <= KNOWN


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rl_algorithm": "marloo"}, {"advantage": "rloo"}),
        ({"rl_algorithm": "mareinforce", "advantage_mode": "mean"}, {"advantage": "none"}),
        ({"advantage_mode": "raw"}, {"advantage": "none"}),
        ({"reward_max_length": None}, {"reward_max_length": 10**6}),
        ({"reference_kl_enabled": True, "reference_kl_coef": 0.3}, {"beta": 0.3}),
        ({"reference_kl_enabled": False, "reference_kl_coef": 0.3}, {"beta": 0.0}),
    ],
)
def test_values(settings, expected):
    assert converted(**settings).fields == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preference_scoring_reward": "learned"}, "New pairs that the old reward model labels would confirm it"),
        ({"rl_algorithm": "maac"}, "rl_algorithm='maac' is not supported: MARLHF trains without a critic"),
        ({"rl_algorithm": "iac"}, "train_maac.py --reward OUTPUT_DIR/round_01/reward_model"),
        ({"reward_freeze_backbone": True}, "The reward model trains a LoRA and its head"),
        ({"reward_model_name": "other/model"}, "The reward model is trained on the team's base model"),
        ({"comparator_policy": "api"}, "comparator_policy='api' is not supported"),
    ],
)
def test_what_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        converted(**settings)
