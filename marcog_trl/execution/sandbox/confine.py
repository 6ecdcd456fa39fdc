"""Confines a process and its children with Landlock, seccomp and resource limits, through ctypes.

`confine_process` is called once, in a process that may fork. `confine_child` is called after each fork; it forbids the child
to fork and to signal other processes.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable

from . import limits, seccomp, syscalls
from .landlock import Ruleset, readable_paths
from .seccomp import ANY_PID, Filter, Instructions


class Confinement:
    """
    The confinement of a zygote and its children.

    Args:
        landlock (`bool`): Whether to guard files with Landlock.
        seccomp (`bool`): Whether to filter system calls.
        strict (`bool`): Whether to raise an error if the kernel refuses one of Landlock's rules.
        readable (`list[str]`): Files and folders of installed packages that programs may read.
        folder (`str`, *optional*): The scratch folder of programs; `None` if they have none.

    Attributes:
        left_out (`list[str]`): Paths that programs cannot read because the kernel refused the rule.
    """

    def __init__(self, landlock: bool, seccomp: bool, strict: bool, readable: list[str], folder: str | None = None):
        self.landlock = landlock
        self.seccomp = seccomp
        self.strict = strict
        self.readable = readable
        self.folder = folder
        self.left_out: list[str] = []
        self.machine = platform.machine()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.child_filter = self._filter(_child_filter(self.machine)) if seccomp else None

    def confine_process(self, parent: int, hand_over: Callable[[int | None], None]) -> None:
        """
        Confines this process, which may still fork, and all its future children.

        Args:
            parent (`int`): Process id of the parent. This process ends when the parent does.
            hand_over (`Callable[[int | None], None]`):
                Takes the descriptor on which the kernel asks before a thread is made; `None` if the kernel does not ask.

        Raises:
            OSError: If the kernel refuses, or if an inherited limit is too low.
        """
        limits.limit_process()
        self.job_limits = limits.JobLimits()
        if not sys.platform.startswith("linux"):
            hand_over(None)
            return
        die_with_parent(self.libc)
        if os.getppid() != parent:
            os._exit(1)
        if not self.seccomp:
            self._prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, which ends them
        _volunteer_for_the_oom_killer()
        self._prctl(4, 0)  # PR_SET_DUMPABLE: other processes cannot read this memory through /proc
        if self._prctl(38, 1) != 0:  # PR_SET_NO_NEW_PRIVS
            raise OSError(ctypes.get_errno(), "no_new_privs: " + os.strerror(ctypes.get_errno()))
        self._drop_capabilities()
        abi = self._restrict_files() if self.landlock else 0
        hand_over(self._listen_for_threads() if self.seccomp else None)
        if self.seccomp:
            self._filter(seccomp.process_filter(self.machine, abi, self.folder is not None)).install()

    def confine_child(self) -> None:
        """
        Forbids a freshly forked child what only its parent may do.

        Raises:
            OSError: If the kernel refuses.
        """
        if sys.platform.startswith("linux"):
            die_with_parent(self.libc)
        if self.child_filter is None:
            os.setsid()  # the program can fork then, and its children are killed with the session
        else:
            self.child_filter.install()

    def _filter(self, instructions: Instructions) -> Filter:
        return Filter(instructions, self.machine, self.libc)

    def _listen_for_threads(self) -> int | None:
        try:
            return self._filter(seccomp.thread_filter(self.machine)).install(listen=True)
        except OSError:
            return None  # an old kernel, or an inherited filter that already has a listener

    def _restrict_files(self) -> int:
        rules = Ruleset(self.libc, self.strict)
        for path in [*readable_paths(), *self.readable]:
            rules.read(path)
        rules.write(os.devnull)
        if self.folder is not None:
            rules.use(self.folder)
        rules.restrict()
        self.left_out = rules.left_out
        return rules.abi

    def _prctl(self, option: int, value: int) -> int:
        return self.libc.prctl(option, ctypes.c_ulong(value), _ZERO, _ZERO, _ZERO)

    def _drop_capabilities(self) -> None:
        header = struct.pack("Ii", 0x20080522, 0)
        column = syscalls.COLUMNS.get(self.machine)
        number = None if column is None else (126, 91)[column]
        if number is not None and self.libc.syscall(number, header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capset: " + os.strerror(ctypes.get_errno()))


def _child_filter(machine: str) -> Instructions:
    return seccomp.child_filter(machine, ANY_PID)


_ZERO, _SIGKILL = ctypes.c_ulong(0), ctypes.c_ulong(9)


def die_with_parent(libc: ctypes.CDLL) -> None:
    """Has the kernel kill this process when the thread that started it ends (Linux only)."""
    libc.prctl(1, _SIGKILL, _ZERO, _ZERO, _ZERO)  # PR_SET_PDEATHSIG


def _volunteer_for_the_oom_killer() -> None:
    """Has the kernel kill this process and its children first if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("900")
    except OSError:
        pass  # without /proc, the kernel chooses by size
