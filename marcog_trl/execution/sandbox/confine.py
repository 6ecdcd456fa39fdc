"""Confines a process and its children with Landlock, seccomp, resource limits and mounts, through ctypes.

`confine_process` is called once, in a process that may fork. `confine_child` is called after each fork; it forbids the child
to fork and to signal other processes.
"""

import ctypes
import glob
import os
import platform
import struct
import sys

from . import limits, syscalls
from .seccomp import ANY_PID, Filter, Instructions, child_filter, process_filter, thread_filter


# Landlock: the same numbers on all architectures
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM, _REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12, 1 << 13
_SCRATCH = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM
# Mounting
MOST_BYTES, MOST_FILES = 64 << 20, 1024  # bytes in total, files and folders in total
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_MOUNT_SETATTR = 442  # the system call, on all architectures
_NOATIME, _ATIME_BITS, _SLAVE, _RECURSIVE = 0x10, 0x70, 0x80000, 0x8000
_MOUNT_FLAGS = 0xE  # MS_NOSUID | MS_NODEV | MS_NOEXEC


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
        self.child_filter = self._filter(child_filter(self.machine, ANY_PID)) if seccomp else None

    def confine_process(self, parent: int) -> int | None:
        """
        Confines this process, which may still fork, and all its future children, except for `filter_calls`.

        Returns:
            `int` or `None`: The descriptor on which the kernel asks before a thread is made; `None` if it does not ask.
        """
        limits.limit_process()
        if not sys.platform.startswith("linux"):
            return None
        die_with_parent(self.libc)
        if os.getppid() != parent:
            os._exit(1)
        if not self.seccomp:
            self._prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, which ends them
        _volunteer_for_the_oom_killer()
        self._prctl(4, 0)  # PR_SET_DUMPABLE: other processes cannot read this memory through /proc
        if self._prctl(38, 1) != 0:  # PR_SET_NO_NEW_PRIVS
            raise _error("no_new_privs")
        self._drop_capabilities()
        self.abi = self._restrict_files() if self.landlock else 0
        return self._listen_for_threads() if self.seccomp else None

    def filter_calls(self) -> None:
        """Filters the system calls of this process and its future children. After this, it cannot send descriptors."""
        if self.seccomp:
            self._filter(process_filter(self.machine, self.abi, self.folder is not None)).install()

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
            return self._filter(thread_filter(self.machine)).install(listen=True)
        except OSError:
            return None  # an old kernel, or an inherited filter that already has a listener

    def _restrict_files(self) -> int:
        """Restricts this process and its future children to files that programs may use; returns the version of Landlock."""
        abi = self.libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
        if abi < 1:
            raise _error("Landlock")
        handled = (1 << 13) - 1
        handled |= sum(bit for version, bit in ((2, _REFER), (3, _TRUNCATE), (5, 1 << 15)) if abi >= version)
        attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
        rules = self.libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        if rules < 0:
            raise _error("Landlock")
        for path in (*readable_paths(), *self.readable):
            self._allow(rules, path, (_READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)) & handled)
        self._allow(rules, os.devnull, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
        if self.folder is not None:  # everything except executing files and making devices, pipes and sockets
            self._allow(rules, self.folder, (_SCRATCH | _TRUNCATE | _REFER) & handled)
        if self.libc.syscall(_RESTRICT_SELF, rules, 0) != 0:
            raise _error("Landlock")
        os.close(rules)
        return abi

    def _allow(self, rules: int, path: str, access: int) -> None:
        """Adds a rule for a file, or a folder and everything in it. One that the kernel refuses is left out, unless `strict`."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # a missing file needs no rule
        try:
            if self.libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, struct.pack("=Qi", access, fd), 0) != 0:
                if self.strict:
                    raise _error(f"Landlock rule for {path}")
                self.left_out.append(path)
        finally:
            os.close(fd)

    def _prctl(self, option: int, value: int) -> int:
        return self.libc.prctl(option, ctypes.c_ulong(value), _ZERO, _ZERO, _ZERO)

    def _drop_capabilities(self) -> None:
        header = struct.pack("Ii", 0x20080522, 0)
        column = syscalls.COLUMNS.get(self.machine)
        number = None if column is None else (126, 91)[column]
        if number is not None and self.libc.syscall(number, header, bytes(24)) != 0:
            raise _error("capset")


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


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def readable_paths() -> list[str]:
    """Paths that every program may read: the standard library, shared libraries, time zones, `/dev/zero` and `/dev/random`.
    Installed packages are not among them, because they may contain test data."""
    library = os.path.dirname(os.__file__)
    readable = [
        os.path.join(library, name) for name in os.listdir(library) if name not in ("site-packages", "dist-packages")
    ]
    zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    readable.append(zipped)
    machine = platform.machine()
    for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", os.path.join(sys.base_prefix, "lib")):
        readable += [*glob.glob(os.path.join(folder, "lib*.so*")), os.path.join(folder, f"{machine}-linux-gnu")]
    return [*readable, "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom", "/dev/random", "/dev/zero"]


def keep_access_times() -> None:
    """Stops reading from changing when a file was last read, which other programs could see. Without the right to mount, the
    kernel may still change it, by default at most once a day for each file."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("QQQQ", _NOATIME, _ATIME_BITS, _SLAVE, 0)
    if libc.unshare(_NEWNS) == 0:
        libc.syscall(_MOUNT_SETATTR, -100, b"/", _RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def mount(folder: str) -> bool:
    """Mounts a file system in memory on the folder, for this process and its children; returns `False` if that fails."""
    pid = os.fork()  # tries it first in another process, because a failure may leave its process half changed
    if pid == 0:
        os._exit(0 if _mount(folder) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and _mount(folder)


def _mount(folder: str) -> bool:
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(_NEWNS) != 0:
        if libc.unshare(_NEWNS | _NEWUSER) != 0:
            return False
        try:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:
            return False
    options = f"size={MOST_BYTES},nr_inodes={MOST_FILES},mode=700".encode()
    return (
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None) == 0
        and libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(_MOUNT_FLAGS), options) == 0
    )
