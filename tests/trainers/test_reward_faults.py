"""What fails on the way to a reward: functions that raise, return nonsense or hang, workers that die, disks that are full."""

import asyncio
import inspect
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path

import pandas as pd
import pytest
import teams
import torch
from launched import launched
from transformers import TrainerCallback

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.execution import Job
from marcog_trl.rewards.scoring import check_rewards
from marcog_trl.rollout.player import WorkflowError


ROOT = Path(__file__).parents[2]
TRAINERS = (SHPPOTrainer, MultiAgentGRPOTrainer)


def raises(completions):
    raise ZeroDivisionError("a defect of the user's")


async def hangs(completions):
    await asyncio.sleep(30)


def exits(completions):
    sys.exit("enough")


FAULTS = {
    "raises": (raises, "a defect of the user's"),
    "exits": (exits, r"reward function 'faulty' called exit: SystemExit\('enough'\)"),
    "infinity": (lambda completions: [1.0, 2.0, float("inf"), 0.0], "'faulty' returned inf for episode 2"),
    "hangs": (hangs, "'faulty' took longer than reward_timeout=2 seconds. Set a longer"),
}


def faulty(fault, at, asynchronous=False):
    """A reward function with the fault in the given calls, counted from 1 (`None`: in all of them)."""
    calls = [0]

    def score(completions, **kwargs):
        calls[0] += 1
        return fault(completions) if at is None or calls[0] in at else teams.letters(completions)

    async def score_async(completions, **kwargs):
        scored = score(completions)
        return await scored if asyncio.iscoroutine(scored) else scored

    chosen = score_async if asynchronous else score
    chosen.__name__ = "faulty"
    return chosen


def make(model, path, trainer_class=MultiAgentPPOTrainer, **options):
    rewards = options["reward"] if isinstance(options["reward"], list) else [options["reward"]]
    limit = 2 if any(inspect.iscoroutinefunction(reward) for reward in rewards) else None
    options = {"workflow": teams.Pair(), "on_reward_error": "mask", "reward_timeout": limit, **options}
    trainer = teams.make(model, path, trainer_class, **options)
    teams.script(trainer)
    return trainer


def test_nan_is_a_reward_that_does_not_apply():
    rewards = check_rewards("nan", [1.0, math.nan, torch.tensor(math.nan), None], 4, ["solver"])
    assert rewards == [1.0, None, None, None]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "returned 1 rewards for 4 episodes"),
        ([1.0] * 5, "returned 5 rewards for 4 episodes"),
        (None, "returned None"),
        ([{"a": 1.0, "b": math.nan}] * 4, "returned NaN for episode 0"),
        ([1.0, 1.0, {"a": 1.0}, 1.0], "for episode 2.*'a', 'b'"),
        ([1.0, 1.0, 1.0, {"a": 1.0, "b": 1.0, "c": 1.0}], "for episode 3"),
        ([1.0, 1.0, 1.0, {"a": 1.0, "b": None}], "for episode 3"),
        (["good"] * 4, "returned 'good' for episode 0"),
        ([1.0, 1.0, math.inf, 1.0], "returned inf for episode 2"),
    ],
)
def test_a_wrong_answer_names_the_function_and_the_episode(rewards, message):
    with pytest.raises(ValueError, match=f"reward function 'broken' .*{message}") as error:
        check_rewards("broken", rewards, 4, ["a", "b"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "asynchronous"), [("raises", False), ("exits", False), ("infinity", True), ("hangs", True)]
)
class TestOneProcess:
    def test_raise_stops_with_the_error(self, tiny_model, tmp_path, name, asynchronous):
        fault, message = FAULTS[name]
        reward = [teams.letters, faulty(fault, {2}, asynchronous)]
        trainer = make(tiny_model, tmp_path, reward=reward, on_reward_error="raise", max_steps=4)
        with pytest.raises(Exception, match=message) as error:
            trainer.train()
        assert trainer.state.global_step == 1 and "\n" not in str(error.value)

    def test_mask_does_what_none_does(self, tiny_model, tmp_path, name, asynchronous):
        """Weights, and other metrics, are those of a run whose function returned `None` for these episodes."""
        fault, message = FAULTS[name]
        runs = []
        for chosen in (faulty(fault, {2}, asynchronous), faulty(lambda texts: [None] * len(texts), {2}, asynchronous)):
            trainer = make(tiny_model, tmp_path, reward=chosen, max_steps=3)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.train()
            runs.append((trainer, [str(w.message) for w in caught if "on_reward_error='mask'" in str(w.message)]))
        (masked, warned), (none, silent) = runs
        assert len(warned) == 1 and not silent
        assert (
            re.search(message.split(". Set a longer")[0], warned[0]) and "reward function 'faulty' failed" in warned[0]
        )
        assert teams.logged(masked, "rewards/failed") == [0.0, 1.0, 0.0]
        assert teams.logged(none, "rewards/failed") == [0.0] * 3
        assert teams.logged(masked, "episodes/masked") == teams.logged(none, "episodes/masked") == [0.0, 1.0, 0.0]
        for key, expected in teams.trainable(none).items():
            assert torch.equal(teams.trainable(masked)[key], expected), key


