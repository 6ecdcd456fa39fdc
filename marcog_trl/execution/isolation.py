"""The kernel's means of confining programs, and those that an isolation level needs."""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .sandbox.syscalls import COLUMNS, SECCOMP


IsolationLevel = Literal["strict", "best_effort", "none"]
ISOLATION_LEVELS = ("strict", "best_effort", "none")

_SYS_LANDLOCK_CREATE_RULESET = 444  # the same on x86_64 and aarch64
_LANDLOCK_CREATE_RULESET_VERSION = 1
_SECCOMP_GET_ACTION_AVAIL = 2
_SECCOMP_RET_ERRNO = 0x00050000


class IsolationError(RuntimeError, ValueError):
    """The kernel lacks what `isolation="strict"` needs. A `RuntimeError` about the machine, and a `ValueError` about the
    setting."""


@dataclass(frozen=True)
class Isolation:
    """
    The confinement that is really active around the programs, beside limits on memory, CPU time, file size and descriptors.

    Attributes:
        level (`str`): The requested level: `"strict"`, `"best_effort"` or `"none"`.
        landlock_abi (`int`): Version of the kernel's Landlock, which guards files; 0 if it is missing or not used.
        seccomp (`bool`): Whether system calls are filtered.
    """

    level: IsolationLevel
    landlock_abi: int
    seccomp: bool

    @property
    def tier(self) -> str:
        """`"confined"` (files and system calls), `"partial"` (one of them) or `"limits"` (neither)."""
        if self.landlock_abi and self.seccomp:
            return "confined"
        return "partial" if self.landlock_abi or self.seccomp else "limits"

    def __str__(self) -> str:
        landlock = f"Landlock ABI {self.landlock_abi}" if self.landlock_abi else "no Landlock"
        seccomp = "seccomp" if self.seccomp else "no seccomp"
        return f"{self.tier} ({landlock}, {seccomp}, resource limits; asked for {self.level})"


@lru_cache(maxsize=1)
def probe() -> tuple[int, bool]:
    """
    Asks the kernel what it offers, without changing anything.

    Returns:
        `tuple[int, bool]`: Landlock's ABI version (0 if it is missing), and whether seccomp filters are available.
    """
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in COLUMNS:
        return 0, False
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    action = ctypes.c_uint32(_SECCOMP_RET_ERRNO)
    seccomp = libc.syscall(SECCOMP[COLUMNS[machine]], _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0
    return max(abi, 0), seccomp


def resolve(level: IsolationLevel) -> Isolation:
    """
    Finds what a level means on this machine.

    Args:
        level (`str`): `"strict"`, `"best_effort"` or `"none"`.

    Returns:
        `Isolation`: What will be active.

    Raises:
        ValueError: If the level is unknown.
        IsolationError: If the level is `"strict"` and the kernel lacks Landlock or seccomp.
    """
    if level not in ISOLATION_LEVELS:
        raise ValueError(f"isolation={level!r} must be one of {', '.join(ISOLATION_LEVELS)}.")
    if level == "none":
        return Isolation(level="none", landlock_abi=0, seccomp=False)
    abi, seccomp = probe()
    if level == "strict" and not (abi and seccomp):
        raise IsolationError(refusal(abi, seccomp))
    return Isolation(level=level, landlock_abi=abi, seccomp=seccomp)


def refusal(abi: int, seccomp: bool) -> str:
    """Says what `isolation="strict"` lacks here, and what to do."""
    missing, advice = [], []
    if not sys.platform.startswith("linux") or platform.machine() not in COLUMNS:
        missing.append(f"Linux on x86_64 or aarch64 (this is {sys.platform} on {platform.machine()})")
        advice.append("Run inside a Linux virtual machine or container")
    else:
        if not abi:
            missing.append("Landlock, which guards files")
            advice.append(
                "Use Linux 5.13 or later with 'landlock' among the boot parameter lsm=, and in a container a seccomp "
                f"profile that allows landlock_create_ruleset (kernel here: {os.uname().release})"
            )
        if not seccomp:
            missing.append("seccomp filters, which refuse system calls")
            advice.append("Use a kernel with CONFIG_SECCOMP_FILTER")
    return (
        f"isolation='strict' is not possible here: missing {' and '.join(missing)}. {'. '.join(advice)}. "
        "Or set isolation='best_effort' (--isolation best_effort) to use what the kernel offers."
    )
