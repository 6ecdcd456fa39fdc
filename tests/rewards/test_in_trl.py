"""The reward functions in TRL's own trainer, on single-agent data."""

from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.rewards import REWARD_NAMES, class_reward, make_reward, solutions


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
FUNCTION_REWARDS = set(REWARD_NAMES) - {"class_reward", "program_reward"}
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
    monkeypatch.setattr(solutions, "shared_executor", lambda: executor)
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


SCRIPT = Path(__file__).parents[2] / "recipes" / "examples" / "plain_grpo.py"


def test_script_that_needs_nothing_but_tests(tiny_model, tmp_path, executor, monkeypatch):
    """No format, no entry point; and one executor for the process."""
    rows = [{"text": "Write f.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}] * 8
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: Dataset.from_list(rows))
    asked = []
    monkeypatch.setattr(solutions, "shared_executor", lambda: asked.append(executor) or executor)
    monkeypatch.chdir(tmp_path)
    small = "use_cpu=True, max_steps=1, max_completion_length=8, per_device_train_batch_size=8, logging_steps=1, report_to='none'"
    text = SCRIPT.read_text().replace("Qwen/Qwen2.5-Coder-0.5B-Instruct", tiny_model)
    names = {"__name__": "__main__"}
    exec(text.replace('GRPOConfig("outputs/grpo"', f'GRPOConfig("outputs/grpo", {small}'), names)
    log = names["trainer"].state.log_history[0]
    assert log["rewards/execution_reward/mean"] == 0 and log["execution_reward/tests_total"] == 2
    assert asked == [executor]


@pytest.mark.parametrize(
    "test", [["assert f(1) == 2", "assert f(2) == 5"], "assert f(1) == 2\nassert f(2) == 5", "def check(f):\n    assert f(1) == 2\n    assert f(2) == 5"],
    ids=["list", "text", "check"],
)  # fmt: skip
def test_formats_are_guessed(executor, test):
    columns = {"test": [test], "entry_point": ["f"], "executor": executor}
    assert make_reward("execution_reward")(["Write f."], ["def f(x):\n    return x + 1"], **columns) == [0.5]
