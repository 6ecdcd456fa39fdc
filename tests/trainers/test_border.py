"""What users bring to a trainer: names of arguments, launchers, tokenizers, several datasets, algorithms of their own."""

import logging
import re

import pytest
import teams
import torch
from transformers import AutoTokenizer

from marcog_trl import MADPOConfig, MultiAgentGRPOConfig, MultiAgentPPOConfig, MultiAgentPPOTrainer, SHPPOConfig
from marcog_trl.team.lending import lent
from marcog_trl.trainers import GroupRelative, MultiAgentGRPOTrainer


@pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, SHPPOConfig])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_prompt_length", "Prompts are never cut: leave it out."),
        ("tokenizer", "It is an argument of the trainer: processing_class=..."),
        ("reward_funcs", "It is an argument of the trainer: reward_funcs=..."),
        ("peft_config", "It is an argument of the trainer: peft_config=..."),
        ("max_new_tokens", "Did you mean max_completion_length?"),
        ("num_generation", "Did you mean num_generations?"),
        ("kl_coef", "Did you mean beta?"),
        ("evaluation_strategy", "Did you mean eval_strategy?"),
        ("torch_dtype", "Did you mean model_init_kwargs={'dtype': ...}?"),
        ("learning_rat", "Did you mean learning_rate?"),
        ("qqqqqqqq", "Leave it out."),
    ],
)
def test_names_of_settings(config_class, name, instead):
    with pytest.raises(TypeError, match=f"^{config_class.__name__} has no argument '{name}'. {re.escape(instead)}$"):
        config_class("out", **{name: 1})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tokenizer", "Did you mean processing_class?"),
        ("config", "Did you mean args?"),
        ("dataset", "Did you mean train_dataset?"),
        ("reward_function", "Did you mean reward_funcs?"),
        ("lora_config", "Did you mean peft_config?"),
        ("workflows", "Did you mean workflow?"),
        ("ref_model", "The reference is the model without its adapter; set beta: leave it out."),
        ("max_new_tokens", "It is an argument of args=MultiAgentPPOConfig(...): max_completion_length=..."),
        ("learning_rate", "It is an argument of args=MultiAgentPPOConfig(...): learning_rate=..."),
        ("reward_weights", "It is an argument of args=MultiAgentPPOConfig(...): reward_weights=..."),
    ],
)
def test_names_of_arguments(name, instead):
    with pytest.raises(TypeError, match=f"^MultiAgentPPOTrainer has no argument '{name}'. {re.escape(instead)}$"):
        MultiAgentPPOTrainer("no-model", teams.letters, train_dataset=teams.dataset(), **{name: 1})


@pytest.mark.parametrize("config_class", [MultiAgentGRPOConfig, MultiAgentPPOConfig, MADPOConfig])
def test_deepspeed_needs_a_launcher(monkeypatch, config_class):
    for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"^deepspeed needs a launcher.*accelerate launch.*$"):
        config_class("out", deepspeed={"zero_optimization": {"stage": 2}})


def test_a_tokenizer_without_an_end(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no end-of-sequence token.*Set tokenizer.eos_token"):
        teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, processing_class=tokenizer)


def test_several_evaluation_sets_have_metrics_of_their_own(tiny_model, tmp_path):
    sets = {"short": teams.dataset(1), "more": teams.dataset(3)}
    rewards = {"def f0(x):": 1.0, "def f1(x):": 4.0, "def f2(x):": 7.0, "def f3(x):": 0.0}

    def reward(completions, prompts, **columns):
        return [rewards[prompt] for prompt in prompts]

    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_more_reward",
    }  # fmt: skip
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, reward, eval_dataset=sets, **options)
    trainer.train()
    assert teams.logged(trainer, "eval_short_reward") == [1.0] and teams.logged(trainer, "eval_more_reward") == [4.0]
    assert teams.logged(trainer, "eval_more_agents/solver/reward") == [4.0]
    assert not teams.logged(trainer, "eval_reward") and teams.logged(trainer, "reward")
    found = trainer.evaluate()
    assert (found["eval_short_reward"], found["eval_more_reward"]) == (1.0, 4.0)
    assert trainer.evaluate(sets["short"])["eval_reward"] == 1.0


def test_tokens_of_unused_slots_do_not_count(tiny_model, tmp_path):
    trainer = teams.make(
        tiny_model,
        tmp_path,
        MultiAgentGRPOTrainer,
        workflow=teams.Short(),
        per_device_train_batch_size=10,
        max_steps=2,
    )
    calls = teams.script(trainer)
    trainer.train()
    sizes = [sum(map(len, prompts)) + sum(map(len, replies)) for prompts, replies in calls]
    assert teams.logged(trainer, "num_tokens")[-1] == sum(sizes) == trainer.state.num_input_tokens_seen


class WithFeatures(GroupRelative):
    """An algorithm whose rows have as many features as replies may have tokens."""

    def inputs(self, batch):
        return {"features": torch.ones(len(batch.rows), 6)}

    def context(self, inputs, keep, part=None):
        assert inputs["features"].shape[1] == 6
        return super().context(inputs, keep, part)


def test_tensors_of_an_algorithm_keep_their_columns(tiny_model, tmp_path):
    def reward(completions, prompts, **columns):
        return [float(i % 2) if prompt == "def f0(x):" else 0.0 for i, prompt in enumerate(prompts)]

    gradients = []
    for algorithm in (WithFeatures, GroupRelative):
        watch = teams.Watch()
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, reward, algorithm=algorithm, workflow=teams.Pair(), callbacks=[watch]
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        trainer._generate_single_turn = lambda prompt_ids, *rest: (
            [[20, 21] if "f0(" in tokenizer.decode(ids) else [30, 31, 32, 33, 34, 35] for ids in prompt_ids],  # noqa: B023
            None,
        )
        trainer.train()
        gradients += watch.gradients
    own, expected = gradients
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6)


def test_callbacks_are_restored_without_a_warning(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    options = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}
    teams.make(tiny_model, tmp_path, **options).train()
    resumed = teams.make(tiny_model, tmp_path, max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    assert "not included in current configuration" not in caplog.text
    assert "advantage_variance" in resumed.state.stateful_callbacks


def test_lent_attributes_go_back_to_the_class():
    class Owner:
        x, y = 1, 2

    owner = Owner()
    owner.y = 3
    with pytest.raises(KeyError), lent(owner, x=4, y=5):
        assert (owner.x, owner.y) == (4, 5)
        raise KeyError
    assert vars(owner) == {"y": 3}