@pytest.mark.parametrize("trainer_class", TRAINERS)
class TestMask:
    def test_weights_do_not_move_by_what_failed(self, tiny_model, tmp_path, trainer_class):
        reward = [teams.letters, faulty(raises, None)]
        trainer = make(tiny_model, tmp_path, trainer_class, reward=reward, max_steps=3, beta=0.1)
        before = teams.trainable(trainer)
        with pytest.warns(UserWarning, match="on_reward_error='mask' excludes") as caught:
            trainer.train()
        assert sum("on_reward_error" in str(w.message) for w in caught) == 1
        assert trainer.state.global_step == 3
        after = teams.trainable(trainer)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert teams.logged(trainer, "rewards/failed") == [1.0] * 3

    @pytest.mark.parametrize("at", [1, 3])
    def test_what_a_function_logs_is_absent_where_it_failed(self, tiny_model, tmp_path, trainer_class, at):
        """Also where evaluation asks it for fewer episodes than training did."""
        calls = []

        def reward(completions, log_extra, **kwargs):
            calls.append(len(completions))
            if len(calls) == at:
                raise RuntimeError("down")
            log_extra("call", [len(calls)] * len(completions))
            return teams.letters(completions)

        trainer = make(
            tiny_model, tmp_path, trainer_class, reward=reward, max_steps=3, log_completions=True,
            eval_dataset=teams.dataset(1), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
        )  # fmt: skip
        with pytest.warns(UserWarning, match="on_reward_error='mask' excludes"):
            trainer.train()
        for step in (1, 2, 3):  # the last eight rows: of training, and two of an evaluation
            table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
            expected = [None if call == at else call for call in [2 * step - 1] * 6 + [2 * step] * 2]
            assert [None if math.isnan(call) else call for call in table["call"].astype(float)] == expected

    def test_a_turn_that_failed_takes_its_episodes_along(self, tiny_model, tmp_path, trainer_class):
        """In a tree too: the second of two turns fails in the second of three steps."""
        tree = {"turn_tree": True, "per_device_train_batch_size": 12} if trainer_class is MultiAgentGRPOTrainer else {}
        runs = []
        for fault in (raises, lambda texts: [None] * len(texts)):
            trainer = make(
                tiny_model, tmp_path, trainer_class, reward=faulty(fault, {4}), max_steps=3,
                workflow=teams.Pair(num_turns=2), **tree,
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.train()
            runs.append(trainer)
        masked, none = runs
        assert [share > 0 for share in teams.logged(masked, "rewards/failed")] == [False, True, False]
        for key, expected in teams.trainable(none).items():
            assert torch.equal(teams.trainable(masked)[key], expected), key


def test_what_a_given_up_call_logs_is_dropped(tiny_model, tmp_path):
    calls = []

    async def reward(completions, log_metric, log_extra, **kwargs):
        calls.append(1)
        count = len(calls)
        log_metric("early", float(count))
        if count == 2:
            await asyncio.sleep(30)
        log_metric("late", float(count))
        log_extra("call", [count] * len(completions))
        return teams.letters(completions)

    trainer = make(tiny_model, tmp_path, reward=reward, max_steps=3)
    with pytest.warns(UserWarning, match="took longer than reward_timeout"):
        trainer.train()
    assert teams.logged(trainer, "early") == teams.logged(trainer, "late") == [1.0, 3.0]
    assert set(trainer._logs["extra"]["call"]) == {3}


class TestTimeout:
    def test_a_timeout_of_the_function_s_own_is_its_own(self, tiny_model, tmp_path):
        async def late(completions, **kwargs):
            raise TimeoutError("the judge did not answer")

        trainer = make(tiny_model, tmp_path, reward=late, on_reward_error="raise", reward_timeout=5.0)
        with pytest.raises(TimeoutError, match="the judge did not answer"):
            trainer.train()


def with_tests(count=4):
    return teams.dataset(
        count, test=[["assert f(1)"]] * count, test_format=["asserts"] * count, entry_point=["f"] * count
    )


class TestExecution:
    def test_an_executor_that_failed_stops_the_run_whatever_rewards_may_do(self, tiny_model, tmp_path):
        trainer = make(
            tiny_model,
            tmp_path,
            reward="execution_reward",
            data=with_tests(),
            isolation="best_effort",
            reward_timeout=None,
        )

        class Broken:
            def submit(self, jobs):
                future = Future()
                future.set_exception(RuntimeError("no worker could be started"))
                return future

        trainer.team._executor = Broken()
        with pytest.raises(RuntimeError, match="no worker could be started"):
            trainer.train()

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
    def test_workers_do_without_scratch_space(self, tmp_path):
        """Where every folder for temporary files is full: the worker's own process sees no other disk."""
        # A folder that holds the interpreter or this package stays as it is; TMPDIR is full in any case
        needed = [Path(sys.executable), Path(sys.prefix), ROOT]
        folders = [Path(name) for name in ("/tmp", "/var/tmp", "/dev/shm")]
        folders = [folder for folder in folders if not any(path.is_relative_to(folder) for path in needed)]
        full = Path("/tmp") if Path("/tmp") in folders else tmp_path
        folders = list(dict.fromkeys([full, *folders]))
        script = (
            "".join(f"mount -t tmpfs -o size=64k tmpfs {folder} && " for folder in folders)
            + "".join(f"(head -c 1M /dev/zero > {folder}/full; true) && " for folder in folders)
            + f'export TMPDIR={full} && exec {sys.executable} -c "import tempfile; from marcog_trl.execution import CodeExecutor, Job\n'
            "executor = CodeExecutor(num_workers=2, isolation='best_effort')\n"
            "jobs = [Job('def f(x): return x + ' + str(i % 2), ['assert f(1) == 1', 'assert f(2) == 2']) for i in range(40)]\n"
            "print(''.join('p' if verdict.status == 'passed' else 'f' for verdict in executor.run(jobs)))\n"
            'executor.close()"'
        )
        ended = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if "unshare: unshare failed" in ended.stderr or "permission denied" in ended.stderr:
            pytest.skip("no mount namespaces here")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.split()[-1] == "pf" * 20


@pytest.mark.slow
def test_processes_stop_or_go_on_together(tiny_model, tmp_path):
    """Two processes, of which one's reward function fails; neither waits for the other."""
    launched("ddp", ROOT / "tests" / "distributed" / "fail_team.py", tiny_model, tmp_path)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert "RuntimeError: reward function 'faulty' failed on process 1: ZeroDivisionError" in one["raise"]
    assert other["raise"] == "ZeroDivisionError: a defect on process 1"
    assert one["failed"] == other["failed"] and [0 < share < 1 for share in one["failed"]] == [False, True, False]
    assert one["steps"] == other["steps"] == 3
    assert all(torch.equal(one["weights"][name], tensor) for name, tensor in other["weights"].items())


@pytest.mark.slow
def test_a_thousand_batches_with_faults_leave_nothing_behind(tiny_model, tmp_path):
    """Functions raise, hang and return nonsense, programs crash, and workers are killed; ten minutes at most."""
    rng = random.Random(0)
    programs = ("def f(x): return x", "def f(x)", "import os\ndef f(x): os._exit(1)", "def f(x): return [0] * 10 ** 9")

    def executed(completions, executor, **kwargs):
        jobs = [Job(rng.choice(programs), ["assert f(1) == 1"], entry_point="f") for _ in completions]
        future = executor.submit(jobs)
        if rng.random() < 0.1 and executor._pool.workers:
            os.kill(rng.choice(executor._pool.workers).process.pid, 9)
        return [verdict.passed / verdict.total for verdict in future.result()]

    async def fails(completions, **kwargs):
        chance = rng.random()
        if chance < 0.05:
            raise ValueError("a defect")
        if chance < 0.1:
            return [float("nan")] * len(completions)
        if chance < 0.11:
            await asyncio.sleep(5)
        return teams.letters(completions)

    trainer = make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, reward=[executed, fails], max_steps=1100, isolation="best_effort",
        num_workers=2, reward_timeout=0.4, logging_steps=100,
    )  # fmt: skip
    counts = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (100, 1100):
                time.sleep(1)  # a call that was given up returns
                files = len(os.listdir("/proc/self/fd"))
                counts[state.global_step] = files, threading.active_count(), len(descendants(os.getpid()))

    trainer.add_callback(Watch())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert trainer.state.global_step == 1100
    assert 0.02 < sum(teams.logged(trainer, "rewards/failed")) / 11 < 0.3
    (files, threads, processes), (later_files, later_threads, later_processes) = counts[100], counts[1100]
    print(counts)
    assert later_files <= files + 2 and later_threads <= threads
    assert later_processes <= processes + 2  # a judge may be waiting in each worker
    trainer.executor.close()
    time.sleep(1)
    assert not descendants(os.getpid())


