"""Looks at the processes of an executor from outside, and at how long its verdicts take."""

import functools
import os
import subprocess
import time
from pathlib import Path

from marcog_trl.execution.sandbox.limits import WALL_CLOCK


def children(pid):
    """Ids of the processes that a process has started and not yet reaped."""
    return {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}


def ended(pid):
    """Whether a process is gone, or a zombie that its parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def below(root):
    """Ids of the running processes below a process."""
    found, todo = set(), [root]
    while todo:
        try:
            new = children(todo.pop())
        except OSError:
            continue  # it has ended meanwhile
        todo += new
        found |= new
    return {pid for pid in found if not ended(pid)}


def wait_until(condition, seconds=20):
    """Whether a condition becomes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def gone(pids):
    """Whether processes end."""
    return wait_until(lambda: all(map(ended, pids)))


def is_idle(worker):
    """Whether a worker comes to have no processes but its zygotes, each with two children that wait for the next job."""
    return wait_until(lambda: len(below(worker)) <= 3 * len(children(worker)))


def cpu_time(executor):
    """CPU time that the processes of an executor have used, in seconds."""
    ticks = 0
    for worker in executor._pool.workers:
        for pid in () if worker.sock is None else (worker.process.pid, *children(worker.process.pid)):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_in_time(executor, job, seconds):
    """
    The verdict on a job, which must come within so many seconds: of wall-clock time, or of CPU time, where the machine is busy. A
    second try is allowed.
    """
    for _ in range(2):
        start, before = time.monotonic(), cpu_time(executor)
        (verdict,) = executor.run([job])
        took, used = time.monotonic() - start, cpu_time(executor) - before
        if took < seconds or (0 <= used < seconds and took < WALL_CLOCK * seconds):
            return verdict
    raise AssertionError(
        f"the verdict took {took:.1f} s ({used:.1f} s of CPU time), and may take {seconds:g} s: {verdict}"
    )


def naps(pid):
    """Whether a process is in `time.sleep`."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text() in ("hrtimer_nanosleep", "do_nanosleep", "common_nsleep")
    except OSError:
        return False


@functools.cache
def shows_naps():
    """Whether the kernel says what a process waits for."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            return wait_until(lambda: naps(process.pid), seconds=10)
        finally:
            process.kill()
