"""Processes that are lost, killed or left alone; limits and messages. Each executor ends with its owner, and a failure of the
machine costs no program its verdict."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attacks import GOOD, JUDGED, LIMIT
from watching import below, children, ended, gone, naps, run_in_time, shows_naps, wait_until

from marcog_trl.execution import CodeExecutor, Job, pool
from marcog_trl.execution.isolation import probe


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=LIMIT, isolation="strict") as executor:
        executor.run([GOOD])
        yield executor


def resident(executor):
    return int(Path(f"/proc/{executor._pool.workers[0].process.pid}/statm").read_text().split()[1]) * 4096


ANSWER = "import sys, time\ndef answer(body):\n    control = sys._getframe(2).f_locals['control']\n    control.sendall(len(body).to_bytes(4, 'little') + body)\n    time.sleep(9)\n"


def test_death_by_an_unnamed_signal():
    """The death of a program by any signal is an error of the program."""
    code = "import os\ndef f(x): os.kill(os.getpid(), 40)"
    jobs = [Job(code=code, tests=["assert f(1) == 1"], setup=setup) for setup in ("", JUDGED)]
    jobs += [Job(code=code + "\nf(1)", tests=[("", "1")], test_format="stdio")]
    with CodeExecutor(num_workers=1, timeout=LIMIT) as executor:
        assert [verdict.status for verdict in executor.run(jobs)] == ["error"] * 3


def test_a_frozenset_that_takes_long_to_build():
    """A forged answer of numbers with equal hashes does not delay the worker beyond the limit."""
    items = "b','.join(b'%d' % (k * (2 ** 61 - 1)) for k in range(24000))"
    code = ANSWER + f"body = b'{{\"r\":[\"f\",' + {items} + b']}}'\ndef f(x): answer(body)"
    with CodeExecutor(num_workers=1, timeout=0.7) as executor:
        executor.run([GOOD])
        run_in_time(executor, Job(code=code, tests=["assert f(1) == 1"]), 1.7)


def test_classes_sent_to_the_worker_are_forgotten(executor):
    code = (
        ANSWER
        + "body = b'{\"r\":[\"t\",' + b','.join(b'[\"N\",\"a%d\",[]]' % k for k in range(12000)) + b']}'\ndef f(x): answer(body)"
    )
    before = resident(executor)
    (verdict,) = executor.run([Job(code=code, tests=["assert f(1) == 1"], timeout=5.0)])
    assert verdict.status == "failed"
    assert resident(executor) - before < 8 << 20


@pytest.mark.parametrize("test", ["assert f(1)", "assert not f(1)"])
def test_truth_of_an_object(executor, test):
    """Compared directly or under a judge, an object has the truth value that it reports."""
    code = "class V:\n    def __len__(s): return 0\ndef f(x): return V()"
    direct, judged = executor.run([Job(code=code, tests=[test]), Job(code=code, tests=[test], setup=JUDGED)])
    assert judged.passed == ("not" in test) and direct.passed == judged.passed


def test_messages_can_be_printed(executor):
    code = "def f(x): raise ValueError('\\ud800\\x1b[2J')\ndef g(x): raise type('\\udc80', (Exception,), {})"
    jobs = [Job(code=code, tests=["assert f(1) == 1"], setup=setup) for setup in ("", JUDGED)]
    jobs += [
        Job(code=code, tests=["assert g(1) == 1"]),
        Job(code=code + "\nf(1)", tests=[("", "")], test_format="stdio"),
    ]
    for verdict in executor.run(jobs):
        assert verdict.message.encode() and "\x1b" not in verdict.message


# Lifecycle


def owner(script):
    """Runs a script in a new process, after making an executor with two workers and printing their process ids."""
    start = (
        "import os, signal, sys, threading, time\nfrom marcog_trl.execution import CodeExecutor, Job\n"
        "good = Job(code='def f(x): return x', tests=['assert f(1) == 1', 'assert abs(f(2)) == 2'])\n"
        "busy = Job(code='def f(x):\\n    while True: pass', tests=['assert f(1) == 1'], timeout=30)\n"
        "executor = CodeExecutor(num_workers=2)\nassert {v.status for v in executor.run([good] * 8)} == {'passed'}\n"
        "print(*[worker.process.pid for worker in executor._pool.workers], flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", start + script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


NOW = "time.sleep(0.2)\nprint('now', flush=True)\n"
OWNERS = {  # what the owner does, and the signal that it gets
    "an exception under with": ("with executor:\n    future = executor.submit([busy] * 3)\n    time.sleep(0.2)\n    print('now', flush=True)\n    raise ValueError", None),
    "an exception without with": (f"future = executor.submit([busy] * 3)\n{NOW}raise ValueError", None),
    "an exit in another thread's wait": (
        f"thread = threading.Thread(target=lambda: executor.run([busy]), daemon=True)\nthread.start()\n{NOW}sys.exit(1)", None
    ),
    # what runs in the background of a shell ignores interrupts, and so would its children
    "an interrupt": (
        f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{NOW}executor.run([busy] * 3)", signal.SIGINT
    ),
    "SIGTERM with a handler": (
        f"signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))\n{NOW}executor.run([busy] * 3)", signal.SIGTERM
    ),
    "SIGTERM": (f"executor.submit([busy] * 3)\n{NOW}time.sleep(60)", signal.SIGTERM),
    "SIGKILL": (f"executor.submit([busy] * 3)\n{NOW}time.sleep(60)", signal.SIGKILL),
    "os._exit": (f"executor.submit([busy] * 3)\n{NOW}os._exit(1)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", OWNERS)
def test_nothing_survives_the_owner(name):
    script, number = OWNERS[name]
    process = owner(script)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    everything = {*workers, *(pid for worker in workers for pid in below(worker))}
    assert process.stdout.readline() == "now\n"
    everything |= {pid for worker in workers for pid in below(worker)}
    if number is not None:
        time.sleep(0.2)
        process.send_signal(number)
    assert process.wait(timeout=10) != 0
    assert len(workers) == 2 and len(everything) >= 4 and gone(everything)


def test_forks_and_threads_together():
    """Threads of a process and of its fork use an executor, each with its own workers, while other jobs run."""
    script = (
        "def work(results):\n    for _ in range(5): results.extend(v.status for v in executor.run([good] * 2))\n"
        "def many():\n    results = []\n    threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]\n"
        "    for thread in threads: thread.start()\n    for thread in threads: thread.join()\n    return results == ['passed'] * 40\n"
        "pending = executor.submit([Job(code='import time\\ndef f(x):\\n    time.sleep(1)\\n    return x', tests=good.tests[:1])])\n"
        "pid = os.fork()\nif pid == 0:\n    right = many()\n    executor.close()\n    os._exit(7 if right else 1)\n"
        "right = many()\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert right and pending.result()[0].status == 'passed' and many()\nexecutor.close()\nprint('done')"
    )
    process = owner(script)
    output = process.communicate(timeout=60)[0]
    assert output.endswith("done\n") and process.returncode == 0
    assert gone(map(int, output.split()[:2]))


def kill_children(worker, pids):
    """Kills children while they and the worker are stopped: it sees all of them die at once, and none sees another die."""
    os.kill(worker, signal.SIGSTOP)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a child of the last job may be ending by itself
                os.kill(pid, number)
    assert gone(pids)
    os.kill(worker, signal.SIGCONT)


NAP = "import time\ndef f(x):\n    time.sleep(SECONDS)\n    return x + 1"


@pytest.mark.parametrize(
    ("victim", "setup"),
    [
        ("zygote", ""),
        ("zygote", JUDGED),
        ("children", ""),
        ("children", JUDGED),
        ("stopped zygote", ""),
        ("stopped worker", JUDGED),
    ],
)
def test_a_process_lost_in_the_midst_of_a_job(monkeypatch, victim, setup):
    """A job is run again if the machine failed. A program whose process was killed does not pass."""
    monkeypatch.setattr(pool, "_GRACE", 0.4)
    with CodeExecutor(num_workers=1, timeout=1.0) as executor:
        executor.run([GOOD])
        worker = executor._pool.workers[0].process.pid
        (zygote,) = children(worker)
        seconds = 10 if victim == "children" else 0.4
        code = NAP.replace("SECONDS", str(seconds))
        future = executor.submit([Job(code=code, tests=["assert f(1) == 2"], setup=setup, timeout=seconds + 0.6)])
        if shows_naps():
            assert wait_until(lambda: any(map(naps, below(zygote))))
        else:
            time.sleep(0.2)
        before = {worker, *below(worker)}
        if victim == "children":
            kill_children(worker, before - {worker, zygote})
        elif victim == "zygote":
            os.kill(zygote, signal.SIGKILL)
        else:
            os.kill(worker if "worker" in victim else zygote, signal.SIGSTOP)
        verdict = future.result(timeout=20)[0]
        assert verdict.status in (("error", "failed") if victim == "children" else ("passed",))
        executor.run([GOOD] * 2)  # those that waited for them were killed too
        assert executor.run([GOOD])[0].status == "passed"
        if victim == "zygote":
            assert gone(before)


def test_a_waiting_child_that_is_killed_costs_no_program():
    with CodeExecutor(num_workers=1, timeout=LIMIT) as executor:
        executor.run([GOOD])
        worker = executor._pool.workers[0].process.pid
        (zygote,) = children(worker)
        waiting = below(zygote)
        kill_children(worker, waiting)
        assert wait_until(lambda: all(map(ended, waiting)))
        assert [verdict.status for verdict in executor.run([GOOD] * 3)] == ["passed"] * 3
