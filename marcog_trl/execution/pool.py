"""The worker processes of an executor, and the thread that talks to them.

Jobs and verdicts travel as JSON frames over one socket per worker. How a worker runs a job is in `sandbox/`. Nothing that a
program has produced is ever evaluated in this process.
"""

import contextlib
import fcntl
import logging
import os
import selectors
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .isolation import Isolation
from .jobs import Status, TestResult, TestStatus, Verdict
from .packages import Packages
from .sandbox import scratch, wire


logger = logging.getLogger(__name__)

_WORKER = Path(__file__).parent / "sandbox" / "main.py"
_GRACE = 5.0  # seconds beyond a job's own limit after which its worker counts as dead
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
    total: int
    limit: float  # seconds
    attempts: int = 0


@dataclass
class _Worker:
    """One worker process and the job that it has."""

    process: subprocess.Popen
    sock: socket.socket
    deadline: float
    errors: BinaryIO  # its standard error
    folder: str  # path of its scratch folder, if it makes one
    ready: bool = False
    task: Task | None = None
    buffer: bytearray = field(default_factory=bytearray)


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
    """The worker processes and the one thread that talks to them."""

    def __init__(self, num_workers: int, isolation: Isolation, packages: Packages):
        self.num_workers = num_workers
        self.isolation = isolation
        self.packages = packages
        self.told: set[str] = set()  # warnings that have been given
        self.lock = threading.Lock()
        self.queue: deque[Task] = deque()
        self.workers: list[_Worker] = []
        self.closing = False
        self.failed_starts = 0
        self.failure: str | None = None
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None

    # Called by any thread

    def put(self, tasks: list[Task]) -> None:
        with self.lock:
            if self.failure is not None:
                raise RuntimeError(self.failure)
            if self.closing:
                raise RuntimeError("the executor is closed")
            self.queue.extend(tasks)
            if self.thread is None:
                self.wake_read, self.wake_write = _socketpair()
                self.wake_write.setblocking(False)
                self.wake_read.setblocking(False)
                self.thread = threading.Thread(target=self.loop, name="marcog-executor", daemon=True)
                self.thread.start()
        self.wake()

    def wake(self) -> None:
        try:
            self.wake_write.send(b"x")
        except BlockingIOError:
            pass  # the buffer is full, so the thread will wake up anyway

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # this is a fork, and the workers belong to its parent
        with self.lock:
            self.closing = True
            thread = self.thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self.wake()
            thread.join()

    # Called by the pool's thread only

    def loop(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.wake_read, selectors.EVENT_READ, None)
        try:
            while not self.closing:
                self.assign()
                patience, start = self.patience(), time.monotonic()
                events = self.selector.select(patience)
                self.forgive(time.monotonic() - start - (patience or 0.0) if patience is not None else 0.0)
                for key, _ in events:
                    if key.data is None:
                        self.drain()
                    else:
                        self.receive(key.data)
                self.expire()
        except BaseException as error:  # even after a bug here, no caller may wait forever
            self.failure = f"the executor failed: {error}"
            logger.exception("the executor failed")
        finally:
            self.shutdown()

    def drain(self) -> None:
        try:
            while self.wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def patience(self) -> float | None:
        deadlines = [worker.deadline for worker in self.workers if worker.task is not None or not worker.ready]
        return min(max(0.0, min(deadlines) - time.monotonic()), wire.LONGEST_WAIT) if deadlines else None

    def assign(self) -> None:
        while self.queue and len(self.workers) < min(self.num_workers, len(self.queue) + self.busy()):
            self.start_worker()
        for worker in list(self.workers):
            if worker.ready and worker.task is None and self.queue:
                worker.task = self.queue.popleft()
                worker.task.attempts += 1
                worker.deadline = time.monotonic() + worker.task.limit + _GRACE
                try:
                    wire.send(worker.sock, worker.task.payload, _LARGEST_JOB)
                except OSError as error:
                    self.lose(worker, f"could not be reached: {error}")

    def busy(self) -> int:
        return sum(worker.task is not None for worker in self.workers)

    def start_worker(self) -> None:
        ours, theirs = _socketpair()
        errors, folder = tempfile.TemporaryFile(), scratch.reserve()
        with theirs:
            process = subprocess.Popen(
                # isolated as by -I, except for the variables above
                [
                    sys.executable,
                    "-s",
                    "-P",
                    "-S",
                    str(_WORKER),
                    "worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.settimeout(_GRACE)
        worker = _Worker(process, ours, time.monotonic() + _START_LIMIT, errors, folder)
        self.workers.append(worker)
        self.selector.register(ours, selectors.EVENT_READ, worker)
        hello = {
            "landlock": bool(self.isolation.landlock_abi),
            "seccomp": self.isolation.seccomp,
            "strict": self.isolation.level == "strict",
            "modules": self.packages.modules,
            "readable": self.packages.readable,
            "load": self.packages.load,
            "folder": folder,
        }
        with contextlib.suppress(ConnectionError):  # a worker that has died is noticed where its answer is read
            wire.send(ours, hello)

    def receive(self, worker: _Worker) -> None:
        try:
            data = worker.sock.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.lose(worker, "died")
            return
        worker.buffer += data
        while len(worker.buffer) >= 4:
            (size,) = wire.HEADER.unpack_from(worker.buffer)
            if len(worker.buffer) < 4 + size:
                return
            frame = wire.parse(bytes(worker.buffer[4 : 4 + size]))
            del worker.buffer[: 4 + size]
            self.handle(worker, frame)

    def handle(self, worker: _Worker, frame: dict[str, Any]) -> None:
        if not worker.ready:
            if frame["refused"] is not None:
                raise RuntimeError(f"a worker could not be confined: {frame['refused']}")
            self.tell_of(frame)
            worker.ready = True
            self.failed_starts = 0
            return
        if "starting" in frame:
            # the worker first starts a process that the job needs, which takes none of the job's time
            worker.deadline += _START_LIMIT
            return
        # the job stays with its worker until its results are read, so that an error in them reaches the caller
        task = worker.task
        assert task is not None, "a verdict without a job"
        results = tuple(TestResult(*result) for result in frame.get("tests", ()))
        worker.task = None
        if "infrastructure" in frame:
            self.retry(task, frame["infrastructure"])
            return
        passed = sum(result.status == "passed" for result in results)
        self.finish(task, Verdict(frame["status"], passed, len(results), results, frame["message"], frame["seconds"]))

    def tell_of(self, hello: dict[str, Any]) -> None:
        """Warns once about each thing that a worker could not confine."""
        problems = [f"Landlock refused the rule for {path}, so programs cannot read it" for path in hello["left_out"]]
        if self.isolation.seccomp and not hello["threads"]:
            problems.append("the kernel does not let us count a program's threads, so their number is not limited")
        for problem in set(problems) - self.told:
            self.told.add(problem)
            logger.warning("code execution: %s", problem)

    def forgive(self, late: float) -> None:
        """Extends deadlines if this process was stopped for `late` seconds, because its workers were stopped too."""
        if late > 1.0:
            for worker in self.workers:
                worker.deadline += late

    def expire(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.deadline < now and (worker.task is not None or not worker.ready):
                self.lose(worker, "did not answer in time", stuck=worker.ready)

    def lose(self, worker: _Worker, why: str, stuck: bool = False) -> None:
        """
        Removes a worker that is dead or stuck, and retries or settles its job.

        A job that makes two workers stuck counts as the cause: otherwise a program could escape with `infrastructure`.
        """
        self.stop(worker)
        self.workers.remove(worker)
        why = f"worker {worker.process.pid} {why}{_last_words(worker)}"
        logger.warning("%s (exit status %s)", why, worker.process.returncode)
        if worker.task is not None:
            if stuck and worker.task.attempts >= 2:
                self.settle(worker.task, "timeout", "timeout", why)
            else:
                self.retry(worker.task, why)
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= 3:
                raise RuntimeError(f"no worker could be started: {why}")

    def retry(self, task: Task, why: str) -> None:
        if task.attempts < 2:
            self.queue.appendleft(task)
        else:
            self.give_up(task, why)

    def give_up(self, task: Task, why: str) -> None:
        self.settle(task, "infrastructure", "skipped", why)

    def settle(self, task: Task, status: Status, test_status: TestStatus, why: str) -> None:
        results = (TestResult(test_status, why),) * task.total
        self.finish(task, Verdict(status, 0, task.total, results, why))

    def finish(self, task: Task, verdict: Verdict) -> None:
        batch = task.batch
        batch.verdicts[task.index] = verdict
        batch.missing -= 1
        if batch.missing == 0 and not batch.future.done():
            batch.future.set_result(batch.verdicts)

    def stop(self, worker: _Worker) -> None:
        self.selector.unregister(worker.sock)
        worker.sock.close()
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        worker.process.wait()
        scratch.remove(worker.folder)

    def shutdown(self) -> None:
        with self.lock:
            self.closing = True
            tasks = [*self.queue, *(worker.task for worker in self.workers if worker.task is not None)]
            self.queue.clear()
        for worker in self.workers:
            self.stop(worker)
            worker.errors.close()
        self.workers.clear()
        self.selector.close()
        self.wake_read.close()
        self.wake_write.close()
        error = RuntimeError(self.failure or "the executor was closed before this job was done")
        for batch in {id(task.batch): task.batch for task in tasks}.values():
            if not batch.future.done():
                batch.future.set_exception(error)


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """A socket pair whose descriptors are not those of standard streams, which this process may have closed."""
    pair = []
    for end in socket.socketpair():
        with end:
            pair.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
    return pair[0], pair[1]


def _last_words(worker: _Worker) -> str:
    """The last line that an ended worker wrote to its standard error; closes that file."""
    with worker.errors as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return f": {said[-1]}" if said else ""
