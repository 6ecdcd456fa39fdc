"""TRL's arguments are accepted, and values that cannot work are refused where they are given."""

import dataclasses
import math
import re
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from trl import GRPOConfig

from marcog_trl import MultiAgentGRPOConfig, MultiAgentPPOConfig, SHPPOConfig


CONFIGS = [MultiAgentPPOConfig, SHPPOConfig]


def make(config_class, **options):
    return config_class("out", **{"use_cpu": True, "bf16": False, "report_to": "none", **options})


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

    def test_defaults_that_differ_from_trl_s_are_in_the_guide(self):
        names = {field.name for field in dataclasses.fields(GRPOConfig)} - {"output_dir", "logging_dir", "run_name"}
        defaults = {
            kind: {field.name: field.default for field in dataclasses.fields(kind) if field.name in names}
            for kind in (MultiAgentGRPOConfig, GRPOConfig)
        }
        differ = {name for name in names if defaults[MultiAgentGRPOConfig][name] != defaults[GRPOConfig][name]}
        guide = (Path(__file__).parents[2] / "marcog_trl" / "trainers" / "README.md").read_text()
        listed = guide.partition("These defaults differ from those of `GRPOConfig`:\n\n")[2].partition("\n\n")[0]
        assert differ and all(f"`{name}`" in listed for name in differ)

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

    @pytest.mark.parametrize("config_class", CONFIGS)
    @pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": False}])
    def test_no_old_name_is_warned_of(self, config_class, given):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            assert make(config_class, **given).gradient_checkpointing == given.get("gradient_checkpointing", True)

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

    def test_the_numbers_of_a_batch_that_does_not_fit_are_those_that_were_given(self):
        with pytest.raises(
            ValueError, match=r"generation_batch_size=12 must be a multiple of 8: .*=8 x 1 .* Set .*=16"
        ):
            make(MultiAgentPPOConfig, per_device_train_batch_size=8, generation_batch_size=12)

    def test_the_best_model_is_saved_where_it_is_evaluated(self):
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 30}
        assert make(MultiAgentPPOConfig, **best).save_steps == 510


def test_options_of_generation_that_change_no_distribution_are_accepted():
    harmless = {"eos_token_id": [1, 7], "use_cache": False, "prefill_chunk_size": 2, "seed": 3, "stop_token_ids": [7]}
    as_set = {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 9, "do_sample": True, "num_beams": 1, "top_k": None}
    off = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1.0, "n": 1}
    args = make(
        MultiAgentGRPOConfig, temperature=0.7, max_completion_length=9, generation_kwargs=harmless | as_set | off
    )
    assert args.generation_kwargs == harmless | as_set | off


