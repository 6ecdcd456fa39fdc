"""Runs a hundred thousand jobs: by hand with `-m slow`, in about five minutes."""

import os
import random
from pathlib import Path

import pytest
from watching import below

from marcog_trl.execution import CodeExecutor, Job


PROGRAMS = {
    "def f(x): return x + 1": "passed",
    "def f(x): return [x]": "failed",
    "def f(x)": "error",
    "import os\ndef f(x): os._exit(1)": "error",
    "def f(x): return open('/etc/passwd').read()": "failed",
    "def f(x): return [0] * 10 ** 9": "failed",
    "import threading\ndef f(x):\n    threading.Thread(target=print).start()\n    return x + 1": "passed",
}
TESTS = (["assert f(1) == 2", "assert f(2) == 3"], ["y = f(1)\nassert y == 2"], ["assert f(1) == 2", "z = f(3)"])


def state(executor):
    """The number of processes, and the open files and private memory in MiB of those that stay."""
    workers = [worker.process.pid for worker in executor._pool.workers]
    pids = [os.getpid(), *workers]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    memory = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        memory.append(sum(int(line.split()[1]) for line in lines if line.startswith(("Private_", "Swap:"))) / 1024)
    return len(below(os.getpid())), files, memory


@pytest.mark.slow
def test_a_hundred_thousand_jobs_leave_nothing_behind():
    rng = random.Random(0)
    total, size = 100_000, 2_000
    with CodeExecutor(num_workers=2, timeout=5.0) as executor:

        def play():
            pairs = [(code, rng.choice(TESTS)) for code in rng.choices(list(PROGRAMS), k=size)]
            verdicts = executor.run([Job(code, tests, entry_point="f") for code, tests in pairs])
            for (code, tests), verdict in zip(pairs, verdicts, strict=True):
                assert verdict.status == PROGRAMS[code], (code, tests, verdict)

        play()
        processes, files, memory = state(executor)
        workers = [worker.process.pid for worker in executor._pool.workers]
        for _ in range(total // size - 1):
            play()
        later_processes, later_files, later_memory = state(executor)
        assert [worker.process.pid for worker in executor._pool.workers] == workers
        assert later_processes <= processes + 2  # a judge may be waiting in each worker
        assert all(b <= a + 4 for a, b in zip(files, later_files, strict=True)), (files, later_files)
        assert all(b <= a + 8 for a, b in zip(memory, later_memory, strict=True)), (memory, later_memory)
        print(
            f"{processes} -> {later_processes} processes, files {files} -> {later_files}, MiB {memory} -> {later_memory}"
        )
