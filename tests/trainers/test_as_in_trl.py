"""What TRL accepts and a team could read otherwise: columns with our names, any `save_steps`, reward models by id."""

import warnings

import pytest
import teams
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer
from marcog_trl.trainers.reward_functions import named_reward


class TestColumns:
    @pytest.mark.parametrize("column", ["turn", "replies", "verdicts", "rows"])
    def test_reach_a_reward_for_one_agent(self, tiny_model, tmp_path, column):
        seen = []

        def reward(completions, **kwargs):
            seen.extend(kwargs[column])
            return teams.letters(completions)

        data = teams.dataset(4, **{column: ["mine"] * 4})
        teams.make(tiny_model, tmp_path, MultiAgentPPOTrainer, reward=reward, data=data).train()
        assert seen == ["mine"] * 8


class TestSaveSteps:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"save_strategy": "steps", "save_steps": 3}, r"save_steps=3 saves inside .* of 2 optimizer steps.*=4\."),
            ({"save_strategy": "steps", "save_steps": 0.25}, r"save_steps=0\.25 saves inside .* Set save_steps=500\."),
            (
                {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 3},
                r"eval_steps=3 .* Set eval_steps=4\.",
            ),
        ],
    )
    def test_inside_a_cycle_warns(self, tiny_model, tmp_path, options, message):
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, num_iterations=2, max_steps=4, eval_dataset=teams.dataset(1),
            metric_for_best_model="reward", **options,
        )  # fmt: skip
        with pytest.warns(UserWarning, match=message):
            trainer.train()

    @pytest.mark.parametrize(("cycle", "steps"), [(2, 2), (1, 0.5)])
    def test_at_its_end_does_not(self, tiny_model, tmp_path, cycle, steps):
        trainer = teams.make(
            tiny_model,
            tmp_path,
            MultiAgentGRPOTrainer,
            num_iterations=cycle,
            max_steps=2,
            save_strategy="steps",
            save_steps=steps,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*generation cycle")
            trainer.train()
        assert (tmp_path / "checkpoint-2" / "complete.json").is_file()


class TestRewardModels:
    def test_need_no_slash(self, tiny_model, tmp_path, monkeypatch):
        """As in the Hub's oldest names, or a folder here."""
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        snapshot = tmp_path / "hub" / "models--judge" / "snapshots" / ("0" * 40)
        Qwen2ForSequenceClassification(config).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (tmp_path / "hub" / "models--judge" / "refs").mkdir()
        (tmp_path / "hub" / "models--judge" / "refs" / "main").write_text("0" * 40)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        assert named_reward("judge") == "judge"
        trainer = teams.make(tiny_model, tmp_path / "run", MultiAgentGRPOTrainer, reward="judge")
        trainer.train()
        assert len(teams.logged(trainer, "rewards/judge/mean")) == 1