# What no range and no list of choices has
CONTRADICTIONS = [
    (MultiAgentPPOConfig, {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
    (MultiAgentPPOConfig, {"max_steps": 0}, "max_steps=0"),
    (MultiAgentPPOConfig, {"num_train_epochs": 0}, "num_train_epochs=0"),
    (MultiAgentPPOConfig, {"critic": "none", "num_generations": 1}, "num_generations=1"),
    (MultiAgentPPOConfig, {"write_report": True, "logging_strategy": "no"}, "logging_strategy='no'"),
    (MultiAgentPPOConfig, {"roles": "[1]"}, r"roles='\[1\]'"),
    (MultiAgentPPOConfig, {"generation_kwargs": "x"}, "generation_kwargs='x'"),
    (MultiAgentPPOConfig, {"generation_kwargs": {"a": {1}}}, "generation_kwargs=.* team.json"),
    (MultiAgentPPOConfig, {"generation_kwargs": {"num_return_sequences": 2}}, "num_return_sequences=2"),
    (MultiAgentPPOConfig, {"generation_kwargs": {"stop_strings": ["a"]}}, "Set eos_token_id to the ids of the tokens"),
    (MultiAgentPPOConfig, {"generation_kwargs": {"guidance_scale": 2.0}}, r"guidance_scale=2\.0"),
    *(
        (
            MultiAgentGRPOConfig,
            {"generation_kwargs": {name: value}},
            f"generation_kwargs has {name}=.*the loss assumes",
        )
        for name, value in [
            ("temperature", 0.01),
            ("top_p", 0.9),
            ("top_k", 50),
            ("min_p", 0.1),
            ("repetition_penalty", 1.1),
            ("typical_p", 0.9),
            ("do_sample", False),
            ("num_beams", 2),
            ("penalty_alpha", 0.6),
            ("no_repeat_ngram_size", 1),
            ("bad_words_ids", [[5]]),
            ("suppress_tokens", [5]),
            ("begin_suppress_tokens", [5]),
            ("forced_bos_token_id", 5),
            ("forced_eos_token_id", 1),
            ("sequence_bias", [[[5], 1.0]]),
            ("min_new_tokens", 5),
            ("min_length", 5),
            ("epsilon_cutoff", 0.01),
            ("dola_layers", "low"),
            ("exponential_decay_length_penalty", [3, 1.1]),
            ("presence_penalty", 1.0),
            ("frequency_penalty", 0.5),
            ("min_tokens", 3),
            ("logit_bias", {"5": 1.0}),
            ("allowed_token_ids", [5]),
            ("bad_words", ["a"]),
            ("ignore_eos", True),
            ("temprature", 0.5),
            ("max_new_tokens", 5),
            ("max_tokens", 5),
            ("logits_processor", ["a"]),
            ("return_dict_in_generate", True),
        ]
    ),
    (MultiAgentGRPOConfig, {"joint_mode": "cross", "num_turns": 2}, "joint_mode='cross' .*num_turns=2"),
    (MultiAgentGRPOConfig, {"num_generations": 1}, "num_generations=1"),
    (SHPPOConfig, {"use_vllm": True}, "latent_scope='observation'"),
    (SHPPOConfig, {"use_vllm": True, "latent_scope": "agent", "vllm_mode": "server"}, "vllm_mode='server'"),
    (
        SHPPOConfig,
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_tensor_parallel_size": 2},
        "vllm_tensor_parallel_size=2",
    ),
    (
        SHPPOConfig,
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_enable_sleep_mode": True},
        "vllm_enable_sleep_mode=True",
    ),
    (SHPPOConfig, {"use_transformers_continuous_batching": True}, "continuous_batching=True .*'latent'"),
    (
        SHPPOConfig,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "'use_reentrant': False",
    ),
]
CHOICES = (
    "loss_type importance_sampling_level vllm_importance_sampling_mode multi_objective_aggregation scale_rewards credit "
    "agent_loss_weighting on_reward_error feedback isolation advantage joint_mode critic kl_penalty advantage_normalization "
    "parameter_sharing latent_scope latent_distance"
).split()
# What each kind of number must be: a value that is refused, and the reason
WRONG_NUMBERS = [
    ("learning_rate", "1e-5", "must be a number. Set learning_rate=1e-05."),
    ("learning_rate", math.inf, "must be a finite number."),
    ("learning_rate", -1.0, "must be at least 0. Set learning_rate=1e-05."),
    ("num_turns", 1.5, "must be a whole number. Set num_turns=1."),
    ("num_turns", True, "must be a whole number."),
    ("num_turns", None, "must be a whole number."),
    ("temperature", 0, "must be greater than 0."),
    ("top_p", 5.0, "must be greater than 0 and at most 1."),
    ("gamma_turn", 1.5, "must be at least 0 and at most 1."),
    ("data_seed", 2**40, "must be at least 0 and at most 4294967295."),
    ("execution_memory_mb", 1, "must be at least 64."),
    ("cliprange_value", 0, "must be greater than 0."),
    ("turn_weights", [1.5, -0.5], ": every entry must be at least 0."),
    ("turn_weights", 1.5, "must be a list of numbers."),
]
# Fields for which every finite number means something, or which TRL and transformers check when the trainer is made
UNCHECKED = set(
    "visible_tests reward_shift reward_weights early_termination_threshold local_rank ddp_bucket_cap_mb "
    "ddp_timeout seed label_smoothing_factor logging_steps eval_steps eval_delay save_total_limit eval_accumulation_steps "
    "router_aux_loss_coef num_completions_to_print vllm_importance_sampling_cap vllm_tensor_parallel_size "
    "vllm_max_model_length vllm_server_timeout vllm_server_port vllm_group_port vllm_gpu_memory_utilization".split()
)


def numeric_fields(config_class):
    """Names of fields that are numbers, and whether they are lists of them."""
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kinds = {*(get_args(hints[field.name]) or [hints[field.name]])} - {type(None)}
        if kinds <= {int, float, list[int], list[float]} and field.init:
            yield field.name, bool(kinds & {list[int], list[float]})


class TestBadValues:
    @pytest.mark.parametrize(("config_class", "options", "message"), CONTRADICTIONS)
    def test_contradictions_are_refused(self, config_class, options, message):
        with pytest.raises(ValueError, match=message) as error:
            make(config_class, **options)
        assert "\n" not in str(error.value) and str(error.value).endswith(".")

    @pytest.mark.parametrize(("name", "value", "reason"), WRONG_NUMBERS)
    def test_wrong_numbers_are_refused_with_a_right_one(self, name, value, reason):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}')}:? ?{re.escape(reason.lstrip(': '))}"):
            make(SHPPOConfig, **{name: value})

    @pytest.mark.parametrize("name", CHOICES)
    def test_unknown_choices_are_refused(self, name):
        config_class = next(kind for kind in (SHPPOConfig, MultiAgentGRPOConfig) if name in vars(make(kind)))
        with pytest.raises(ValueError, match=f"^{name}='other' is unknown. Use one of '"):
            make(config_class, **{name: "other"})

    @pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, SHPPOConfig])
    def test_no_number_is_accepted_without_a_look(self, config_class):
        names = dict(numeric_fields(config_class))
        assert len(names) > 60 and UNCHECKED <= set(names)
        for name, is_list in names.items():
            for value in (math.nan, -math.inf, *([] if name in UNCHECKED else [-7])):
                with pytest.raises(ValueError, match=name):
                    make(config_class, **{name: [value] if is_list else value})

    def test_infinity_is_accepted_where_it_means_no_limit(self):
        args = make(MultiAgentPPOConfig, cliprange_value=math.inf, max_grad_norm=math.inf)
        assert args.cliprange_value == args.max_grad_norm == math.inf

    def test_what_only_latents_cannot_do_is_left_to_the_shared_policy(self):
        args = make(SHPPOConfig, use_vllm=True, use_transformers_continuous_batching=True, parameter_sharing="shared")
        assert args.use_vllm
