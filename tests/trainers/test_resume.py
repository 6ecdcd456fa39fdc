"""Runs that are killed go on from the last checkpoint that is whole, and stop and keep what they are told to."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import teams
import torch
from filelock import FileLock
from launched import launched
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from marcog_trl import MultiAgentGRPOTrainer, SHPPOTrainer
from marcog_trl.trainers.checkpointing import (
    LOCK_FILE,
    find_checkpoint,
    only_run_in,
)


KILL_TEAM = Path(__file__).parents[1] / "distributed" / "kill_team.py"


def kill_team(model, out, plan, mode="one", timeout=280):
    """Runs `kill_team.py`, and returns its series."""
    out.mkdir(parents=True)
    launched(mode, KILL_TEAM, model, out, json.dumps(plan), timeout=timeout)
    return json.loads((out / "results.json").read_text())


# Three kills for several processes, and six for one
MANY = [
    [["save", 9, 0], ["reward", 1, -1]],
    [["backward", 11, -1]],
    [["save", 20, 0]],
    [["generate", 20, 0], ["save", 4, 0]],
]
# The 25th of the `save` moments, of which a checkpoint has about 15, is in the midst of the second one
FEW = {
    "one": [
        {"run": "ppo", "max_steps": 4, "kills": [[["save", 25, 0], ["reward", 1, 0]]]},
        {"run": "tree", "max_steps": 4, "kills": [[["save", 25, 0], ["generate", 3, 0]]]},
    ],
    "ddp": [{"run": "shppo", "max_steps": 4, "kills": [[["save", 25, 0], ["backward", 2, 1]]]}],
}


class TestKilledRun:
    @pytest.mark.parametrize("mode", ["one", pytest.param("ddp", marks=pytest.mark.slow)])
    def test_ends_as_the_uninterrupted_one(self, tiny_model, tmp_path, mode):
        series = kill_team(tiny_model, tmp_path / mode, FEW[mode], mode)
        assert [len(one["kills"]) for one in series] == [2] * len(FEW[mode])
        for one in series:
            assert one["resumed_at"] == 2, one
            assert one["difference"] <= (0 if mode == "one" else 1e-6), one

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["one", "ddp", "zero2", "zero3"])
    def test_ends_so_at_any_moment(self, tiny_model, tmp_path, mode):
        runs = ("ppo", "shppo", "agent", "grpo", "tree")
        kills = MANY if mode == "one" else MANY[:2]
        series = kill_team(
            tiny_model, tmp_path / mode, [{"run": run, "kills": kills} for run in runs], mode, timeout=3600
        )
        assert [one["kills"] for one in series] == kills * len(runs)
        assert all(one["difference"] <= (0 if mode == "one" else 1e-6) for one in series), series


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


class TestHalfWrittenCheckpoint:
    @pytest.fixture(scope="class")
    def run(self, tiny_model, tmp_path_factory):
        trainer = self.make(tiny_model, tmp_path_factory.mktemp("run"), max_steps=2)
        trainer.train()
        return Path(trainer.args.output_dir)

    @staticmethod
    def make(model, path, **options):
        options = {"workflow": teams.Pair(), "save_strategy": "steps", "save_steps": 1, **options}
        trainer = teams.make(model, path, SHPPOTrainer, **options)
        teams.script(trainer)
        return trainer

    @pytest.fixture
    def copy(self, run, tmp_path):
        return Path(shutil.copytree(run, tmp_path / "run"))

    def test_is_left_aside_whichever_file_it_lacks(self, tiny_model, run, copy):
        trainer = self.make(tiny_model, copy, max_steps=2)
        names = [
            path.relative_to(run / "checkpoint-2") for path in (run / "checkpoint-2").rglob("*") if path.is_file()
        ]
        assert {"complete.json", "trainer_state.json", "optimizer.pt", "rng_state.pth"} <= set(map(str, names))
        for name in names:
            # What appears by rename is never half-written
            whole_or_absent = str(name) in ("complete.json", "team.json")
            for damage in (os.remove,) if whole_or_absent else (os.remove, halve):
                damage(copy / "checkpoint-2" / name)
                with pytest.warns(UserWarning, match=r"checkpoint-2 is skipped: .*resumes from .*checkpoint-1\."):
                    assert find_checkpoint(trainer.args, True) == str(copy / "checkpoint-1")
                with pytest.raises(ValueError, match=r"cannot resume from .*checkpoint-2: it"):
                    find_checkpoint(trainer.args, str(copy / "checkpoint-2"))
                shutil.copy(run / "checkpoint-2" / name, copy / "checkpoint-2" / name)
        assert find_checkpoint(trainer.args, True) == str(copy / "checkpoint-2")

    def test_alone_is_an_error(self, tiny_model, copy):
        shutil.rmtree(copy / "checkpoint-1")
        os.remove(copy / "checkpoint-2" / "optimizer.pt")
        with pytest.raises(
            ValueError, match=r"cannot resume from .*checkpoint-2: it has no optimizer.pt\. .* start a new run\."
        ):
            self.make(tiny_model, copy).train(resume_from_checkpoint=True)

    def test_is_written_anew(self, tiny_model, run, copy):
        os.remove(copy / "checkpoint-2" / "trainer_state.json")
        trainer = self.make(tiny_model, copy, max_steps=2)
        with pytest.warns(UserWarning, match="checkpoint-2 is skipped"):
            trainer.train(resume_from_checkpoint=True)
        assert find_checkpoint(trainer.args, True) == str(copy / "checkpoint-2")

    def test_is_one_that_is_being_overwritten(self, tiny_model, copy, monkeypatch):
        """Files of an earlier run must not pass for those of the one that was killed."""
        trainer = self.make(tiny_model, copy, max_steps=2)
        monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(resume_from_checkpoint=str(copy / "checkpoint-1"))
        with pytest.warns(UserWarning, match=r"checkpoint-2 is skipped: it has no complete.json"):
            assert find_checkpoint(trainer.args, True) == str(copy / "checkpoint-1")

    def test_is_one_that_leaves_rows_to_be_trained_on(self, tiny_model, tmp_path):
        options = {"max_steps": 3, "save_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4}
        options["data"] = teams.dataset(6)
        with pytest.warns(UserWarning, match=r"max_steps=3 ends inside a generation cycle of 2"):
            trainer = self.make(tiny_model, tmp_path, **options)
            trainer.train()
        with pytest.raises(
            ValueError, match=r"cannot resume from .*checkpoint-3: it was written inside a generation cycle"
        ):
            find_checkpoint(trainer.args, str(tmp_path / "checkpoint-3"))
        with pytest.warns(UserWarning, match=r"checkpoint-3 is skipped: .*resumes from .*checkpoint-2\."):
            assert find_checkpoint(trainer.args, True) == str(tmp_path / "checkpoint-2")

    def test_other_folders_are_no_checkpoints(self, tiny_model, copy):
        shutil.copytree(copy / "checkpoint-1", copy / "checkpoint-9-of-mine")
        (copy / "checkpoint-7").write_text("a file")
        assert find_checkpoint(self.make(tiny_model, copy, max_steps=2).args, True) == str(copy / "checkpoint-2")


class TestAnotherAdapter:
    """PEFT would load what matches, and drop the rest."""

    @pytest.fixture(scope="class")
    def run(self, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp("adapter")
        self.make(tiny_model, path, save_strategy="steps", save_steps=1).train()
        return path / "checkpoint-1"

    @staticmethod
    def make(model, path, lora=(), **options):
        lora = {"target_modules": ["q_proj", "v_proj"], **dict(lora)}
        return teams.make(model, path, MultiAgentGRPOTrainer, lora=lora, **options)

    @pytest.mark.parametrize(
        ("lora", "message"),
        [
            ({"target_modules": ["k_proj"]}, r"target_modules is \{.*\}, but \{'k_proj'\} in this run"),
            ({"r": 2}, "r is 4, but 2 in this run"),
            ({"lora_alpha": 64}, "lora_alpha is 8, but 64 in this run"),
            ({"use_rslora": True}, "use_rslora is False, but True in this run"),
            ({"use_dora": True}, "use_dora is False, but True in this run"),
            ({"bias": "all"}, "bias is 'none', but 'all' in this run"),
            ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save is None, but \['embed_tokens'\] in this run"),
            ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern is \{\}, but \{'q_proj': 2\} in this run"),
            ({"layers_to_transform": [0]}, r"layers_to_transform is None, but \[0\] in this run"),
        ],
    )
    def test_is_refused(self, tiny_model, run, tmp_path, lora, message):
        trainer = self.make(tiny_model, tmp_path, lora, max_steps=2)
        with pytest.raises(ValueError, match=f"another adapter: {message}") as error:
            trainer.train(resume_from_checkpoint=str(run))
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=f"another adapter: {message}"):
            trainer.load_team(run)

    @pytest.mark.parametrize(
        "lora", [{"init_lora_weights": True}, {"lora_dropout": 0.5}, {"target_modules": ("v_proj", "q_proj")}]
    )
    def test_is_not_one_that_begins_or_drops_otherwise(self, tiny_model, run, tmp_path, lora):
        trainer = self.make(tiny_model, tmp_path, lora, max_steps=2)
        trainer.train(resume_from_checkpoint=str(run))
        assert trainer.state.global_step == 2

    def test_optimizer_is_refused(self, tiny_model, run, tmp_path):
        trainer = self.make(tiny_model, tmp_path, max_steps=2, optim="sgd")
        with pytest.raises(
            ValueError, match=r"state of optim='adamw.*, but optim='sgd' in this run\. Set optim='adamw"
        ):
            trainer.train(resume_from_checkpoint=str(run))

    def test_is_not_the_same_one_made_otherwise(self, tiny_model, tmp_path):
        self.make(tiny_model, tmp_path, save_strategy="steps", save_steps=1, optim="adamw_torch").train()
        trainer = self.make(tiny_model, tmp_path, max_steps=2, optim="adamw_torch_fused")
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 2

    def test_a_checkpoint_without_optimizer_is_refused(self, tiny_model, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
        self.make(tiny_model, tmp_path, **options).train()
        trainer = self.make(tiny_model, tmp_path, max_steps=2)
        with pytest.raises(ValueError, match=r"no state of the optimizer: .*save_only_model=True.*trainer\.load_team"):
            trainer.train(resume_from_checkpoint=True)
        trainer.load_team(tmp_path / "checkpoint-1")


class TestEnd:
    """A run that is resumed at its end, or beyond it."""

    @pytest.mark.parametrize("length", [{"max_steps": 3}, {"num_train_epochs": 0.5, "max_steps": -1}])
    def test_no_step_is_added_to_a_run_that_is_over(self, tiny_model, tmp_path, length):
        options = {"save_strategy": "steps", "save_steps": 1, "data": teams.dataset(8), **length}
        trainer = teams.make(tiny_model, tmp_path, **options)
        trainer.train()
        steps = trainer.state.global_step
        assert steps < 4  # of the epoch
        resumed = teams.make(tiny_model, tmp_path, **options)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == steps == resumed._initial_global_step
        weights, expected = teams.trainable(resumed), teams.trainable(trainer)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())

    def test_a_checkpoint_beyond_max_steps_is_refused(self, tiny_model, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1}
        teams.make(tiny_model, tmp_path, max_steps=2, **options).train()
        message = r"checkpoint-2 is at step 2, which is beyond max_steps=1\. Set max_steps above 2\."
        with pytest.raises(ValueError, match=message):
            teams.make(tiny_model, tmp_path, max_steps=1, **options).train(resume_from_checkpoint=True)


class TestFolder:
    """Who may write to an output folder."""

    def test_a_second_run_is_refused_while_the_first_one_lives(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path)
        with FileLock(tmp_path / LOCK_FILE):
            with pytest.raises(ValueError, match=r"output_dir=.* is in use by another run\. Wait for its end, or set"):
                trainer.train()
        trainer.train()
        assert trainer.state.global_step == 1

    def test_the_run_itself_may_enter_twice(self, tiny_model, tmp_path):
        with only_run_in(tmp_path / "new"):
            teams.make(tiny_model, tmp_path / "new").train()

    def test_a_folder_that_cannot_be_written_is_named(self):
        with pytest.raises(ValueError, match="output_dir='/proc/new' cannot be written: No such file"):
            with only_run_in("/proc/new"):
                pass

    def test_checkpoints_of_an_earlier_run_are_warned_of(self, tiny_model, tmp_path, recwarn):
        options = {"save_strategy": "steps", "save_steps": 1}
        teams.make(tiny_model, tmp_path, max_steps=2, **options).train()
        assert not [one for one in recwarn if "earlier run" in str(one.message)]
        with pytest.warns(UserWarning, match="has checkpoint-2 of an earlier run, and this run adds its own"):
            teams.make(tiny_model, tmp_path, **options).train()


class FullDisk(TrainerCallback):
    """Lets files of this process grow to so many bytes from a step on; writing more fails as on a full disk."""

    def __init__(self, step, size):
        self.step, self.size = step, size
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def end(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class TestFailedRun:
    """A run that ends with an error, whose note says how to go on."""

    # The adapter and the optimizer's state are larger, what lies between them is smaller
    @pytest.mark.parametrize(("size", "written"), [(10_000, False), (200_000, True)])
    def test_a_full_disk_costs_one_checkpoint(self, tiny_model, tmp_path, size, written):
        full = FullDisk(2, size)
        options = {"save_strategy": "steps", "save_steps": 1, "lora": {"r": 8}}
        trainer = teams.make(tiny_model, tmp_path, max_steps=3, callbacks=[full], **options)
        with pytest.raises(Exception) as failed:  # each library has its own
            try:
                trainer.train()
            finally:
                full.end()
        [note] = failed.value.__notes__
        assert re.fullmatch(
            rf"The last complete checkpoint is {tmp_path}/checkpoint-1\. Resume .* The disk has \d+ MiB of free space\.",
            note,
        )
        assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file() == written
        resumed = teams.make(tiny_model, tmp_path, max_steps=3, **options)
        with pytest.warns(UserWarning, match="checkpoint-2 is skipped"):
            resumed.train(resume_from_checkpoint=True)
        assert resumed._initial_global_step == 1 and resumed.state.global_step == 3

    def test_says_that_there_is_no_checkpoint(self, tiny_model, tmp_path, monkeypatch):
        trainer = teams.make(tiny_model, tmp_path, save_strategy="steps", save_steps=1)
        monkeypatch.setattr(trainer, "_save_scaler", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failed:
            trainer.train()
        assert "There is no complete checkpoint" in failed.value.__notes__[0]


class TestLimits:
    """Evaluations whose rewards are the best at step 2."""

    @staticmethod
    def best_at_2(completions, trainer_state, **kwargs):
        return [-float(abs(trainer_state.global_step - 2))] * len(completions)

    def make(self, model, path, **options):
        options = {
            "save_strategy": "steps",
            "save_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": teams.dataset(3),
            "metric_for_best_model": "eval_reward",
            "load_best_model_at_end": True,
            "max_steps": 6,
            **options,
        }
        trainer = teams.make(
            model, path, SHPPOTrainer, reward=[self.best_at_2, teams.letters], workflow=teams.Pair(),
            reward_weights=[1.0, 0.01], **options,
        )  # fmt: skip
        teams.script(trainer)
        return trainer

    @pytest.mark.parametrize(("limit", "kept"), [(1, [2]), (3, [2, 5, 6])])
    def test_the_best_checkpoint_and_the_last_ones_are_kept_whole(self, tiny_model, tmp_path, limit, kept):
        trainer = self.make(tiny_model, tmp_path, save_total_limit=limit)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        folders = sorted(path for path in tmp_path.glob("checkpoint-*"))
        assert [path.name for path in folders] == [f"checkpoint-{step}" for step in kept]
        assert find_checkpoint(trainer.args, True) == str(folders[-1])
        adapter = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
        weights = {name: x for name, x in teams.trainable(trainer).items() if "lora" in name}
        assert weights
        assert all(torch.equal(x, adapter[name.replace(".default", "")]) for name, x in weights.items())
        best = load_file(tmp_path / "checkpoint-2" / "team_modules.safetensors")
        assert all(torch.equal(x, best[name]) for name, x in trainer.modules.state_dict().items())

    def test_a_run_stops_early_also_after_a_resume(self, tiny_model, tmp_path):
        stop = EarlyStoppingCallback(early_stopping_patience=3)
        whole = self.make(tiny_model, tmp_path, max_steps=9, callbacks=[stop])
        whole.train()
        assert whole.state.global_step == 5
        shutil.rmtree(tmp_path / "checkpoint-5")
        stop = EarlyStoppingCallback(early_stopping_patience=3)
        resumed = self.make(tiny_model, tmp_path, max_steps=9, callbacks=[stop])
        resumed.train(resume_from_checkpoint=True)
        assert resumed._initial_global_step == 4 and resumed.state.global_step == 5
        assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
