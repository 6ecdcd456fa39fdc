"""TRL's arguments are accepted, and values that cannot work are refused where they are given."""

import dataclasses
import warnings

import pytest
from trl import GRPOConfig

from marcog_trl import MultiAgentPPOConfig, SHPPOConfig


CONFIGS = [MultiAgentPPOConfig, SHPPOConfig]


def make(config_class, **options):
    return config_class("out", use_cpu=True, bf16=False, report_to="none", **options)


class TestGRPOConfig:
    @pytest.mark.parametrize("config_class", CONFIGS)
    def test_every_argument_and_its_default_are_accepted(self, config_class):
        skipped = {"output_dir", "use_cpu", "bf16", "report_to", "use_transformers_paged", "logging_dir"}
        for field in dataclasses.fields(GRPOConfig):
            if not field.init or field.name in skipped:
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                args = make(config_class, **{field.name: default})
            assert field.name in {own.name for own in dataclasses.fields(args)}

    @pytest.mark.parametrize("config_class", CONFIGS)
    def test_what_is_given_is_kept(self, config_class):
        options = {
            "num_generations": 4,
            "num_generations_eval": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 8,
            "num_iterations": 2,
            "beta": 0.1,
            "epsilon_high": 0.3,
            "loss_type": "grpo",
            "learning_rate": 3e-6,
            "save_steps": 70,
            "disable_dropout": False,
        }
        args, expected = make(config_class, **options), GRPOConfig("out", use_cpu=True, bf16=False, **options)
        for name in [*options, "generation_batch_size"]:
            assert getattr(args, name) == getattr(expected, name), name

    def test_the_scale_of_rewards_is_said_to_have_no_effect(self):
        for given in ("group", "batch", True):
            with pytest.warns(UserWarning, match="scale_rewards='.*' has no effect"):
                assert make(MultiAgentPPOConfig, scale_rewards=given).scale_rewards == "none"
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert make(MultiAgentPPOConfig, scale_rewards=False).scale_rewards == "none"
            assert make(MultiAgentPPOConfig).disable_dropout

    @pytest.mark.parametrize(
        "options",
        [
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 4, "steps_per_generation": 3},
            {"per_device_train_batch_size": 4, "generation_batch_size": 12},
        ],
    )
    def test_one_generation_is_enough(self, options):
        args = make(MultiAgentPPOConfig, num_generations=1, **options)
        assert args.num_generations == 1 and args.per_device_train_batch_size == 4
        if len(options) > 1:
            assert (args.steps_per_generation, args.generation_batch_size) == (3, 12)


BAD = [
    ({"scale_rewards": "agent"}, "scale_rewards='agent' is not one of 'none', 'group', 'batch'; 'none' works"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation='normalize_then_sum'"),
    (
        {"feedback": "loud"},
        "feedback='loud' is not one of 'level_feedback', .* 'expert_edits'; 'level_feedback' works",
    ),
    ({"agent_loss_weighting": "row"}, "agent_loss_weighting='row' is not one of 'agent', 'token'; 'agent' works"),
    ({"isolation": "lax"}, "isolation='lax' is not one of 'strict', 'best_effort', 'none'"),
    ({"gamma_turn": 1.5}, r"gamma_turn=1.5 is outside \[0, 1\]; 1.0 works"),
    ({"num_turns": 0}, "num_turns=0 is not positive; 1 works"),
    ({"num_agents": 0}, "num_agents=0 is not positive; 1 works"),
    ({"num_generations": 0}, "num_generations=0 is not positive; 1 works"),
    ({"num_workers": -1}, "num_workers=-1 is not positive"),
    ({"execution_timeout": 0.0}, "execution_timeout=0.0 is not positive"),
    ({"execution_memory_mb": 0}, "execution_memory_mb=0 is not positive"),
    ({"critic": "shared"}, "critic='shared' is not one of 'team', 'agent', 'none'; 'team' works"),
    ({"kl_penalty": "both"}, "kl_penalty='both' is not one of 'loss', 'reward'; 'loss' works"),
    ({"advantage_normalization": "group"}, "advantage_normalization='group' is not one of 'agent', 'batch', 'none'"),
    ({"gamma": -0.1}, r"gamma=-0.1 is outside \[0, 1\]"),
    ({"lam": 2}, r"lam=2 is outside \[0, 1\]"),
    ({"lam_turn": 2}, r"lam_turn=2 is outside \[0, 1\]"),
    ({"cliprange_value": 0}, "cliprange_value=0 is not positive"),
    ({"critic": "none", "num_generations": 1}, "num_generations=1 leaves critic='none' without a baseline; .* works"),
]
BAD_LATENTS = [
    (
        {"parameter_sharing": "all"},
        "parameter_sharing='all' is not one of 'latent', 'shared', 'separate'; 'latent' works",
    ),
    ({"latent_scope": "team"}, "latent_scope='team' is not one of 'observation', 'agent'; 'observation' works"),
    ({"latent_distance": "l2"}, "latent_distance='l2' is not one of 'cosine', 'minmax'; 'cosine' works"),
    ({"latent_size": 0}, "latent_size=0 is not positive"),
    ({"sigma_min": 0.0}, "sigma_min=0.0 is not positive"),
    ({"use_vllm": True}, "use_vllm=True .* latent_scope='observation'; latent_scope='agent' works"),
    (
        {"use_vllm": True, "latent_scope": "agent", "vllm_mode": "server"},
        "vllm_mode='server' .* parameter_sharing='latent': .* no LoRA; 'colocate' .* works",
    ),
    (
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_tensor_parallel_size": 2},
        "vllm_tensor_parallel_size=2 .* parameter_sharing='separate': .*; 1 .* works",
    ),
    (
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_enable_sleep_mode": True},
        "vllm_enable_sleep_mode=True .*; False .* works",
    ),
    (
        {"use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching=True .* parameter_sharing='latent' .*; .* works",
    ),
]


class TestBadValues:
    @pytest.mark.parametrize(
        ("config_class", "options", "message"),
        [(config_class, *bad) for config_class in CONFIGS for bad in BAD]
        + [(SHPPOConfig, *bad) for bad in BAD_LATENTS],
    )
    def test_are_refused_with_one_that_works(self, config_class, options, message):
        with pytest.raises(ValueError, match=message) as error:
            make(config_class, **options)
        assert "\n" not in str(error.value)

    def test_what_only_latents_cannot_do_is_left_to_the_shared_policy(self):
        args = make(SHPPOConfig, use_vllm=True, use_transformers_continuous_batching=True, parameter_sharing="shared")
        assert args.use_vllm
