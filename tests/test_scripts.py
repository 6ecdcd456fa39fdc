"""The scripts that set up an environment and run in it, with a stand-in for the interpreter that installs nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
# Makes environments as `python -m venv` does, as far as the scripts look, and tells what it was asked
PYTHON = r"""#!/bin/bash
echo "$*" >> "$LOG"
[ "$1 $2" = "-m venv" ] || exit 0
for folder; do :; done
[ "$3" = --clear ] && rm -rf "$folder"
mkdir -p "$folder/bin"
cp "$0" "$folder/bin/python"
printf '#!/bin/bash\necho accelerate in %s: "$@"\n' "$PWD" > "$folder/bin/accelerate"
chmod +x "$folder/bin/accelerate"
echo "PATH=$PWD/$folder/bin:\$PATH" > "$folder/bin/activate"
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "run_vllm.sh", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def run(folder, *command):
    """Environments that the command made, and what it printed."""
    log = folder.parent / "log"
    log.write_text("")
    environment = {**os.environ, "PYTHON": str(folder.parent / "python"), "LOG": str(log)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return [line for line in log.read_text().splitlines() if line.startswith("-m venv")], done.stdout


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


def test_so_does_that_of_vllm(checkout):
    assert len(run(checkout, "bash", "tests/run_vllm.sh")[0]) == 1
    assert len(run(checkout, "bash", "tests/run_vllm.sh")[0]) == 0
    assert len(run(checkout.rename(checkout.with_name("moved")), "bash", "tests/run_vllm.sh")[0]) == 1


def test_the_quickstart_runs_under_any_shell(checkout):
    made, printed = run(checkout, "sh", "recipes/quickstart.sh", "--seed", "1 2")
    assert made == ["-m venv .venv"]
    assert printed.splitlines()[-1].startswith(f"accelerate in {checkout}: launch") and "--seed 1 2" in printed
