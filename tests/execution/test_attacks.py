"""Programs that cheat, hang, grow, escape or break, most of them by someone who has read the sandbox's source. None passes a
test that it does not deserve, gets what it must not have, harms the next program, or delays or loses the worker.

They run as this user with `strict` and as nobody with `best_effort`. Where the kernel refuses no rule, the two levels confine
programs alike, which a test checks; so the other two combinations are slow tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import GOOD, Attacked, load

from marcog_trl.execution import CodeExecutor
from marcog_trl.execution.isolation import probe, resolve


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")

FILES = ("hostile", "cheats", "attacks_2", "attacks_3")
CASES = [pytest.param(case, id=f"{file}: {name}") for file in FILES for name, case in load(file).items()]


@pytest.fixture(scope="module", params=["strict", pytest.param("best_effort", marks=pytest.mark.slow)])
def attacked(request):
    attacked = Attacked(request.param)
    yield attacked
    attacked.close()


def test_the_levels_confine_alike(caplog):
    strict, best_effort = resolve("strict"), resolve("best_effort")
    assert replace(strict, level="best_effort") == best_effort
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        assert executor.run([GOOD])[0].status == "passed"
    assert "refused the rule" not in caplog.text


@pytest.mark.parametrize("case", CASES)
def test_attacks_achieve_nothing(attacked, case):
    if "import numpy" in str(case) and importlib.util.find_spec("numpy") is None:
        pytest.skip("numpy is not installed")
    assert not attacked.attack(case)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("isolation", [pytest.param("strict", marks=pytest.mark.slow), "best_effort"])
def test_attacks_achieve_nothing_as_nobody(isolation, file):
    if os.getuid() != 0:
        pytest.skip("needs to start as root")
    folder = Path(__file__).parents[1] / "helpers"
    environment = {**os.environ, "PYTHONPATH": str(folder.parents[1]), "ATTACK_AS_NOBODY": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 600, "check": False, "cwd": "/"}
    for python in (sys.executable, "/usr/bin/python3"):  # one that an unprivileged user may run
        if Path(python).exists():
            # The kernel changes access times once a day, and programs see it unless this user may mount
            subprocess.run(
                [python, "-c", "open(__import__('os').__file__.replace('os.py', 'antigravity.py')).read()"], check=True
            )
            done = subprocess.run([python, str(folder / "attacks.py"), file, isolation], **options)
            if done.returncode == 0:
                break
    if any(word in done.stderr for word in ("Permission", "ModuleNotFoundError", "init_fs_encoding")):
        pytest.skip("an unprivileged user may not read this checkout, or has no Python of the right version")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
