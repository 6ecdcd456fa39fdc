"""The reward functions in TRL's own trainer, on single-agent data."""

from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.problems import load_problems, solution_job
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
FUNCTION_REWARDS = set(REWARD_NAMES) - {"class_reward", "coverage_reward", "program_reward"}
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


RIGHT, PROGRAM = "def f(x):\n    return 2 * x", "print(2 * int(input()))"


@pytest.mark.parametrize(
    ("reply", "test"),
    [
        (PROGRAM, '{"inputs": ["2\\n"], "outputs": ["4\\n"]}'),
        (PROGRAM, [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        (PROGRAM, {"input": ["2\n"], "output": ["4\n"]}),
        (RIGHT, "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"),
        (RIGHT, "def assert_eq(a, b):\n    assert a == b\n\nassert_eq(f(1), 2)\n"),
        (RIGHT, ["assert f(1) == 2", ""]),
    ],
)
def test_tests_are_read_as_by_load_problems(executor, tmp_path, reply, test):
    (reward,) = make_reward("execution_reward")(["Write f."], [reply], test=[test], executor=executor)
    assert reward == 1.0
    Dataset.from_list([{"prompt": "Write f.", "test": test}]).to_json(tmp_path / "set.jsonl")
    [problem] = load_problems(str(tmp_path / "set.jsonl"))
    assert executor.run([solution_job(problem, reply)])[0].status == "passed"


@pytest.mark.parametrize("name", sorted(FUNCTION_REWARDS))
@pytest.mark.parametrize(
    ("test", "message"),
    [
        (["assert f(1) =="], r"tests\[0\]='assert f\(1\) ==' does not parse"),
        (["f(1) == 2"], "is not asserted"),
        (["import pytest\nassert f(1) == pytest.approx(2)"], r"packages=\['pytest'\]"),
        ([{"question": "2"}], r"the keys \['question'\]"),
    ],
)
def test_tests_that_cannot_be_run_end_the_training(executor, name, test, message):
    """They are not a reward of 0, of which nobody is told."""
    with pytest.raises(ValueError, match=message) as error:
        make_reward(name)([FUNCTION["prompt"]], [RIGHT], test=[test], entry_point=["f"], executor=executor)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "after", ["from solution import f\nprint(f(3))", "def f(x):\n    ...", "def g():\n    return 1"]
)
def test_the_entry_point_is_taken_from_the_tests(executor, after):
    reply = f"```python\n{RIGHT}\n```\nThen:\n```python\n{after}\n```"
    assert make_reward("execution_reward")(["Write f."], [reply], test=[["assert f(2) == 4"]], executor=executor) == [
        1
    ]


def parts(role, *texts):
    return [{"role": role, "content": [{"type": "text", "text": text} for text in texts]}]


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [
        (parts("user", "Write f."), [{"role": "assistant", "content": RIGHT}], 1.0),
        (parts("user", "Write ", "f."), parts("assistant", "def f(x):\n", "    return 2 * x"), 1.0),
        (parts("user", "Write f."), [{"role": "assistant", "tool_calls": [{}]}], 0.0),
        (parts("user", "Write f."), [{"role": "assistant", "content": None, "tool_calls": [{}]}], 0.0),
        (parts("user", "Write f."), [{"role": "assistant", "content": ""}, {"role": "tool", "content": RIGHT}], 0.0),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Write f."}]}], RIGHT, 1.0),
        (parts("user", "Write f."), [], 0.0),
    ],
)
def test_messages_in_parts_and_calls_of_tools(executor, prompt, completion, reward):
    given = {"test": [["assert f(1) == 2"]], "executor": executor}
    assert make_reward("execution_reward")([prompt], [completion], **given) == [reward]
