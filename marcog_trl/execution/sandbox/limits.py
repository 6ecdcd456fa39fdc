"""Resource limits of programs, and checks that the limits of this process allow them."""

import resource
import sys


FILE_SIZE = 16 << 20  # bytes that a program may write to one file: its output, or a file in its scratch folder
OPEN_FILES, LEAST_OPEN_FILES = 128, 32
SIGNALS = 64  # pending signals, which the kernel counts over all processes of a user
JUDGE_MEMORY_MB = 2048
MOST_CPU_SECONDS = 10**9


def cpu_seconds(timeout: float) -> int:
    """Limit of a program's CPU time in seconds, for a wall-clock limit of `timeout` seconds."""
    return int(min(timeout, MOST_CPU_SECONDS)) + 1


def too_low() -> str | None:
    """Says which hard limit of this process is too low for any program, and what to do; `None` if all are high enough."""
    for which, name, option, least, unit in (
        (resource.RLIMIT_NOFILE, "open files", "n", LEAST_OPEN_FILES, ""),
        (resource.RLIMIT_FSIZE, "file size", "f", FILE_SIZE, " bytes"),
    ):
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY and hard < least:
            return f"the hard limit on {name} is {hard}{unit} and programs need {least}. Raise it (ulimit -H{option})."
    return None


def too_low_for_memory(memory_mb: int) -> str | None:
    """Says so, and what to do, if the hard limit on address space is below `memory_mb` MiB; otherwise `None`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard >= memory_mb << 20:
        return None
    return (
        f"memory_mb={memory_mb} is more than the hard limit on this process's address space, {hard >> 20} MiB. "
        f"Set memory_mb to at most {hard >> 20}, or raise the limit (ulimit -Hv)."
    )


def too_low_for_time(timeout: float) -> str | None:
    """Says so, and what to do, if the hard limit on CPU time is too low for `timeout` seconds; otherwise `None`."""
    hard, needed = resource.getrlimit(resource.RLIMIT_CPU)[1], cpu_seconds(timeout) + 1
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return None
    return (
        f"timeout={timeout:g} needs {needed} s of CPU time, and this process's hard limit on CPU time is {hard} s. "
        "Set a shorter timeout, or raise the limit (ulimit -Ht)."
    )


def limit_process() -> None:
    """
    Sets the limits that all programs share.

    Raises:
        OSError: If an inherited hard limit is too low.
    """
    problem = too_low()
    if problem is not None:
        raise OSError(problem)
    wanted = [("CORE", 0), ("FSIZE", FILE_SIZE), ("NOFILE", OPEN_FILES)]
    if sys.platform.startswith("linux"):
        wanted += [("MEMLOCK", 0), ("MSGQUEUE", 0), ("SIGPENDING", SIGNALS)]
    for name, value in wanted:
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


class JobLimits:
    """The limits that differ between jobs. They never exceed the hard limits at the time of construction."""

    def __init__(self) -> None:
        self.memory = _hard(resource.RLIMIT_AS)
        self.cpu = _hard(resource.RLIMIT_CPU)

    def apply(self, memory_bytes: int, cpu_seconds: int) -> None:
        """
        Sets the limits of this process.

        Args:
            memory_bytes (`int`): Limit of the address space in bytes.
            cpu_seconds (`int`): Limit of CPU time in seconds.
        """
        soft, hard = min(cpu_seconds, self.cpu), min(cpu_seconds + 1, self.cpu)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        if sys.platform.startswith("linux"):
            memory = min(memory_bytes, self.memory)
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _hard(which: int) -> int:
    hard = resource.getrlimit(which)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
