"""The recipes as they are run: short runs, runs that are resumed, and what is said at their ends."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from marcog_trl import MultiAgentPPOTrainer
from marcog_trl.cli import train as training
from marcog_trl.cli.main import main as command_line
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.evaluation.evaluate import Evaluation
from marcog_trl.trainers.checkpointing import LOCK_FILE


FOLDER = Path(__file__).parents[2] / "recipes"
FLAGS = [
    "--workflow", "collaboration", "--isolation", "best_effort", "--report_to", "none", "--dataset_train_split", "train[:2]",
    "--dataset_test_split", "test[:2]", "--num_test_samples", "1", "--per_device_train_batch_size", "8", "--num_generations", "2",
    "--max_completion_length", "6", "--max_steps", "2", "--logging_steps", "50", "--bf16", "false", "--learning_rate", "1e-5",
]  # fmt: skip


@pytest.fixture
def train(run_recipe):
    """`train(*flags)`: a short run of train_ppo.py in this process; returns what it printed."""
    return lambda *argv, trainer=MultiAgentPPOTrainer: run_recipe("ppo", *FLAGS, *argv, trainer_class=trainer)


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory):
    """The folder of a run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = RECIPES["ppo"]
    flags = [*FLAGS, "--model_name_or_path", tiny_model, "--use_cpu", "--output_dir", str(folder), *SAVE]
    training.train(recipe, flags)
    return folder


@pytest.fixture
def trained(checkpoints, tmp_path):
    """A copy of it, in which `train` continues."""
    return shutil.copytree(checkpoints, tmp_path / "out")


SAVE = ("--save_strategy", "steps", "--save_steps", "1", "--num_test_samples", "0")


class TestShortRun:
    def test_ends_with_its_results(self, train, tmp_path):
        # Without an evaluation during training, the summary at the end has the metrics
        printed = train("--eval_strategy", "steps", "--eval_steps", "1", "--num_eval_problems", "1")
        assert "1 held-out problems, 1 samples each" in printed
        assert json.loads((tmp_path / "out" / "results.json").read_text())["trained"]["samples"] == 1
        report = (tmp_path / "out" / "report.html").read_text()
        assert "Held-out problems" in report and "Before and after training" in report

    def test_shows_a_line_per_log_and_what_to_do_next(self, train, tmp_path):
        printed = train("--logging_steps", "1", "--num_test_samples", "0").splitlines()
        starts = [line.split("  ")[0:2] for line in printed if line.startswith("step ")]
        assert [words[0] for words in starts] == ["step 1 of 2", "step 2 of 2", "step 2 of 2", "step 2 of 2"]
        assert starts[2][1].startswith("held-out problems:") and starts[3][1].startswith("trained in")
        assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 4
        assert "{'loss'" not in "".join(printed)
        solve = next(line for line in printed if line.startswith("Solve a held-out problem: "))
        argv = shlex.split(solve.partition(": ")[2])
        # The exit status says whether the tests pass
        assert command_line(argv[argv.index("solve") :]) in (0, 1)

    def test_shows_trls_dictionaries(self, train, tmp_path):
        printed = train("--console", "trl", "--logging_steps", "1", "--num_test_samples", "0", "--eval_strategy", "no")
        assert printed.count("{'loss'") == 2 and "step 1 of 2" not in printed
        assert (tmp_path / "out" / "metrics.jsonl").is_file()

    def test_the_trained_team_is_saved_before_it_is_measured(self, train, tmp_path, monkeypatch):
        calls = []

        def evaluate(trainer, *args, **options):
            calls.append((tmp_path / "out" / "adapter_model.safetensors").exists())
            if len(calls) == 2:
                raise KeyboardInterrupt
            return Evaluation({}, [])

        monkeypatch.setattr(training, "evaluate_team", evaluate)
        with pytest.raises(SystemExit) as ended:
            train()
        assert ended.value.code == 130 and calls == [False, True]


