"""Names and values of CoMLRL's experiments, brought to this package's own."""

from dataclasses import fields

import pytest
from trl import ModelConfig

from marcog_trl import (
    IterativeMADPOConfig,
    IterativeMARLHFConfig,
    MultiAgentGRPOConfig,
    MultiAgentPPOConfig,
    SHPPOConfig,
)
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.comlrl import FIELDS, IMPLIED, SYNONYMS, VALUES, check, convert, flatten, implied


def fields_of(config_class):
    return {f.name for cls in (TeamArguments, config_class, ModelConfig) for f in fields(cls)}


GRPO, PPO = fields_of(MultiAgentGRPOConfig), fields_of(MultiAgentPPOConfig)
ALL = GRPO | PPO | fields_of(SHPPOConfig) | fields_of(IterativeMADPOConfig) | fields_of(IterativeMARLHFConfig)


def ours(settings, known=GRPO):
    return convert(flatten(settings), known).fields


class TestTables:
    def test_every_name_stands_for_a_field_that_exists(self):
        targets = {target for table in FIELDS.values() for target in table.values()}
        settled = {name for settings in IMPLIED.values() for name in settings}
        assert targets | settled | set(SYNONYMS.values()) | set(VALUES) <= ALL

    def test_no_name_hides_a_field_of_ours(self):
        hidden = {(key, target) for table in FIELDS.values() for key, target in table.items() if key in ALL}
        assert hidden == {
            ("advantage_normalization", "scale_rewards"),  # itself, where a trainer has it
            ("joint_mode", "joint_mode"),
            ("num_iterations", "num_rounds"),  # of MADPO and MARLHF: rounds
            ("project", "report_to"),  # of trackio; in the section wandb, that of wandb
        }


class TestFlatten:
    def test_sections_and_names_without_one_may_be_mixed(self):
        flat = flatten({"seed": 1, "magrpo": {"num_turns": 2}, "critic_model": None, "model_init_kwargs": {"a": 1}})
        assert flat == {"seed": 1, "magrpo.num_turns": 2, "critic_model": None, "model_init_kwargs": {"a": 1}}

    def test_a_section_has_keys(self):
        with pytest.raises(
            ValueError,
            match=r"magrpo=3: 'magrpo' is a section, and needs keys\. Write magrpo\.agent_learning_rate=\.\.\.",
        ):
            flatten({"magrpo": 3})


class TestCheck:
    @pytest.mark.parametrize(
        "name",
        [
            "magrpo.num_turns", "magrpo.max_new_tokens", "trainer.num_turns", "output.num_turns", "num_turns",
            "model.lora_rank", "model_name", "agents", "critics", "seed", "agent_model.type", "magrpo.critic_type",
            "agent_model.special_tokens", "magrpo", "critic_model", "reward_processor.enabled", "wandb.tags",
        ],
    )  # fmt: skip
    def test_known_names_pass(self, name):
        check(name, ALL, ("magrpo", "trainer"), "--override")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("magrpo.num_turn", "--override has an unknown key 'magrpo.num_turn'. Did you mean magrpo.num_turns\\?"),
            ("magrpo.max_new_token", "unknown key 'magrpo.max_new_token'. Did you mean magrpo.max_new_tokens"),
            ("external.sandbox_slices", "unknown key 'external.sandbox_slices'. Did you mean external.sandbox_slice"),
            ("max_new_tokens", "unknown key 'max_new_tokens'. Did you mean max_completion_length"),
            ("num_turn", "unknown key 'num_turn'. Did you mean num_turns"),
            ("magrp.num_turns", "unknown section 'magrp' in 'magrp.num_turns'. Did you mean 'magrpo'\\?"),
            ("foo.num_turns", "unknown section 'foo' in 'foo.num_turns'\\.$"),
            ("algorithm.num_turns", "unknown section 'algorithm'"),
            (
                "iac.num_turns",
                "'iac.num_turns', but the section 'iac' belongs to train_iac.py. Write magrpo.num_turns, or run",
            ),
            ("madpo.num_turns", "the section 'madpo' belongs to train_madpo.py"),
            ("marlhf.num_turns", "the section 'marlhf' belongs to train_marlhf.py"),
            ("tokenizer", "--override has the section 'tokenizer'. The tokenizer is loaded as it was saved"),
            ("tokenizer.padding_side", "--override has the section 'tokenizer'. The tokenizer is loaded as it was"),
            ("tokenize", "--override has an unknown key 'tokenize'.$"),
            (
                "magrpo.value_loss_coef",
                "'magrpo.value_loss_coef', which sets vf_coef, but this recipe has no vf_coef.",
            ),
            ("critic_model.name", "'critic_model.name', which sets critic, but this recipe has no critic."),
        ],
    )
    def test_other_names_are_refused_with_the_nearest(self, name, message):
        with pytest.raises(ValueError, match=message):
            check(name, GRPO, ("magrpo", "trainer"), "--override")


