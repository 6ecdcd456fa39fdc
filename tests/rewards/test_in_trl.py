"""The reward functions in TRL's own trainer, on single-agent data."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.rewards import collaboration_reward, make_reward, scoring


def test_rewards_work_in_grpo_trainer(tiny_model, tmp_path, executor, monkeypatch):
    # TRL hands no executor over: the process-wide one is asked for, here with the isolation that this machine has
    monkeypatch.setattr(scoring, "shared_executor", lambda: executor)
    row = {
        "prompt": 'def f(x):\n    """Add one."""\n',
        "entry_point": "f",
        "test": ["assert f(1) == 2"],
        "test_format": "asserts",
    }
    config = GRPOConfig(
        tmp_path,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        tiny_model,
        reward_funcs=[collaboration_reward, make_reward("execution_reward", all_or_nothing=True)],
        args=config,
        train_dataset=Dataset.from_list([row] * 4),
    )
    trainer.train()
    log = trainer.state.log_history[0]
    for name in ("execution_reward", "collaboration_reward"):
        assert 0 <= log[f"rewards/{name}/mean"] <= 4
        assert 0 <= log[f"{name}/solved"] <= 1
