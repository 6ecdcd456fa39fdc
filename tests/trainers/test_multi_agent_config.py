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
from marcog_trl.trainers import config_checks


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


BAD = [
    ({"scale_rewards": "agent"}, "scale_rewards='agent' is unknown. Use one of 'none', 'group', 'batch'."),
    (
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation='normalize_then_sum' needs MultiAgentGRPOTrainer, because",
    ),
    ({"feedback": "loud"}, "feedback='loud' is unknown. Use one of 'level_feedback', 'level_passed',"),
    ({"agent_loss_weighting": "row"}, "agent_loss_weighting='row' is unknown. Use one of 'agent', 'token'."),
    ({"isolation": "lax"}, "isolation='lax' is unknown. Use one of 'strict', 'best_effort', 'none'."),
    ({"loss_type": "ppo"}, "loss_type='ppo' is unknown. Use one of 'dapo', 'grpo',"),
    (
        {"importance_sampling_level": "row"},
        "importance_sampling_level='row' is unknown. Use one of 'token', 'sequence'.",
    ),
    ({"vllm_mode": "remote"}, "vllm_mode='remote' is unknown. Use one of 'colocate', 'server'."),
    ({"vllm_importance_sampling_mode": "row"}, "vllm_importance_sampling_mode='row' is unknown. Use one of"),
    ({"report_to": "paper"}, "report_to='paper' is unknown. Use one of azure_ml, clearml,"),
    ({"report_to": ["tensorboard", "paper"]}, "report_to='paper' is unknown."),
    ({"learning_rate": -1.0}, "learning_rate=-1.0 must be at least 0. Set learning_rate=1e-05."),
    ({"learning_rate": math.nan}, "learning_rate=nan must be a finite number. Set learning_rate=1e-05."),
    ({"learning_rate": math.inf}, "learning_rate=inf must be a finite number."),
    ({"learning_rate": "1e-5"}, "learning_rate='1e-5' must be a number. Set learning_rate=1e-05."),
    ({"num_turns": "2"}, "num_turns='2' must be a whole number. Set num_turns=1."),
    ({"num_turns": 1.5}, "num_turns=1.5 must be a whole number. Set num_turns=1."),
    ({"num_turns": True}, "num_turns=True must be a whole number. Set num_turns=1."),
    ({"num_turns": None}, "num_turns=None must be a whole number. Set num_turns=1."),
    ({"temperature": 0}, "temperature=0 must be greater than 0. Set temperature=1.0."),
    ({"top_p": 5.0}, "top_p=5.0 must be greater than 0 and at most 1. Set top_p=1.0."),
    ({"top_k": -1}, "top_k=-1 must be at least 0. Set top_k=0."),
    ({"min_p": 7.0}, "min_p=7.0 must be at least 0 and at most 1."),
    ({"seed": -1}, "seed=-1 must be at least 0 and at most 4294967295. Set seed=42."),
    ({"seed": 2**40}, "seed=1099511627776 must be at least 0 and at most 4294967295."),
    ({"max_steps": 0}, "max_steps=0 trains nothing. Set max_steps=1, or max_steps=-1 to train num_train_epochs."),
    ({"num_train_epochs": 0}, "num_train_epochs=0 trains nothing. Set num_train_epochs=1."),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1."),
    ({"execution_memory_mb": 1}, "execution_memory_mb=1 must be at least 64. Set execution_memory_mb=512."),
    ({"turn_weights": [1.5, -0.5]}, "turn_weights=[1.5, -0.5]: every entry must be at least 0."),
    ({"turn_weights": 1.5}, "turn_weights=1.5 must be a list of numbers."),
    ({"reward_weights": [math.nan]}, "reward_weights=[nan]: every entry must be a finite number."),
    ({"gamma_turn": 1.5}, "gamma_turn=1.5 must be at least 0 and at most 1. Set gamma_turn=1.0."),
    ({"num_agents": 0}, "num_agents=0 must be at least 1."),
    ({"critic": "shared"}, "critic='shared' is unknown. Use one of 'team', 'agent', 'group', 'none'."),
    ({"kl_penalty": "both"}, "kl_penalty='both' is unknown. Use one of 'loss', 'reward'."),
    ({"advantage_normalization": "group"}, "advantage_normalization='group' is unknown. Use one of 'agent', 'batch',"),
    ({"lam_turn": 2}, "lam_turn=2 must be at least 0 and at most 1."),
    ({"cliprange_value": 0}, "cliprange_value=0 must be greater than 0. Set cliprange_value=0.2."),
    ({"critic": "none", "num_generations": 1}, "num_generations=1. Set num_generations=4, or critic='team'."),
    (
        {"num_turns": 2, "feedback": "expert_edits"},
        "feedback='expert_edits' needs a model to ask, but expert_model=None.",
    ),
    (
        {"write_report": True, "logging_strategy": "no"},
        "write_report=True needs logged metrics, but logging_strategy='no'",
    ),
    ({"generation_kwargs": {"a": {1}}}, "generation_kwargs={'a': {1}} cannot be written to team.json:"),
    (
        {"merge_for_generation": True, "use_vllm": True, "vllm_mode": "server"},
        "merge_for_generation=True does not support use_vllm=True: it merges for `generate` only. Set one of them to False.",
    ),
]
BAD += [
    ({"generation_kwargs": given}, message)
    for given, message in (
        ({"num_return_sequences": 2, "num_beams": 2}, "has num_return_sequences=2, but each prompt needs one reply"),
        (
            {"prompt_lookup_num_tokens": 3},
            "selects assisted generation, which is not supported. Use sampling, greedy",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "selects contrastive search"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "selects group beam search"),
        ({"dola_layers": "low"}, "selects dola generation"),
        ({"guidance_scale": 2.0}, "has guidance_scale=2.0, which would sample from another policy"),
        ({"return_dict_in_generate": True}, "has return_dict_in_generate=True"),
    )
]
BAD_LATENTS = [
    ({"parameter_sharing": "all"}, "parameter_sharing='all' is unknown. Use one of 'latent', 'shared', 'separate'."),
    ({"latent_scope": "team"}, "latent_scope='team' is unknown. Use one of 'observation', 'agent'."),
    ({"latent_distance": "l2"}, "latent_distance='l2' is unknown. Use one of 'cosine', 'minmax'."),
    ({"latent_size": 0}, "latent_size=0 must be at least 1. Set latent_size=8."),
    ({"sigma_min": 0.0}, "sigma_min=0.0 must be greater than 0."),
    ({"core_scale": -1.0}, "core_scale=-1.0 must be at least 0."),
    (
        {"use_vllm": True},
        "use_vllm=True does not support latent_scope='observation': vLLM serves one adapter per agent",
    ),
    (
        {"use_vllm": True, "latent_scope": "agent", "vllm_mode": "server"},
        "vllm_mode='server' does not support parameter_sharing='latent': TRL's vLLM server does not serve LoRA adapters. "
        "Set vllm_mode='colocate', or parameter_sharing='shared'.",
    ),
    (
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_tensor_parallel_size": 2},
        "vllm_tensor_parallel_size=2 does not support parameter_sharing='separate':",
    ),
    (
        {"use_vllm": True, "parameter_sharing": "separate", "vllm_enable_sleep_mode": True},
        "Set vllm_enable_sleep_mode=False, or parameter_sharing='shared'.",
    ),
    (
        {"use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching=True does not support parameter_sharing='latent': all rows must use one adapter.",
    ),
    (
        {"merge_for_generation": True},
        "merge_for_generation=True does not support parameter_sharing='latent': all rows must use one adapter. Set "
        "merge_for_generation=False, or parameter_sharing='shared'.",
    ),
    (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "Set gradient_checkpointing_kwargs={'use_reentrant': False}.",
    ),
]
BAD_GROUPS = [
    ({"advantage": "best"}, "advantage='best' is unknown. Use one of 'mean', 'rloo', 'max', 'none'."),
    ({"joint_mode": "all"}, "joint_mode='all' is unknown. Use one of 'align', 'cross'."),
    ({"max_joint_actions": 0}, "max_joint_actions=0 must be at least 1."),
    ({"joint_mode": "cross", "num_turns": 2}, "joint_mode='cross' with num_turns=2 needs turn_tree=True"),
    (
        {"num_generations": 1},
        "compares the replies of a group, but num_generations=1. Set num_generations=4, for example.",
    ),
]
# Fields for which every finite number means something
SIGNED = {"visible_tests", "reward_scale", "reward_shift", "reward_weights", "early_termination_threshold"}
# Fields of TRL's that have no effect here, or that are not numbers of the algorithm
UNUSED = {"local_rank", "ddp_bucket_cap_mb", "vllm_importance_sampling_cap"}


def numeric_fields(config_class):
    """Names of fields that are numbers, and whether they are lists of them."""
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kinds = {*(get_args(hints[field.name]) or [hints[field.name]])} - {type(None)}
        if kinds <= {int, float, list[int], list[float]} and field.init:
            yield field.name, bool(kinds & {list[int], list[float]})


class TestBadValues:
    @pytest.mark.parametrize(
        ("config_class", "options", "message"),
        [(config_class, *bad) for config_class in CONFIGS for bad in BAD]
        + [(SHPPOConfig, *bad) for bad in BAD_LATENTS]
        + [(MultiAgentGRPOConfig, *bad) for bad in BAD_GROUPS],
    )
    def test_are_refused_with_what_to_do(self, config_class, options, message):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            make(config_class, **options)
        assert "\n" not in str(error.value) and str(error.value).endswith(".")

    @pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, SHPPOConfig])
    def test_no_number_is_accepted_without_a_look(self, config_class):
        names = dict(numeric_fields(config_class))
        assert len(names) > 60 and SIGNED <= set(names)
        for name, is_list in names.items():
            for value in (math.nan, -math.inf, -7):
                if value == -7 and name in SIGNED | UNUSED:
                    continue
                with pytest.raises(ValueError, match=f"^{name}="):
                    make(config_class, **{name: [value] if is_list else value})

    def test_infinity_is_accepted_where_it_means_no_limit(self):
        args = make(MultiAgentPPOConfig, cliprange_value=math.inf, max_grad_norm=math.inf)
        assert args.cliprange_value == args.max_grad_norm == math.inf

    def test_a_package_that_is_not_installed_is_named(self, monkeypatch):
        monkeypatch.setattr(config_checks, "get_available_reporting_integrations", lambda: ["wandb"])
        with pytest.raises(
            ValueError, match=r"report_to='mlflow' needs the package mlflow, .* Run `pip install mlflow`"
        ):
            make(MultiAgentPPOConfig, report_to=["wandb", "mlflow"])

    def test_what_only_latents_cannot_do_is_left_to_the_shared_policy(self):
        args = make(SHPPOConfig, use_vllm=True, use_transformers_continuous_batching=True, parameter_sharing="shared")
        assert args.use_vllm
