"""`CodeExecutor`: checks jobs, hands them to its pool of worker processes, and collects their verdicts."""

import atexit
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .isolation import IsolationLevel, resolve
from .jobs import LEAST_MEMORY_MB, Job, Plan, UnusableTests, Verdict, check_count, check_limit, plan, unusable
from .packages import fault_of_imports, find_packages
from .pool import Batch, JobsFuture, Pool, Task
from .sandbox import limits


logger = logging.getLogger(__name__)


def available_cores() -> int:
    """Number of CPU cores that this process may use, at least 1. Both its affinity mask and the quota of its control group
    count."""
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cores)))


def _cgroup_cores(default: int) -> int:
    """Number of cores in the CPU quota of this process's control group, rounded down; `default` without a quota."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return default
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: the lowest quota of the group and its ancestors counts
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


def default_num_workers() -> int:
    """This process's share of the node's cores. `LOCAL_WORLD_SIZE` (or, by DeepSpeed's launcher, `LOCAL_SIZE`) training
    processes divide them."""
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return max(1, available_cores() // max(1, int(processes)))


class CodeExecutor:
    """
    Runs untrusted Python programs against tests, in confined worker processes.

    Worker processes start with the first job and are shared by all threads. Each worker gets one job at a time, so a slow
    program delays only itself. A fork of the owning process starts workers of its own when it first submits a job.

    Args:
        num_workers (`int`, *optional*):
            Number of worker processes. Defaults to the number of cores that this process may use (affinity and control
            group), divided by the number of training processes on the node (`LOCAL_WORLD_SIZE`, which launchers set).
        timeout (`float`, *optional*, defaults to `10.0`):
            Limit of a job's CPU time in seconds, loading and tests included, unless the job has its own. A job that hardly
            uses the CPU gets as many seconds of wall-clock time, and any job at most ten times as many.
        test_timeout (`float`, *optional*):
            The same limit for each test, unless the job has its own. With `None`, only the limit of the job applies.
        max_timeouts (`int`, *optional*, defaults to `3`):
            When this many tests of a job have timed out or killed the program, the rest are skipped.
        memory_mb (`int`, *optional*, defaults to `512`):
            Limit of a program's address space in MiB, unless the job has its own.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` raises an error if the kernel lacks Landlock or seccomp; `"best_effort"` uses what the kernel
            offers and warns if something is missing; `"none"` applies resource limits only and is for trusted code.
        packages (`Sequence[str]`, *optional*, defaults to `()`):
            Installed packages that programs may import besides the standard library and numpy, such as
            `["pandas", "sympy"]`. The packages that these require are included.
        files (`bool`, *optional*):
            Whether programs get a scratch folder of 64 MiB as working directory, shared with the tests and emptied after
            each job, unless the job has its own setting. With `None`, they get one if their tests work with files.

    Attributes:
        isolation (`Isolation`): What is really active.

    Raises:
        ValueError: If an argument is out of range, a package is not installed, or a hard limit (`ulimit -H`) of this
            process is too low for programs.
        IsolationError: If the kernel lacks what `isolation="strict"` needs. It is a `RuntimeError` and a `ValueError`.

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
        packages: Sequence[str] = (),
        files: bool | None = None,
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
        self.packages = tuple(packages)
        self.files = files
        found = find_packages(packages)
        self._modules = frozenset(found.modules)
        limits.check(memory_mb, timeout)
        self.isolation = resolve(isolation)
        logger.info("code execution: %s", self.isolation)
        if isolation == "best_effort" and self.isolation.tier != "confined":
            warnings.warn(f"programs run with incomplete confinement: {self.isolation}", stacklevel=2)
        self._pool = Pool(self.num_workers, self.isolation, found)
        self._finalizer = weakref.finalize(self, self._pool.close)
        self._fork_lock = threading.Lock()

    def submit(self, jobs: Sequence[Job]) -> "Future[list[Verdict]]":
        """
        Starts executing jobs and returns at once.

        Tests that cannot be run (they do not parse, or there are none) raise no error, because a model may have written
        them. Their job gets a verdict with status `"error"` and the reason as its message.

        Args:
            jobs (`Sequence[Job]`): The jobs. They run concurrently, as many as there are workers.

        Returns:
            `Future[list[Verdict]]`: One verdict per job, in the order of `jobs`.

        Raises:
            TypeError: If `jobs` is a single job.
            ValueError: If a field of a job is wrong (an unknown format, tests of the wrong type, a limit that is not
                positive). The message begins with the job's index, and no job has run.
            RuntimeError: If the executor is closed.
        """
        if isinstance(jobs, Job):
            raise TypeError("jobs must be a list of jobs, got one Job. Pass [job].")
        plans: dict[int, Plan] = {}
        verdicts: list[Verdict | None] = []
        for index, job in enumerate(jobs):
            verdicts.append(None)
            try:
                plans[index] = self._plan(job)
            except UnusableTests as error:
                verdicts[index] = unusable(job, str(error))
            except ValueError as error:
                raise ValueError(f"jobs[{index}]: {error}") from None
        future: Future[list[Verdict]] = JobsFuture()
        future.set_running_or_notify_cancel()
        batch = Batch(future, verdicts, len(plans))
        if not plans:
            batch.future.set_result(verdicts)
            return future
        self._own_pool().put([Task(batch, index, self._payload(jobs[index], each)) for index, each in plans.items()])
        return future

    def check(self, job: Job) -> None:
        """
        Checks that the tests of a job can be run, without running anything.

        Args:
            job (`Job`): The job.

        Raises:
            UnusableTests: If its tests cannot be run, cannot fail, or import what they may not import. The message is one line.
                It is a `ValueError`.
            ValueError: If a field of the job is wrong.
        """
        self._plan(job)

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """
        Executes jobs and waits for all of them.

        Args:
            jobs (`Sequence[Job]`): The jobs.

        Returns:
            `list[Verdict]`: One verdict per job, in the order of `jobs`.

        Raises:
            TypeError: As for `submit`.
            ValueError: As for `submit`.
            RuntimeError: If the executor is closed, or is closed meanwhile.
        """
        return self.submit(jobs).result()

    def close(self) -> None:
        """Ends the worker processes. Futures that are not done raise a `RuntimeError`. Can be called more than once."""
        self._finalizer()

    def __enter__(self) -> "CodeExecutor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _plan(self, job: Job) -> Plan:
        found = plan(job)
        limits.check(job.memory_mb or 0, job.timeout or 0.0)
        fault = fault_of_imports(found.imports, self._modules)
        if fault is not None:
            raise UnusableTests(fault)
        return found

    def _payload(self, job: Job, job_plan: Plan) -> dict[str, Any]:
        files = self.files if job.files is None else job.files
        return {
            **vars(job_plan),
            "code": job.code,
            "files": job_plan.files if files is None else files,
            "tests": job.tests if job_plan.calls is None else None,
            "format": job.test_format,
            "setup": job.setup,
            "entry_point": job.entry_point and job.entry_point.partition("(")[0],
            "candidate": job.entry_point,
            "kept_output": job.kept_output,
            "timeout": self.timeout if job.timeout is None else job.timeout,
            "test_timeout": self.test_timeout if job.test_timeout is None else job.test_timeout,
            "max_timeouts": self.max_timeouts,
            "memory_mb": self.memory_mb if job.memory_mb is None else job.memory_mb,
        }

    def _own_pool(self) -> Pool:
        """The pool of this process. A fork inherits the object, but not the pool's thread, and must not use its workers."""
        with self._fork_lock:
            if self._pool.pid != os.getpid():
                self._pool.abandon()
                self._pool = Pool(self.num_workers, self.isolation, self._pool.packages)
                self._finalizer = weakref.finalize(self, self._pool.close)
            return self._pool


_shared: CodeExecutor | None = None
_shared_lock = threading.Lock()


def shared_executor(**kwargs: Any) -> CodeExecutor:
    """
    The default executor of this process. The first call makes it, and it is closed at exit.

    Args:
        **kwargs: Arguments of `CodeExecutor` for the first call; `None` is its default. Later calls must pass the same values, or
            none.

    Returns:
        `CodeExecutor`: The same executor for each call.

    Raises:
        ValueError: If the executor was made with another value of an argument.
    """
    global _shared
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    with _shared_lock:
        if _shared is None:
            _shared = CodeExecutor(**kwargs)
            atexit.register(_shared.close)
            return _shared
        for name, value in kwargs.items():
            current = _shared.isolation.level if name == "isolation" else getattr(_shared, name)
            if (tuple(value) if name == "packages" else value) != current:
                raise ValueError(
                    f"{name}={value!r} differs from the shared executor's, {current!r}. "
                    f"Make a CodeExecutor of its own for {name}={value!r}."
                )
        return _shared
