"""The worker processes of an executor. One thread talks to each of them.

Jobs and verdicts travel as JSON frames over one socket per worker. How a worker runs a job is in `sandbox/`. Nothing that a
program has produced is ever evaluated in this process.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .isolation import Isolation
from .jobs import Status, TestResult, TestStatus, Verdict
from .packages import Packages
from .sandbox import limits, scratch, wire


logger = logging.getLogger(__name__)

_WORKER = Path(__file__).parent / "sandbox" / "main.py"
_GRACE = 5.0  # seconds beyond a job's own limit after which its worker counts as dead
_MOST_SENDS = 5  # of one job, which may itself be what ends workers while they receive it
_START_LIMIT = 60.0  # seconds for a worker to start
_LARGEST_JOB = 1 << 31  # bytes
# A fixed hash seed makes verdicts reproducible. The other variables save address space, which is limited: numpy's libraries
# would start one thread per core, and malloc would make an arena of 64 MiB per thread.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass
class Batch:
    """The jobs of one `submit`, and the verdicts that have arrived."""

    future: Future
    verdicts: list[Verdict | None]
    missing: int


@dataclass
class Task:
    """One job in the queue or in a worker."""

    batch: Batch
    index: int
    payload: dict[str, Any]

    def failed(self, status: Status, test_status: TestStatus, why: str) -> Verdict:
        total = self.payload["total"]
        return Verdict(status, 0, total, (TestResult(test_status, why),) * total, why)


class JobsFuture(Future):
    """A future whose callbacks may wait for other jobs, because they run in threads of their own, not in the pool's."""

    def add_done_callback(self, fn: Callable[[Future], Any]) -> None:
        def call(future: Future) -> None:
            try:
                fn(future)
            except Exception:
                logger.exception("a callback of executed jobs failed")

        super().add_done_callback(lambda future: threading.Thread(target=call, args=(future,), daemon=True).start())


class Pool:
    """The queue of jobs, and the workers that take them from it."""

    def __init__(self, num_workers: int, isolation: Isolation, packages: Packages):
        self.num_workers = num_workers
        self.isolation = isolation
        self.packages = packages
        self.changed = threading.Condition()  # guards what follows
        self.queue: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.ended: str | None = None  # why no more jobs are run
        self.told: set[str] = set()  # warnings that have been given
        self.pid = os.getpid()

    def put(self, tasks: list[Task]) -> None:
        with self.changed:
            if self.ended is not None:
                raise RuntimeError(self.ended)
            self.queue.extend(tasks)
            busy = sum(worker.task is not None for worker in self.workers)
            while len(self.workers) < min(self.num_workers, len(self.queue) + busy):
                self.workers.append(Worker(self))
                self.workers[-1].thread.start()
            self.changed.notify_all()

    def take(self, worker: "Worker") -> Task | None:
        """Gives a worker its next job; `None` if there will be none."""
        with self.changed:
            worker.task = None
            self.changed.wait_for(lambda: self.queue or self.ended is not None)
            if self.ended is None:
                worker.task = self.queue.popleft()
            return worker.task

    def finish(self, task: Task, verdict: Verdict) -> None:
        with self.changed:
            batch = task.batch
            batch.verdicts[task.index] = verdict
            batch.missing -= 1
            if batch.missing == 0 and not batch.future.done():
                batch.future.set_result(batch.verdicts)

    def end(self, why: str) -> None:
        """Ends the workers. Whoever waits for a job gets a `RuntimeError`."""
        with self.changed:
            self.ended = self.ended or why
            tasks = [*self.queue, *(worker.task for worker in self.workers if worker.task is not None)]
            self.queue.clear()
            for worker in self.workers:
                worker.interrupt()
            for task in tasks:
                if not task.batch.future.done():
                    task.batch.future.set_exception(RuntimeError(why))
            self.changed.notify_all()

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # this is a fork, and the workers belong to its parent
        self.end("the executor is closed, so this job will not run")
        for worker in self.workers:
            if worker.thread is not threading.current_thread():
                worker.thread.join()

    def abandon(self) -> None:
        """Closes the channels of a pool that a fork has inherited."""
        for worker in self.workers:
            if worker.sock is not None:
                worker.sock.close()

    def warn(self, hello: dict[str, Any]) -> None:
        """Warns once about each thing that a worker could not confine."""
        problems = [f"Landlock refused the rule for {path}, so programs cannot read it" for path in hello["left_out"]]
        if self.isolation.seccomp and not hello["threads"]:
            problems.append("the kernel does not let us count a program's threads, so their number is not limited")
        with self.changed:
            for problem in set(problems) - self.told:
                self.told.add(problem)
                logger.warning("code execution: %s", problem)


