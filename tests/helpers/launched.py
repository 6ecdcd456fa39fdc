"""Scripts on several processes, launched as a user would."""

import os
import signal
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def launched(mode, *command, timeout=300, **variables):
    """What a script prints, on two processes on CPUs with `recipes/MODE.yaml`, or on one. Nothing of it outlives this call."""
    several = (
        [] if mode == "one" else ["-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/recipes/{mode}.yaml"]
    )
    several += ["--num_processes", "2"] if several else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, *several, *map(str, command)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-5000:]
    return output