def descendants(pid):
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


class Frail(teams.Chain):
    """Fails after a reply that it does not like."""

    def play(self, problem):
        replies = yield {"a": f"{problem['prompt']} a"}
        if problem["prompt"].startswith("def f1") and replies["a"] and "def" not in replies["a"]:
            replies["main"]
        yield {"b": f"{problem['prompt']} b"}


class TestWorkflowsThatFail:
    """The run ends with the problem, the reply and the user's lines, or goes on without the episode, which is counted."""

    def make(self, tiny_model, folder, **options):
        data = teams.dataset(4, task_id=[f"x/{i}" for i in range(4)])
        options = {"workflow": Frail(), "data": data, "per_device_train_batch_size": 16, **options}
        return teams.make(tiny_model, folder, MultiAgentGRPOTrainer, **options)

    def test_the_run_ends(self, tiny_model, tmp_path):
        trainer = self.make(tiny_model, tmp_path)
        said = r"Frail\.play raised KeyError: 'main' \(problem 'x/1'\) after agent 'a' replied '.*'\."
        with pytest.raises(WorkflowError, match=said) as failed:
            trainer.train()
        line = failed.value.__notes__[0]
        assert line.startswith(__file__) and line.endswith('in play: replies["main"]')

    @pytest.mark.parametrize(
        "branches",
        [{}, {"credit": "counterfactual", "fanout": [2, 2], "num_generations": 4, "per_device_train_batch_size": 24}],
        ids=["groups", "branches"],
    )
    def test_the_episode_is_left_out_and_counted(self, tiny_model, tmp_path, branches):
        trainer = self.make(tiny_model, tmp_path, on_workflow_error="mask", **branches)
        with pytest.warns(UserWarning, match="on_workflow_error='mask' excludes an episode .*KeyError: 'main'"):
            trainer.train()
        log = next(log for log in trainer.state.log_history if "loss" in log)
        assert log["episodes/masked"] == 0.25 and math.isfinite(log["loss"])
