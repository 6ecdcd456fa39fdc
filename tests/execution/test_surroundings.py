"""Processes with unusual settings: many open files, low limits, ignored signals, closed streams, callbacks."""

import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from marcog_trl.execution import CodeExecutor, Job, isolation, pool


GOOD = Job("def f(x): return x + 1", ["assert f(1) == 2"])
JUDGED = Job("def f(x): return x + 1", ["assert same(f(1), 2)"], setup="def same(a, b): return a == b")
SCRIPT = """
from marcog_trl.execution import CodeExecutor, Job
setup = "def same(a, b): return a == b"
jobs = [Job("def f(x): return x + 1", ["assert f(1) == 2"]), Job("def f(x): return x + 1", ["assert same(f(1), 2)"], setup=setup),
        Job("print(int(input()) + 1)", [("1", "2")], "stdio"), Job("print('y' * 10_000_000)", [("", "y" * 10_000_000)], "stdio"),
        Job("def f(x):\\n    while True: pass", ["assert f(1) == 2"], timeout=0.3)]
def statuses(**options):
    with CodeExecutor(num_workers=1, isolation="best_effort", **{"timeout": 5.0, **options}) as executor:
        return [verdict.status for verdict in executor.run(jobs)]
def check(**options):
    found = statuses(**options)
    assert found == ["passed"] * 4 + ["timeout"], found
"""


def python(script, before=""):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", before + SCRIPT + script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SURROUNDINGS = {
    "2,000 open files": (
        "import os, resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096),) * 2)\n"
        "files = [os.open('/dev/null', 0) for _ in range(2000)]\n"
    ),
    "children that nobody waits for": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
    "ignored and blocked signals": (
        "import signal\nfor number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    ),
    "a closed standard error": "import os, sys\nsys.stderr = None\nos.close(2)\n",
    "closed streams": "import os, sys\nfor k in (0, 1, 2): os.close(k)\nsys.stdin = sys.stdout = sys.stderr = None\n",
    "few open files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n",
    "a low soft limit on file size": (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
    ),
    "memory for one program": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n",
    "time for one program": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n",
    "a listener of its own": (
        "import ctypes, platform\nfrom marcog_trl.execution.sandbox import seccomp\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\ninstructions = seccomp.Instructions()\ninstructions.ret(seccomp.ALLOW)\n"
        "seccomp.Filter(instructions, platform.machine(), libc).install(listen=True)\n"
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_verdicts_are_right(name):
    if name == "a listener of its own" and not isolation.probe()[1]:
        pytest.skip("seccomp is missing")
    done = python("check()", before=SURROUNDINGS[name])
    assert done.returncode == 0, done.stderr


TOO_LOW = {
    "NOFILE, (16, 16)": "the hard limit on open files is 16 and programs need 32. Raise it (ulimit -Hn).",
    "FSIZE, (1 << 20, 1 << 20)": "the hard limit on file size is 1048576 bytes and programs need 16777216. Raise it (ulimit -Hf).",
    "AS, (1 << 30, 1 << 29)": "memory_mb=600 is more than the hard limit on this process's address space, 512 MiB. "
    "Set memory_mb to at most 512, or raise the limit (ulimit -Hv).",
    "CPU, (4, 4)": "timeout=5 needs 7 s of CPU time, and this process's hard limit on CPU time is 4 s. "
    "Set a shorter timeout, or raise the limit (ulimit -Ht).",
}


@pytest.mark.parametrize("limit", TOO_LOW)
def test_limits_that_are_too_low_are_named_at_once(limit):
    soft_hard = limit.replace("(1 << 30, 1 << 29)", "(1 << 29, 1 << 29)")
    done = python(
        f"import resource\nresource.setrlimit(resource.RLIMIT_{soft_hard})\n"
        "try: CodeExecutor(isolation='best_effort', timeout=5, memory_mb=600)\nexcept ValueError as error: print(error)"
    )
    assert done.stdout.strip() == TOO_LOW[limit], done.stderr


def test_a_job_that_asks_for_more_than_the_limits_is_named(monkeypatch):
    limits = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, -1),) * 2)
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        for change in ({"memory_mb": 2000}, {"timeout": 30}):
            with pytest.raises(ValueError, match=rf"jobs\[1\]: {next(iter(change))}=.*hard limit"):
                executor.submit([GOOD, Job(GOOD.code, GOOD.tests, **change)])


@pytest.mark.parametrize("timeout", [3e6, 1e12, 1e300])
def test_a_limit_of_years(timeout):
    with CodeExecutor(num_workers=1, isolation="best_effort", timeout=timeout) as executor:
        assert [verdict.status for verdict in executor.run([GOOD, JUDGED])] == ["passed"] * 2
        large = Job("def f(x): return 'y' * 100_000", ["assert f(1) == 'z'"])
        assert executor.run([large])[0].status == "failed"


def test_a_callback_may_wait_for_other_jobs():
    found, done = [], threading.Event()

    def more(future):
        found.append(executor.run([JUDGED])[0].status)
        executor.close()
        done.set()

    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        executor.submit([GOOD]).add_done_callback(more)
        assert done.wait(20) and found == ["passed"]


def test_a_callback_that_fails_is_told_of(caplog):
    done = threading.Event()

    def fails(future):
        done.set()
        raise KeyError("mine")

    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        future = executor.submit([GOOD])
        future.add_done_callback(fails)
        assert future.result()[0].status == "passed" and done.wait(20)
        while not caplog.records:
            threading.Event().wait(0.01)
        assert executor.run([GOOD])[0].status == "passed"
    assert "a callback of executed jobs failed" in caplog.text and "mine" in caplog.text


@pytest.mark.parametrize("dead", [False, True])
def test_why_no_worker_starts_is_said_each_time(dead, monkeypatch, tmp_path):
    """
    The error has the last line that the worker wrote, and does not say that the executor is closed. The worker may be `dead`
    before anything is sent to it.
    """
    send = pool.wire.send
    if dead:
        monkeypatch.setattr(pool.wire, "send", lambda sock, frame: select.select([sock], [], []) and send(sock, frame))
    broken = tmp_path / "main.py"
    broken.write_text("import sys\nsys.exit('the disk is full')\n")
    monkeypatch.setattr(pool, "_WORKER", broken)
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"no worker could be started: worker [0-9]+ died: the disk is full"
            ):
                executor.run([GOOD])


@pytest.mark.skipif(not all(isolation.probe()), reason="Landlock or seccomp are missing")
def test_best_effort_starts_without_that_rule(monkeypatch, caplog):
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        executor._pool.packages.readable.append("/proc/self/ns/net")
        assert executor.run([GOOD])[0].status == "passed"
    assert "Landlock refused the rule for /proc/self/ns/net, so programs cannot read it" in caplog.text
    with CodeExecutor(num_workers=1, isolation="strict") as executor:
        executor._pool.packages.readable.append("/proc/self/ns/net")
        with pytest.raises(RuntimeError, match=r"a worker could not be confined.*Landlock rule for /proc/self/ns/net"):
            executor.run([GOOD])
