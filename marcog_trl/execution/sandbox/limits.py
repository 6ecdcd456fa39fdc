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


def check(memory_mb: int = 0, timeout: float = 0.0) -> None:
    """
    Says which hard limit of this process is too low for programs, and what to do.

    Args:
        memory_mb (`int`, *optional*, defaults to `0`): Address space of a program in MiB.
        timeout (`float`, *optional*, defaults to `0.0`): Wall-clock limit of a program in seconds.

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