class TestFolder:
    def test_a_new_run_beside_old_checkpoints_is_refused_before_any_work(self, train, trained, tmp_path):
        built = []
        message = (
            r"^error: output_dir='.*out' has checkpoint-2 of an earlier run\. Set --resume_from_checkpoint true to continue that "
            r"run, --overwrite_output_dir true to delete its checkpoints, or another --output_dir\.$"
        )
        with pytest.raises(SystemExit, match=message):
            train(*SAVE, trainer=lambda **options: built.append(options))
        assert not built
        train(*SAVE, "--max_steps", "1", "--overwrite_output_dir", "true")
        assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]

    def test_a_second_run_is_refused_before_any_work(self, train, tmp_path):
        (tmp_path / "out").mkdir()
        built = []
        with FileLock(tmp_path / "out" / LOCK_FILE):
            with pytest.raises(SystemExit, match=r"^error: output_dir='.*out' is in use by another run"):
                train(trainer=lambda **options: built.append(options))
        assert not built

    def test_true_continues_the_last_whole_checkpoint(self, train, trained, tmp_path):
        (tmp_path / "out" / "checkpoint-2" / "complete.json").unlink()
        with pytest.warns(UserWarning, match="checkpoint-2 is skipped"):
            train(*SAVE, "--max_steps", "3", "--resume_from_checkpoint", "true")
        state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
        assert state["global_step"] == 3 and (tmp_path / "out" / "checkpoint-2" / "complete.json").exists()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["true", "--max_steps", "1"], "checkpoint-2 is at step 2, which is beyond max_steps=1"),
            (["nowhere"], "resume_from_checkpoint='nowhere': cannot resume from nowhere: it does not exist"),
            (["True", "--overwrite_output_dir"], "overwrite_output_dir=True would delete the checkpoints"),
            (["true", "--num_turns", "2"], "has another team: num_turns is 1, but 2 in this run"),
            (["true", "--output_dir", "OTHER"], "output_dir='.*other' has no checkpoint-. folder"),
        ],
    )
    def test_what_cannot_be_resumed_is_one_line_before_any_work(
        self, train, trained, tmp_path, monkeypatch, flags, message
    ):
        monkeypatch.setattr(training, "evaluate_team", None)
        flags = [flag.replace("OTHER", str(tmp_path / "other")) for flag in flags]
        with pytest.raises(SystemExit, match=f"^error: .*{message}") as ended:
            train("--resume_from_checkpoint", *flags)
        assert "\n" not in str(ended.value)


def ended(command, folder, interrupt_after=None, timeout=280):
    """Exit status and output of a command, which gets Ctrl-C once its output matches a regular expression."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, sent, until = b"", None, time.monotonic() + timeout
    try:
        while chunk := os.read(process.stdout.fileno(), 65536):
            assert time.monotonic() < until, output
            output += chunk
            if interrupt_after is not None and sent is None and re.search(interrupt_after.encode(), output):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                sent = len(output)
        return process.wait(), output[sent:].decode(errors="replace")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


class TestEndings:
    """Of whole programs: one line, and no traceback."""

    LAUNCH = (FOLDER / "launch.py", "--config_file", FOLDER / "zero2.yaml")

    def test_a_mistake_ends_the_launcher_in_one_line(self, tmp_path):
        code, output = ended([*self.LAUNCH, FOLDER / "train_shppo.py", "--sed", "1"], tmp_path)
        assert code == 2 and output.strip().splitlines()[-1] == "error: unknown flag --sed. Did you mean --seed?"
        assert "Traceback" not in output and "elastic" not in output

    @pytest.mark.parametrize(
        ("launched", "flags", "after", "said"),
        [
            (
                True,
                SAVE,
                "checkpoint-2",
                r"checkpoint-\d+ was kept. .* --resume_from_checkpoint true",
            ),
            (False, (), "Evaluating the untrained team", "Interrupted. Nothing was kept."),
        ],
    )
    def test_ctrl_c_is_one_line(self, tiny_model, tmp_path, launched, flags, after, said):
        """Saved checkpoints show in the output through `--log_level info`."""
        recipe = [
            *(self.LAUNCH if launched else ()),
            FOLDER / "train_ppo.py",
            *FLAGS,
            "--model_name_or_path",
            tiny_model,
        ]
        recipe += ["--output_dir", tmp_path / "out", "--max_steps", "5000", "--log_level", "info", *flags]
        code, output = ended(recipe, tmp_path, after)
        assert code == 130, output
        assert "Traceback" not in output and "elastic" not in output and "death signal" not in output
        lines = [line for line in output.splitlines() if "Interrupted" in line]
        assert len(lines) == 1 and re.search(said, lines[0]), output

    def test_ctrl_c_while_a_model_is_evaluated(self, tiny_model, tmp_path):
        flags = [
            "--model_name_or_path",
            tiny_model,
            "--override",
            "workflow=collaboration",
            "max_completion_length=64",
        ]
        flags += ["--isolation", "best_effort", "--batch_size", "4", "--num_samples", "3", "--output", "e.json"]
        code, output = ended([FOLDER / "evaluate.py", *flags], tmp_path, r"\b[2-9]/120")
        assert code == 130 and "Traceback" not in output, output
        said = r"Interrupted. (\d+) problems are kept in e.jsonl.partial. The same command continues from there."
        kept = int(re.search(said, output)[1])
        assert kept == len((tmp_path / "e.jsonl.partial").read_text().splitlines()) - 1 >= 2
