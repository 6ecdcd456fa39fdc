"""Resource limits of programs, and checks that the limits of this process allow them."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Optional


FILE_SIZE = 16 << 20  # bytes that a program may write to one file: its output, or a file in its scratch folder
OPEN_FILES, LEAST_OPEN_FILES = 128, 32
SIGNALS = 64  # pending signals, which the kernel counts over all processes of a user
JUDGE_MEMORY_MB = 2048
MOST_CPU_SECONDS = 10**9
WALL_CLOCK = 10  # seconds of wall-clock time that a job may take for each second of CPU time
LEAST_SHARE = 0.04  # of a processor, which a program gets on a busy machine; one that uses less waits


def cpu_seconds(timeout: float) -> int:
    """The kernel's limit of one process's CPU time in whole seconds, which ends it if its worker does not."""
    return int(min(timeout, MOST_CPU_SECONDS)) + 1


class Allowance:
    """
    The time that a job or a test may take: seconds of CPU time, so that a busy machine ends no program that is right.

    Time is also up for programs that wait: after as many seconds of wall-clock time, if in the last half of them less than
    `LEAST_SHARE` of a processor was used, and after `WALL_CLOCK` times as many in any case.

    Args:
        seconds (`float`): The CPU time, in seconds.
        spent (`Callable[[], float]`): Returns the CPU time that the job has used so far, in seconds.
        whole (`Allowance`, *optional*): That of the job, of which this one is a part.

    Attributes:
        look (`float`): When to ask `is_used_up` next, in seconds on the monotonic clock.
    """

    def __init__(self, seconds: float, spent: Callable[[], float], whole: Optional["Allowance"] = None):
        self.seconds, self.spent, self.whole = seconds, spent, whole
        self.begin = self.moved = time.monotonic()
        self.first = self.last = spent()
        self.look = self._soonest(self.begin + seconds / 2)

    @property
    def left(self) -> float:
        """What is left of the CPU time, in seconds."""
        return self.seconds - (self.spent() - self.first)

    def is_used_up(self) -> bool:
        if self.whole is not None and self.whole.is_used_up():
            return True
        now, spent = time.monotonic(), self.spent()
        left = self.seconds - (spent - self.first)
        if now - self.moved >= self.seconds / 2 and spent - self.last >= LEAST_SHARE * (now - self.moved):
            self.last, self.moved = spent, now
        waited = max(self.moved + self.seconds / 2, self.begin + self.seconds)
        end = self.begin + WALL_CLOCK * self.seconds
        self.look = self._soonest(now + max(left, 0.01), waited, end)
        return left <= 0 or now >= min(waited, end)

    def _soonest(self, *times: float) -> float:
        return min(times) if self.whole is None else min(*times, self.whole.look)


def check(memory_mb: int = 0, timeout: float = 0.0) -> None:
    """
    Says which hard limit of this process is too low for programs, and what to do.

    Args:
        memory_mb (`int`, *optional*, defaults to `0`): Address space of a program in MiB.
        timeout (`float`, *optional*, defaults to `0.0`): Limit of a job's CPU time in seconds.

    Returns:
        `str` or `None`: The reason, or `None` if all limits are high enough.
    """
    for which, name, option, least, unit in (
        (resource.RLIMIT_NOFILE, "open files", "n", LEAST_OPEN_FILES, ""),
        (resource.RLIMIT_FSIZE, "file size", "f", FILE_SIZE, " bytes"),
    ):
        if _hard(which) < least:
            raise ValueError(
                f"the hard limit on {name} is {_hard(which)}{unit} and programs need {least}. Raise it (ulimit -H{option})."
            )
    memory, cpu, needed = _hard(resource.RLIMIT_AS), _hard(resource.RLIMIT_CPU), cpu_seconds(timeout) + 1
    if memory < memory_mb << 20:
        raise ValueError(
            f"memory_mb={memory_mb} is more than the hard limit on this process's address space, {memory >> 20} MiB. "
            f"Set memory_mb to at most {memory >> 20}, or raise the limit (ulimit -Hv)."
        )
    if cpu < needed:
        raise ValueError(
            f"timeout={timeout:g} needs {needed} s of CPU time, and this process's hard limit on CPU time is {cpu} s. "
            "Set a shorter timeout, or raise the limit (ulimit -Ht)."
        )


def limit_process() -> None:
    """
    Sets the limits that all programs share.

    Raises:
        OSError: If an inherited hard limit is too low.
    """
    check()
    wanted = [("CORE", 0), ("FSIZE", FILE_SIZE), ("NOFILE", OPEN_FILES)]
    if sys.platform.startswith("linux"):
        wanted += [("MEMLOCK", 0), ("MSGQUEUE", 0), ("SIGPENDING", SIGNALS)]
    for name, value in wanted:
        which = getattr(resource, f"RLIMIT_{name}")
        value = min(value, _hard(which))
        resource.setrlimit(which, (value, value))


def limit_job(memory_bytes: int, cpu_seconds: int) -> None:
    """
    Sets the limits of this process that differ between jobs. They do not exceed its hard limits.

    Args:
        memory_bytes (`int`): Limit of the address space in bytes.
        cpu_seconds (`int`): Limit of CPU time in seconds.
    """
    most = _hard(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_seconds, most), min(cpu_seconds + 1, most)))
    if sys.platform.startswith("linux"):
        memory = min(memory_bytes, _hard(resource.RLIMIT_AS))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _hard(which: int) -> int:
    hard = resource.getrlimit(which)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