class Worker:
    """A thread that has a worker process run one job after another."""

    process: subprocess.Popen

    def __init__(self, pool: Pool):
        self.pool = pool
        self.task: Task | None = None
        self.sock: socket.socket | None = None  # the channel to the process, while there is one
        self.thread = threading.Thread(target=self.work, name="marcog-executor", daemon=True)

    def work(self) -> None:
        try:
            while (task := self.pool.take(self)) is not None:
                self.pool.finish(task, self.execute(task))
        except BaseException as error:  # even after a bug here, no caller may wait forever
            if self.pool.ended is None:
                logger.exception("the executor failed")
            self.pool.end(f"the executor failed: {error}")
        finally:
            if self.sock is not None:
                self.stop("ended")

    def execute(self, task: Task) -> Verdict:
        """
        The verdict on a job. If the machine fails, the job is run once more.

        A job that makes two processes stuck counts as the cause: otherwise a program could escape with `infrastructure`.
        """
        attempts, limit = 0, limits.WALL_CLOCK * task.payload["timeout"] + _GRACE
        for _ in range(_MOST_SENDS):
            sock, stuck = self.sock or self.start(), False
            try:
                wire.send(sock, task.payload, _LARGEST_JOB)
                attempts += 1  # not before, because the process may have died while it waited
                frame = self.receive(limit)
                while "starting" in frame:  # a process that the job needs, which takes none of the job's time
                    frame = self.receive(limit + _START_LIMIT)
                if "infrastructure" not in frame:
                    results = tuple(TestResult(*result) for result in frame["tests"])
                    passed = sum(result.status == "passed" for result in results)
                    return Verdict(frame["status"], passed, len(results), results, frame["message"], frame["seconds"])
                why = frame["infrastructure"]
            except TimeoutError:
                why, stuck = self.stop("did not answer in time"), True
            except (OSError, EOFError):
                why = self.stop("died")
            if attempts == 2:
                break
        if stuck and attempts == 2:
            return task.failed("timeout", "timeout", why)
        return task.failed("infrastructure", "skipped", why)

    def receive(self, seconds: float) -> dict[str, Any]:
        """The process's next message. Time in which this process is stopped does not count, because its workers are stopped
        too."""
        while seconds > 0:
            wait = min(1.0, seconds)
            frame = self.reader.receive(time.monotonic() + wait)
            if frame is not wire.TIMEOUT:
                return frame
            seconds -= wait
        raise TimeoutError

    def start(self) -> socket.socket:
        """Starts a process; returns the channel to it."""
        for _ in range(3):
            sock = self.open()
            try:
                return self.greet(sock)
            except TimeoutError:
                why = self.stop("did not answer in time")
            except (OSError, EOFError):
                why = self.stop("died")
        raise RuntimeError(f"no worker could be started: {why}")

    def open(self) -> socket.socket:
        self.folder, self.errors = scratch.reserve(), tempfile.TemporaryFile()
        ours, theirs = _socketpair()
        with theirs:
            self.process = subprocess.Popen(
                # isolated as by -I, except for the variables above
                [sys.executable, "-s", "-P", "-S", str(_WORKER), "worker", str(theirs.fileno()), str(os.getpid())],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.settimeout(_GRACE)
        self.reader = wire.FrameReader(ours, _LARGEST_JOB)
        with self.pool.changed:
            self.sock = ours
            if self.pool.ended is not None:
                self.interrupt()
        return ours

    def greet(self, sock: socket.socket) -> socket.socket:
        """Tells the process what it has to know, and learns how programs are confined."""
        isolation, packages = self.pool.isolation, self.pool.packages
        terms = {
            "landlock": bool(isolation.landlock_abi),
            "seccomp": isolation.seccomp,
            "strict": isolation.level == "strict",
            "modules": packages.modules,
            "readable": packages.readable,
            "load": packages.load,
            "folder": self.folder,
        }
        wire.send(sock, terms)
        hello = self.receive(_START_LIMIT)
        if hello["refused"] is not None:
            raise RuntimeError(f"a worker could not be confined: {hello['refused']}")
        self.pool.warn(hello)
        return sock

    def interrupt(self) -> None:
        """Has the thread stop its process."""
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)

    def stop(self, why: str) -> str:
        """Ends the process; returns how it ended, with the last line that it wrote to its standard error."""
        assert self.sock is not None, "there is no process"
        self.sock.close()
        self.sock = None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        scratch.remove(self.folder)
        with self.errors as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
            said = [line for line in file.read().decode(errors="replace").split("\n") if line.strip()]
        why = (
            f"worker {self.process.pid} {why}{': ' + said[-1] if said else ''} (exit status {self.process.returncode})"
        )
        if self.pool.ended is None:
            logger.warning("%s", why)
        return why


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """A socket pair whose descriptors are not those of standard streams, which this process may have closed."""
    pair = []
    for end in socket.socketpair():
        with end:
            pair.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
    return pair[0], pair[1]
