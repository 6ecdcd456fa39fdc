"""Hands jobs to worker processes and collects their verdicts.

Knows nothing about how a worker runs a job (`sandbox/` does), nor about what a verdict is worth. Jobs and verdicts travel
as JSON frames over one socket per worker; nothing that a program produced is ever evaluated in this process.
"""

import atexit
import importlib.util
import json
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .isolation import Isolation, IsolationLevel, resolve
from .jobs import (
    LEAST_MEMORY_MB,
    Job,
    Plan,
    Status,
    TestResult,
    TestStatus,
    UnusableTests,
    Verdict,
    check_count,
    check_limit,
    plan,
    unusable,
)


logger = logging.getLogger(__name__)

_WORKER = Path(__file__).parent / "sandbox" / "main.py"
_GRACE = 5.0  # seconds beyond a job's own limit after which its worker counts as dead
_START_LIMIT = 60.0  # seconds for a worker to come up
_HEADER = struct.Struct("<I")
# One hash seed, so that verdicts repeat; one thread for numpy, whose libraries otherwise start one per core, each with tens
# of MiB of the address space that a program is limited to
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def available_cores() -> int:
    """Number of CPU cores that this process may use: its affinity mask, cut by the control group's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cores)))


def _cgroup_cores(default: int) -> int:
    """Cores that the CPU quota of this process's control group amounts to, rounded down; `default` without a quota."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return default
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: the tightest of the group and its ancestors
            root, group = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup" + path)
            for folder in (group, *group.parents):
                if folder == root.parent:
                    break
                text = _read(folder / "cpu.max").split()
                if len(text) == 2 and text[0] != "max":
                    quotas.append(int(text[0]) / int(text[1]))
        elif "cpu" in controllers.split(","):
            for folder in (Path(f"/sys/fs/cgroup/{controllers}{path}"), Path("/sys/fs/cgroup/cpu")):
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                if quota.strip() and int(quota) > 0 and period.strip():
                    quotas.append(int(quota) / int(period))
    return max(1, int(min(quotas))) if quotas else default


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def packages() -> list[str]:
    """Folders of the third-party packages that programs may import: numpy, where it is installed."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0])
    return [str(path) for path in (folder, folder.with_name("numpy.libs")) if path.is_dir()]


def default_num_workers() -> int:
    """This process's share of the node's cores: `LOCAL_WORLD_SIZE` training processes divide them."""
    return max(1, available_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@dataclass
class _Batch:
    """The jobs of one `submit` and the verdicts that have arrived."""

    future: Future
    verdicts: list[Verdict | None]
    missing: int


@dataclass
class _Task:
    """One job on its way."""

    batch: _Batch
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
    ready: bool = False
    task: _Task | None = None
    buffer: bytearray = field(default_factory=bytearray)


class _Pool:
    """The worker processes and the one thread that talks to them."""

    def __init__(self, num_workers: int, isolation: Isolation):
        self.num_workers = num_workers
        self.isolation = isolation
        self.lock = threading.Lock()
        self.queue: deque[_Task] = deque()
        self.workers: list[_Worker] = []
        self.closing = False
        self.failed_starts = 0
        self.failure: str | None = None
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None

    # Called by any thread

    def put(self, tasks: list[_Task]) -> None:
        with self.lock:
            if self.closing:
                raise RuntimeError("the executor is closed")
            if self.failure is not None:
                raise RuntimeError(self.failure)
            self.queue.extend(tasks)
            if self.thread is None:
                self.wake_read, self.wake_write = socket.socketpair()
                self.wake_write.setblocking(False)
                self.wake_read.setblocking(False)
                self.thread = threading.Thread(target=self.loop, name="marcog-executor", daemon=True)
                self.thread.start()
        self.wake()

    def wake(self) -> None:
        try:
            self.wake_write.send(b"x")
        except BlockingIOError:
            pass  # the thread has wake-ups enough waiting for it

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # a fork of the owner: the workers are not ours
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
        except BaseException as error:  # a defect of ours must not leave anybody waiting
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
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def assign(self) -> None:
        while self.queue and len(self.workers) < min(self.num_workers, len(self.queue) + self.busy()):
            self.start_worker()
        for worker in list(self.workers):
            if worker.ready and worker.task is None and self.queue:
                worker.task = self.queue.popleft()
                worker.task.attempts += 1
                worker.deadline = time.monotonic() + worker.task.limit + _GRACE
                try:
                    body = json.dumps(worker.task.payload).encode()
                    worker.sock.sendall(_HEADER.pack(len(body)) + body)
                except OSError as error:
                    self.lose(worker, f"could not be reached: {error}")

    def busy(self) -> int:
        return sum(worker.task is not None for worker in self.workers)

    def start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # isolated as by -I, but for the variables that we set
                [sys.executable, "-s", "-P", "-S", "-B", str(_WORKER), str(theirs.fileno()), str(os.getpid())],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.settimeout(_GRACE)
        worker = _Worker(process, ours, deadline=time.monotonic() + _START_LIMIT)
        self.workers.append(worker)
        self.selector.register(ours, selectors.EVENT_READ, worker)
        confinement = {"landlock": bool(self.isolation.landlock_abi), "seccomp": self.isolation.seccomp}
        hello = json.dumps({**confinement, "packages": packages()}).encode()
        ours.sendall(_HEADER.pack(len(hello)) + hello)

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
            (size,) = _HEADER.unpack_from(worker.buffer)
            if len(worker.buffer) < 4 + size:
                return
            frame = json.loads(bytes(worker.buffer[4 : 4 + size]))
            del worker.buffer[: 4 + size]
            self.handle(worker, frame)

    def handle(self, worker: _Worker, frame: dict[str, Any]) -> None:
        if not worker.ready:
            if frame["refused"] is not None:
                raise RuntimeError(f"a worker could not be confined: {frame['refused']}")
            worker.ready = True
            self.failed_starts = 0
            return
        # Until its results are read the job stays with its worker: were they unreadable, whoever waits for it is told so
        task = worker.task
        assert task is not None, "a verdict without a job"
        results = tuple(TestResult(*result) for result in frame.get("tests", ()))
        worker.task = None
        if "infrastructure" in frame:
            self.retry(task, frame["infrastructure"])
            return
        passed = sum(result.status == "passed" for result in results)
        self.finish(task, Verdict(frame["status"], passed, len(results), results, frame["message"], frame["seconds"]))

    def forgive(self, late: float) -> None:
        """Where this process itself was stopped for `late` seconds, so were its workers."""
        if late > 1.0:
            for worker in self.workers:
                worker.deadline += late

    def expire(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.deadline < now and (worker.task is not None or not worker.ready):
                self.lose(worker, "did not answer in time", stuck=worker.ready)

    def lose(self, worker: _Worker, why: str, stuck: bool = False) -> None:
        """Removes a worker that is of no use any more and sees to its job. A job that gets two workers stuck is itself
        the cause, so that no program can have itself excused."""
        self.stop(worker)
        self.workers.remove(worker)
        why = f"worker {worker.process.pid} {why}"
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

    def retry(self, task: _Task, why: str) -> None:
        if task.attempts < 2:
            self.queue.appendleft(task)
        else:
            self.give_up(task, why)

    def give_up(self, task: _Task, why: str) -> None:
        self.settle(task, "infrastructure", "skipped", why)

    def settle(self, task: _Task, status: Status, test_status: TestStatus, why: str) -> None:
        results = (TestResult(test_status, why),) * task.total
        self.finish(task, Verdict(status, 0, task.total, results, why))

    def finish(self, task: _Task, verdict: Verdict) -> None:
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

    def shutdown(self) -> None:
        with self.lock:
            self.closing = True
            tasks = [*self.queue, *(worker.task for worker in self.workers if worker.task is not None)]
            self.queue.clear()
        for worker in self.workers:
            self.stop(worker)
        self.workers.clear()
        self.selector.close()
        self.wake_read.close()
        self.wake_write.close()
        error = RuntimeError(self.failure or "the executor was closed before this job was done")
        for batch in {id(task.batch): task.batch for task in tasks}.values():
            if not batch.future.done():
                batch.future.set_exception(error)


class CodeExecutor:
    """
    Runs untrusted Python programs against tests, in confined worker processes.

    Worker processes start with the first job and are shared by all threads; jobs are handed out one at a time, so a slow
    program delays nobody but itself. A fork of the owning process gets workers of its own when it first submits a job.

    Args:
        num_workers (`int`, *optional*):
            Number of worker processes. `None` takes the cores that this process may use (affinity and control group),
            divided by `LOCAL_WORLD_SIZE`, the number of training processes on the node.
        timeout (`float`, *optional*, defaults to `10.0`):
            Wall-clock limit of a job in seconds, loading included, for jobs without one of their own.
        test_timeout (`float`, *optional*):
            Wall-clock limit of each test in seconds, for jobs without one of their own. `None` leaves a test what is left
            of its job's time.
        max_timeouts (`int`, *optional*, defaults to `3`):
            After this many tests of a job that timed out (or killed the program), the rest are skipped.
        memory_mb (`int`, *optional*, defaults to `512`):
            Limit of a program's address space in MiB, for jobs without one of their own.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` refuses to start where Landlock or seccomp are missing; `"best_effort"` runs with what there is
            and warns once; `"none"` applies resource limits only and is for trusted code.

    Attributes:
        isolation (`Isolation`): What is really active.

    Raises:
        ValueError: If an argument is out of range.
        IsolationError: If `isolation="strict"` is not possible here: a `RuntimeError`, and a `ValueError` too.

    Example:

    ```python
    from marcog_trl.execution import CodeExecutor, Job

    job = Job(code="def add(a, b):\\n    return a + b", tests=["assert add(1, 2) == 3"], entry_point="add")
    with CodeExecutor() as executor:
        (verdict,) = executor.run([job])
    assert verdict.status == "passed"
    ```
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout: float = 10.0,
        test_timeout: float | None = None,
        max_timeouts: int = 3,
        memory_mb: int = 512,
        isolation: IsolationLevel = "strict",
    ):
        check_count("num_workers", num_workers, optional=True)
        check_limit("timeout", timeout)
        check_limit("test_timeout", test_timeout, optional=True)
        check_count("max_timeouts", max_timeouts)
        check_count("memory_mb", memory_mb, least=LEAST_MEMORY_MB)
        self.num_workers = default_num_workers() if num_workers is None else num_workers
        self.timeout = timeout
        self.test_timeout = test_timeout
        self.max_timeouts = max_timeouts
        self.memory_mb = memory_mb
        self.isolation = resolve(isolation)
        logger.info("code execution: %s", self.isolation)
        if isolation == "best_effort" and self.isolation.tier != "confined":
            warnings.warn(f"programs run with incomplete confinement: {self.isolation}", stacklevel=2)
        self._pool = _Pool(self.num_workers, self.isolation)
        self._finalizer = weakref.finalize(self, self._pool.close)
        self._fork_lock = threading.Lock()

    def submit(self, jobs: Sequence[Job]) -> "Future[list[Verdict]]":
        """
        Starts executing jobs and returns at once.

        Args:
            jobs (`Sequence[Job]`): The jobs. Jobs of one call run concurrently, as many as there are workers.

        Returns:
            `Future[list[Verdict]]`: will hold one verdict per job, in the order of `jobs`.

        Tests that are text but cannot be run (they do not parse, or there are none) may come from a model: their verdict
        is `"error"`, with the reason as its message.

        Raises:
            TypeError: If `jobs` is a single job.
            ValueError: If a job is not one (an unknown format, tests of another type than the format wants, a limit that
                is not positive); the message names the job's index. Nothing has run then.
            RuntimeError: If the executor is closed.
        """
        if isinstance(jobs, Job):
            raise TypeError("jobs must be a list of jobs, got one Job. Pass [job].")
        plans: dict[int, Plan] = {}
        verdicts: list[Verdict | None] = []
        for index, job in enumerate(jobs):
            verdicts.append(None)
            try:
                plans[index] = plan(job)
            except UnusableTests as error:
                verdicts[index] = unusable(job, str(error))
            except ValueError as error:
                raise ValueError(f"jobs[{index}]: {error}") from None
        future: Future[list[Verdict]] = Future()
        future.set_running_or_notify_cancel()
        batch = _Batch(future, verdicts, len(plans))
        if not plans:
            batch.future.set_result(verdicts)
            return future
        tasks = []
        for index, job_plan in plans.items():
            payload = self._payload(jobs[index], job_plan)
            tasks.append(_Task(batch, index, payload, job_plan.total, payload["timeout"]))
        self._own_pool().put(tasks)
        return future

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """
        Executes jobs and waits for all of them.

        Args:
            jobs (`Sequence[Job]`): The jobs.

        Returns:
            `list[Verdict]`: one verdict per job, in the order of `jobs`.

        Raises:
            ValueError: As for `submit`.
            RuntimeError: If the executor is closed, before or meanwhile.
        """
        return self.submit(jobs).result()

    def close(self) -> None:
        """Ends the worker processes. Futures that are not done get a `RuntimeError`. May be called again."""
        self._finalizer()

    def __enter__(self) -> "CodeExecutor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _payload(self, job: Job, job_plan: Plan) -> dict[str, Any]:
        return {
            "code": job.code,
            "tests": job.tests if job_plan.calls is None else None,
            "format": job.test_format,
            "setup": job.setup,
            "entry_point": job.entry_point,
            "exports": job_plan.exports,
            "modules": job_plan.modules,
            "names": job_plan.names,
            "reusable": job_plan.reusable,
            "patched": job_plan.patched,
            "logs": job_plan.logs,
            "total": job_plan.total,
            "calls": job_plan.calls,
            "checker": job_plan.checker,
            "timeout": self.timeout if job.timeout is None else job.timeout,
            "test_timeout": self.test_timeout if job.test_timeout is None else job.test_timeout,
            "max_timeouts": self.max_timeouts,
            "memory_mb": self.memory_mb if job.memory_mb is None else job.memory_mb,
        }

    def _own_pool(self) -> _Pool:
        """This process's pool: a fork inherits the object, but neither the thread nor the right to the workers."""
        with self._fork_lock:
            if self._pool.pid != os.getpid():
                for worker in self._pool.workers:
                    worker.sock.close()
                self._pool = _Pool(self.num_workers, self.isolation)
                self._finalizer = weakref.finalize(self, self._pool.close)
            return self._pool


_shared: CodeExecutor | None = None
_shared_lock = threading.Lock()


def shared_executor(**kwargs: Any) -> CodeExecutor:
    """
    The process-wide default executor, made when first asked for and closed at exit.

    Args:
        **kwargs: Arguments of `CodeExecutor` for the call that makes it; later calls must not pass any that differ.

    Returns:
        `CodeExecutor`: always the same one.

    Raises:
        ValueError: If it exists already and was made with another value of an argument that is passed.
    """
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = CodeExecutor(**kwargs)
            atexit.register(_shared.close)
            return _shared
        for name, value in kwargs.items():
            current = _shared.isolation.level if name == "isolation" else getattr(_shared, name)
            if value is not None and value != current:
                raise ValueError(f"the shared executor has {name}={current!r} already; {value!r} needs one of its own")
        return _shared
