"""The scripts that set up an environment and run in it, with a stand-in for the interpreter that installs nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
# Makes environments as `python -m venv` does, as far as the scripts look, and tells what it was asked. Where $FAIL is set,
# commands that contain it fail
PYTHON = r"""#!/bin/bash
echo "$*" >> "$LOG"
[ -n "$FAIL" ] && [[ "$*" == *$FAIL* ]] && { echo "$FAIL failed" >&2; exit 1; }
[ "$1" = recipes/launch.py ] && echo "in $PWD: $@"
[ "$1 $2" = "-m venv" ] || exit 0
for folder; do :; done
[ "$3" = --clear ] && rm -rf "$folder"
mkdir -p "$folder/bin"
cp "$0" "$folder/bin/python"
echo "PATH=$PWD/$folder/bin:\$PATH" > "$folder/bin/activate"
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def started(folder, *command, **variables):
    """The command's process at its end, with the stand-in as the interpreter."""
    (folder.parent / "log").write_text("")
    environment = {
        **os.environ,
        "PYTHON": str(folder.parent / "python"),
        "LOG": str(folder.parent / "log"),
        **variables,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def run(folder, *command):
    """Environments that the command made, and what it printed."""
    done = started(folder, *command)
    assert done.returncode == 0, done.stderr
    log = (folder.parent / "log").read_text()
    return [line for line in log.splitlines() if line.startswith("-m venv")], done.stdout


def test_a_checkout_that_is_moved_gets_another_environment(checkout):
    setup = ("bash", "-euc", "source recipes/setup.sh $0")
    assert run(checkout, *setup, "deepspeed")[0] == ["-m venv .venv"]
    assert run(checkout, *setup, "deepspeed")[0] == []
    assert run(checkout, *setup, "test")[0] == ["-m venv .venv"]  # more in the same environment
    moved = checkout.rename(checkout.with_name("moved"))
    assert run(moved, *setup, "test")[0] == ["-m venv --clear .venv"]
    assert run(moved, *setup, "test")[0] == []
    (moved / "pyproject.toml").write_text("[project]\n")
    assert run(moved, *setup, "test")[0] == ["-m venv --clear .venv"]


def test_the_quickstart_runs_under_any_shell(checkout):
    made, printed = run(checkout, "sh", "recipes/quickstart.sh", "--seed", "1 2")
    assert made == ["-m venv .venv"]
    expected = f"in {checkout}: recipes/launch.py --config_file recipes/zero2.yaml recipes/train_magrpo.py "
    expected += "--advantage none --seed 1 2"
    assert printed.splitlines()[-1] == expected


def test_a_slurm_job_launches_on_each_node(checkout):
    """With stand-ins for Slurm's commands: `srun` runs a command as two nodes would."""
    commands = {
        "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
        "srun": 'echo "srun ${*:1:3}"; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "${@:4}"; done',
    }
    slurm = {"JOB_NODELIST": "node[7-8]", "JOB_ID": "12345", "NNODES": "2", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "16"}
    for name, script in commands.items():
        (checkout.parent / name).write_text(f"#!/bin/bash\n{script}\n")
        (checkout.parent / name).chmod(0o755)
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    variables["PATH"] = f"{checkout.parent}:{os.environ['PATH']}"
    done = started(checkout, "bash", "recipes/slurm.sh", "recipes/train_ppo.py", "--run_name", "a b", **variables)
    assert done.returncode == 0, done.stderr
    options = "--config_file recipes/zero3.yaml --num_machines 2 --num_processes 8 --machine_rank {} "
    options += "--main_process_ip node7 --main_process_port 22345 recipes/train_ppo.py --run_name a b"
    assert done.stdout.splitlines()[1:] == [
        "srun --ntasks-per-node=1 --cpus-per-task=16 --kill-on-bad-exit=1",
        *(f"in {checkout}: recipes/launch.py {options.format(rank)}" for rank in range(2)),
    ]


class TestSetup:
    """What fails is said, and neither ends the shell nor passes for done."""

    SOURCE = ("bash", "-c", "cd /; source $0/recipes/setup.sh deepspeed; echo status $?, options $-")

    def source(self, checkout, **variables):
        done = started(checkout, *self.SOURCE, str(checkout), **variables)
        status, options = done.stdout.splitlines()[-1].removeprefix("status ").split(", options ")
        assert not set("eu") & set(options) and "Traceback" not in done.stderr
        return int(status), done.stderr.splitlines()

    def test_it_may_be_sourced_from_anywhere(self, checkout):
        assert self.source(checkout) == (0, [])
        assert list((checkout / ".venv").glob(".installed-deepspeed-*"))

    @pytest.mark.parametrize("fail", ["-m venv", "torch==", "-e ."])
    def test_a_step_that_fails_leaves_no_stamp(self, checkout, fail):
        status, said = self.source(checkout, FAIL=fail)
        assert status == 1 and said[-1].startswith("error: .venv could not be set up") and said[0] == f"{fail} failed"
        assert not list(checkout.glob(".venv/.installed-*"))
        assert self.source(checkout) == (0, [])

    @pytest.mark.parametrize(
        ("python", "said"),
        [
            ("old", "needs Python 3.11 or newer, and PYTHON=.*/old is Python 3.10.13. Set PYTHON="),
            ("nowhere", "needs Python 3.11 or newer, and PYTHON=.*/nowhere is .*not a Python that runs. Set PYTHON="),
        ],
    )
    def test_an_interpreter_that_is_too_old_is_refused_at_once(self, checkout, python, said):
        old = checkout.parent / "old"
        old.write_text('#!/bin/bash\n[ "$1" = --version ] && echo Python 3.10.13 || exit 1\n')
        old.chmod(0o755)
        status, lines = self.source(checkout, PYTHON=str(checkout.parent / python))
        assert status == 1 and re.search(said, " ".join(lines)) and not (checkout / ".venv").exists()

    def test_the_quickstart_ends_where_it_fails(self, checkout):
        done = started(checkout, "bash", "recipes/quickstart.sh", FAIL="torch==")
        assert done.returncode == 1 and "launch.py" not in done.stdout

    def test_a_quickstart_that_is_sourced_leaves_the_shell_alone(self, checkout):
        done = started(checkout, "bash", "-c", "source recipes/quickstart.sh; echo still $- here", FAIL="torch==")
        assert done.stdout.splitlines()[-1].startswith("still") and "e" not in done.stdout.splitlines()[-1].split()[1]
