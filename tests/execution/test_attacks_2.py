"""Attacks written with the sandbox's source at hand: none passes a test that it does not deserve, gets what it must not
have, harms the next program, or holds up or loses the worker. As root and as nobody, `strict` and `best_effort`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import ATTACKS, Attacked

from marcog_trl.execution.isolation import probe


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")


@pytest.fixture(scope="module", params=["strict", "best_effort"])
def attacked(request):
    attacked = Attacked(request.param)
    yield attacked
    attacked.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_achieve_nothing(attacked, name):
    assert not attacked.attack(ATTACKS[name])


@pytest.mark.parametrize("isolation", ["strict", "best_effort"])
def test_attacks_achieve_nothing_as_nobody(isolation):
    if os.getuid() != 0:
        pytest.skip("needs to start as root")
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(folder.parents[1]), "ATTACK_AS_NOBODY": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300, "check": False, "cwd": "/"}
    for python in (sys.executable, "/usr/bin/python3"):  # one that an unprivileged user may run
        if Path(python).exists():
            done = subprocess.run([python, str(folder / "attacks.py"), isolation], **options)
            if done.returncode == 0:
                break
    if any(word in done.stderr for word in ("Permission", "ModuleNotFoundError", "init_fs_encoding")):
        pytest.skip("an unprivileged user may not read this checkout, or has no Python of the right version")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
