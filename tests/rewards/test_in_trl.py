"""The reward functions in TRL's own trainer, on single-agent data."""

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.rewards import _REWARDS, class_reward, make_reward, verdicts


FUNCTION = {
    "prompt": 'def f(x):\n    """Add one."""\n',
    "entry_point": "f",
    "test": ["assert f(1) == 2"],
    "test_format": "asserts",
}
CLASS = {
    "prompt": "class A:\n    def f(self):\n        pass\n",
    "entry_point": "A",
    "test": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(A().f(), 1)\n",
    "test_format": "unittest",
}
FUNCTION_REWARDS = set(_REWARDS) - {"class_reward"}
OPTIONS = {"execution_reward": {"all_or_nothing": True}}


@pytest.mark.parametrize(
    ("row", "rewards"),
    [
        (FUNCTION, [make_reward(name, **OPTIONS.get(name, {})) for name in FUNCTION_REWARDS]),
        (CLASS, [class_reward]),
    ],
    ids=["functions", "classes"],
)
def test_rewards_work_in_grpo_trainer(tiny_model, tmp_path, executor, monkeypatch, row, rewards):
    # TRL hands no executor over: the process-wide one is asked for, here with the isolation that this machine has
    monkeypatch.setattr(verdicts, "shared_executor", lambda: executor)
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
    trainer = GRPOTrainer(tiny_model, reward_funcs=rewards, args=config, train_dataset=Dataset.from_list([row] * 4))
    trainer.train()
    log = trainer.state.log_history[0]
    names = {key.split("/")[1] for key in log if key.startswith("rewards/")}
    assert names == (FUNCTION_REWARDS if row is FUNCTION else {"class_reward"})
    for name in names:
        assert -1 <= log[f"rewards/{name}/mean"] <= 6
        assert 0 <= log[f"{name}/solved"] <= 1