class TestConvert:
    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"agent_model": {"name": "m", "torch_dtype": "bfloat16", "type": "qwen", "max_length": 2048}},
             {"model_name_or_path": "m", "dtype": "bfloat16"}),
            ({"agent_model": {"temperature": 0.6, "top_k": None, "special_tokens": {}}}, {"temperature": 0.6, "top_k": 0}),
            ({"agents": None, "critics": None, "critic_model": None}, {}),
            ({"agents": 3}, {"num_agents": 3}),
            ({"agents": ["m", "m"]}, {"model_name_or_path": "m", "num_agents": 2}),
            ({"dataset": {"name": "d", "type": "mbpp", "train_split": "train[:9]", "eval_split": "test"}},
             {"dataset_name": "d", "dataset_train_split": "train[:9]", "dataset_test_split": "test",
              "reward": ["collaboration_reward"]}),
            ({"reward": ["graded_reward"], "dataset": {"type": "mbpp"}}, {"reward": ["graded_reward"]}),
            ({"output": {"base_dir": "o", "verbose": True, "save_final_model": False, "save_path": "elsewhere"}},
             {"output_dir": "o", "log_completions": True, "save_final_model": False}),
            ({"external": {"mode": "passed", "sandbox_slice": "all", "expert_model": "x", "original_prompt": True}},
             {"feedback": "passed", "visible_tests": None, "expert_model": "x"}),
            ({"external": {"sandbox_slice": None}}, {"visible_tests": None}),
            ({"external": {"sandbox_slice": -2}}, {"visible_tests": -2}),
            ({"reward_processor": {"enabled": True, "scale_factor": 0.5, "shift": -4}},
             {"reward_scale": 0.5, "reward_shift": -4}),
            ({"reward_processor": {"enabled": False, "scale_factor": 0.5, "shift": -4}},
             {"reward_scale": 1.0, "reward_shift": 0.0}),
            ({"magrpo": {"reward_shift": None}}, {"reward_shift": 0.0}),
            ({"magrpo": {"joint_mode": "aligned"}}, {"joint_mode": "align", "turn_tree": True}),
            ({"joint_mode": "cross"}, {"joint_mode": "cross"}),
            ({"magrpo": {"advantage_mode": "raw", "advantage_normalization": True}},
             {"advantage": "none", "scale_rewards": "group"}),
            ({"magrpo": {"collaboration_mode": "centralized"}}, {"centralized": True}),
            ({"magrpo": {"discount": 0.9, "turn_gradient_weights": [1.5, 0.5], "termination_threshold": -0.2}},
             {"gamma_turn": 0.9, "turn_weights": [1.5, 0.5], "early_termination_threshold": -0.2}),
            ({"magrpo": {"rollout_buffer_size": 8, "train_batch_size": 4}}, {"samples_per_step": 4}),
            ({"magrpo": {"rollout_buffer_size": 8, "train_batch_size": None}}, {"samples_per_step": 8}),
            ({"magrpo": {"per_device_train_batch_size": 1}}, {"samples_per_step": 1}),
            ({"magrpo": {"per_device_train_batch_size": 1, "train_batch_size": 4}}, {"samples_per_step": 4}),
            ({"trainer": {"per_device_train_batch_size": 1}}, {"per_device_train_batch_size": 1}),
            ({"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 1}),
            ({"magrpo": {"eval_interval": 4, "eval_num_samples": 2, "eval_batch_size": 1}},
             {"eval_strategy": "steps", "eval_steps": 4, "eval_problems": 2}),
            ({"magrpo": {"eval_interval": 0}}, {"eval_strategy": "no"}),
            ({"magrpo": {"reference_kl_enabled": True}}, {"beta": 0.1}),
            ({"magrpo": {"reference_kl_coef": 0.05, "reference_kl_enabled": True}}, {"beta": 0.05}),
            ({"magrpo": {"reference_kl_enabled": False, "reference_kl_coef": 0.05}}, {"beta": 0.0}),
            ({"magrpo": {"parallel_training": "none", "agent_devices": ["cuda:0"], "critic_devices": None}}, {}),
            ({"magrpo": {"num_turns": 2}, "num_turns": 3}, {"num_turns": 3}),
        ],
    )  # fmt: skip
    def test_names_and_values(self, settings, expected):
        assert ours(settings) == expected

    def test_what_actor_critics_have(self):
        section = {"value_loss_coef": 0.6, "value_clip_range": None, "use_separate_critic": True, "critic_type": "v"}
        settings = {"iac": {**section, "advantage_normalization": True}}
        assert ours(settings, PPO) == {
            "vf_coef": 0.6, "cliprange_value": "inf", "critic_backprop": False, "advantage_normalization": "agent"
        }  # fmt: skip
        assert ours({"iac": {"use_separate_critic": False}}, PPO) == {"critic_backprop": True}

    def test_a_critic_of_the_policys_own_name_is_accepted(self):
        settings = {"agent_model": {"name": "m"}, "critic_model": {"name": "m", "top_p": 0.9}, "critics": ["m", "m"]}
        assert ours(settings, PPO) == {"model_name_or_path": "m"}

    def test_wandb_becomes_its_environment(self):
        section = {"project": "p", "entity": "e", "name": "n", "dir": "d", "tags": ["a", "turns_2"]}
        settings, environment, _ = convert(flatten({"wandb": section}), GRPO)
        assert settings == {"report_to": "wandb", "run_name": "n"}
        assert environment == {
            "WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_DIR": "d", "WANDB_TAGS": "a,turns_2"
        }  # fmt: skip
        assert convert({"wandb.project": "p", "report_to": "none"}, GRPO).fields == {"report_to": "none"}
        assert convert({"wandb.entity": None}, GRPO) == ({}, {}, [])

    def test_labels_are_listed(self):
        settings = {"agent_model": {"name": "m", "type": "qwen", "max_length": 2048}, "dataset": {"private": True}}
        converted = convert(flatten(settings), GRPO)
        assert converted.fields == {"model_name_or_path": "m"}
        assert converted.labels == ["agent_model.type", "agent_model.max_length", "dataset.private"]

    def test_a_section_may_settle_what_it_is_named_after(self):
        assert implied(["marloo.num_turns", "seed"]) == {"advantage": "rloo"}
        assert implied(["ac.num_turns"]) == {"workflow": "single"}
        assert implied(["magrpo.num_turns", "marloo"]) == {}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"agents": ["a", "b"]}, r"agents=\['a', 'b'\] is not supported: the team shares one model. Set"),
            ({"agents": "a"}, "agents='a' is not supported"),
            ({"agent_model": {"name": "m"}, "critic_model": {"name": "c"}},
             "critic_model.name='c' is not supported: the critic is a head on the policy, 'm'. Use that name, "
             "or --override critic_model=null."),
            ({"agent_model": {"name": "m"}, "critics": ["m", "c"]}, r"critics=\['m', 'c'\] is not supported"),
            ({"agent_model": {"special_tokens": {"pad_token": "x"}}}, "special_tokens=.* not supported. The tokenizer has its own"),
            ({"dataset": {"size": 5}}, r"dataset.size=5 is not supported. Set dataset.train_split='train"),
            ({"dataset": {"type": "humanevl"}}, "dataset.type='humanevl' is unknown. Use one of .* Did you mean 'humaneval'"),
            ({"dataset": {"type": "chess"}}, "dataset.type='chess' is unknown. Use one of humaneval, coophumaneval, mbpp.$"),
            ({"dataset": {"type": "classeval"}}, "type='classeval' is not supported. Remove it, and set workflow: classeval"),
            ({"magrpo": {"per_device_train_batch_size": 4}},
             "magrpo.per_device_train_batch_size=4 is ambiguous: .* Set magrpo.train_batch_size for problems"),
            ({"output": {"base_dir": "o", "save_path": "p"}}, "output.save_path='p' is not supported: the team is saved in"),
            ({"external": {"external_prompt_passthrough": True}}, "passthrough=True is not supported. Agents always see their"),
            ({"magrpo": {"parallel_training": "mp"}}, "parallel_training='mp' is not supported. The team shares one model"),
            ({"magrpo": {"agent_devices": ["cuda:0", "cuda:1"]}}, "agent_devices=.* is not supported"),
            ({"iac": {"critic_type": "q"}}, "critic_type='q' is not supported. .* Set critic_type='v'."),
            ({"magrpo": {"eval_batch_size": 4}}, "eval_batch_size=4 is not supported. Set per_device_eval_batch_size"),
        ],
    )  # fmt: skip
    def test_what_there_is_not_is_refused_with_the_reason(self, settings, message):
        with pytest.raises(ValueError, match=message):
            ours(settings)
