"""Confinement of one process and its children by Landlock, seccomp and resource limits, by way of ctypes.

Knows nothing about jobs. `confine_process` is called once, in a process that may still fork; `confine_child` after each
fork, where it takes away forking and signals to others. Forbidden calls fail with an error number, they do not kill.
"""

import ctypes
import glob
import os
import platform
import resource
import struct
import sys


# Landlock (the same numbers on all architectures)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); what the standard library's pure computing, files, threads and clocks need
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "openat": (257, 56),
    "close": (3, 57),
    "close_range": (436, 436),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "uname": (63, 160),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "umask": (95, 166),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "times": (100, 153),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "capget": (125, 90),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "arch_prctl": (158, None),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getcpu": (309, 168),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getrandom": (318, 278),
    "fadvise64": (221, 223),
    "sendfile": (40, 71),
}
# Calls that change the file system by name: Landlock refuses them, and says so with the error that programs expect.
_FILES_BY_NAME = {
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "creat": (85, None),
}
# Calls whose arguments are looked at.
_CLONE, _CLONE3, _FORK, _VFORK = (56, 220), (435, 435), (57, None), (58, None)
_KILL, _TKILL, _TGKILL, _SIGQUEUE, _TGSIGQUEUE = (62, 129), (200, 130), (234, 131), (129, 138), (297, 240)
_IOCTL, _FCNTL, _PRCTL, _PRLIMIT = (16, 29), (72, 25), (157, 167), (302, 261)
_SOCKETPAIR, _SENDTO, _SECCOMP = (53, 199), (44, 206), (317, 277)
_OPEN, _OPENAT = (2, None), (257, 56)

_CLONE_THREAD = 0x00010000
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # duplicating, flags, locks, pipe size: never F_SETOWN or F_SETSIG
_O_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_ANY_PID = 0xFEEDF00D
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS = 1, 38


class _Program:
    """A seccomp filter in the making: classic BPF over the call's number and arguments."""

    def __init__(self) -> None:
        self.code: list[bytes] = []

    def emit(self, code: int, jt: int, jf: int, k: int) -> None:
        self.code.append(struct.pack("HBBI", code, jt, jf, k))

    def load(self, offset: int) -> None:
        self.emit(0x20, 0, 0, offset)

    def load_number(self) -> None:
        self.load(0)

    def load_argument(self, index: int, high: bool = False) -> None:
        self.load(16 + 8 * index + (4 if high else 0))  # both architectures are little-endian

    def ret(self, value: int) -> None:
        self.emit(0x06, 0, 0, value)

    def errno(self, number: int) -> None:
        self.ret(_ERRNO | number)

    def when(self, number: int, body: "_Program") -> None:
        """`body`, which ends in a return, for the call `number`."""
        self.emit(0x15, 0, len(body.code), number)
        self.code += body.code

    def allow_if_argument_in(self, number: int, index: int, values: tuple[int, ...], mask: int | None = None) -> None:
        body = _Program()
        body.load_argument(index)
        if mask is not None:
            body.emit(0x54, 0, 0, mask)
        for k, value in enumerate(values):
            body.emit(0x15, len(values) - k, 0, value & 0xFFFFFFFF)
        body.errno(_EPERM)
        body.ret(_ALLOW)
        self.when(number, body)

    def allow_if_bits(self, number: int, index: int, bits: int, wanted: bool) -> None:
        """Allows the call if one of `bits` is set in the argument (`wanted`) or if none is (not `wanted`)."""
        body = _Program()
        body.load_argument(index)
        body.emit(0x45, 0 if wanted else 1, 1 if wanted else 0, bits)
        body.ret(_ALLOW)
        body.errno(_EPERM)
        self.when(number, body)


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class _Filter:
    """A seccomp filter ready to be installed: what a child does costs a page copied for each thing that it touches."""

    def __init__(self, program: _Program, libc: ctypes.CDLL):
        raw = b"".join(program.code)
        place = raw.find(struct.pack("I", _ANY_PID))
        self.buffer = ctypes.create_string_buffer(raw, len(raw))
        self.place = None if place < 0 else place
        self.program = _SockFprog(len(program.code), ctypes.addressof(self.buffer))
        self.reference = ctypes.byref(self.program)
        self.number = _SECCOMP[_column()]
        self.syscall = libc.syscall

    def install(self) -> None:
        """Takes effect for this process, whose id is the one that the filter may name."""
        if self.place is not None:
            struct.pack_into("I", self.buffer, self.place, os.getpid())
        if self.syscall(self.number, 1, 0, self.reference) != 0:
            raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))


def _column() -> int:
    return {"x86_64": 0, "aarch64": 1}[platform.machine()]


class Confinement:
    """
    What a worker applies to itself and its children.

    Args:
        landlock (`bool`): Whether to guard files with Landlock.
        seccomp (`bool`): Whether to filter system calls.
        packages (`list[str]`): Folders of third-party packages that programs may import.
    """

    def __init__(self, landlock: bool, seccomp: bool, packages: list[str]):
        self.landlock = landlock
        self.seccomp = seccomp
        self.packages = packages
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.child_filter = _Filter(self._child_filter(_ANY_PID), self.libc) if seccomp else None

    def search_path(self) -> list[str]:
        """Where the packages that programs may import are found."""
        return sorted({os.path.dirname(package) for package in self.packages})

    def confine_process(self, parent: int) -> None:
        """
        Confines this process, which may go on forking, and all its future children.

        Args:
            parent (`int`): Process id of the parent, with which this process ends.

        Raises:
            OSError: If the kernel refuses.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT, FILE_SIZE_LIMIT))
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        if not sys.platform.startswith("linux"):
            return
        die_with_parent(self.libc)
        if os.getppid() != parent:
            os._exit(1)
        if not self.seccomp:
            self._prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to this process, which ends them
        _volunteer_for_the_oom_killer()
        self._prctl(4, 0)  # PR_SET_DUMPABLE: nobody reads this memory through /proc
        if self._prctl(38, 1) != 0:  # PR_SET_NO_NEW_PRIVS
            raise OSError(ctypes.get_errno(), "no_new_privs: " + os.strerror(ctypes.get_errno()))
        self._drop_capabilities()
        abi = self._restrict_files() if self.landlock else 0
        if self.seccomp:
            _Filter(self._process_filter(abi), self.libc).install()

    def limit_child(self, memory_bytes: int, cpu_seconds: int) -> None:
        """
        Sets the limits of a child's job.

        Args:
            memory_bytes (`int`): Limit of the address space in bytes.
            cpu_seconds (`int`): Limit of CPU time in seconds.

        Raises:
            OSError: If the kernel refuses.
        """
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        if sys.platform.startswith("linux"):
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def confine_child(self) -> None:
        """
        Takes from a freshly forked child what only its parent may do.

        Raises:
            OSError: If the kernel refuses.
        """
        if sys.platform.startswith("linux"):
            die_with_parent(self.libc)
        if not self.seccomp:
            os.setsid()  # children are possible then, and go with their session
        else:
            assert self.child_filter is not None
            self.child_filter.install()

    def _prctl(self, option: int, value: int) -> int:
        return _prctl(self.libc, option, value)

    def _drop_capabilities(self) -> None:
        header = struct.pack("Ii", 0x20080522, 0)
        number = (126, 91)[_column()] if platform.machine() in _AUDIT_ARCH else None
        if number is not None and self.libc.syscall(number, header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capset: " + os.strerror(ctypes.get_errno()))

    # Landlock

    def _restrict_files(self) -> int:
        abi = self.libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
        if abi < 1:
            raise OSError(ctypes.get_errno(), "Landlock: " + os.strerror(ctypes.get_errno()))
        handled = (1 << 13) - 1
        handled |= sum(bit for version, bit in ((2, 1 << 13), (3, _TRUNCATE), (5, 1 << 15)) if abi >= version)
        attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
        ruleset = self.libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "Landlock: " + os.strerror(ctypes.get_errno()))
        folders, readable = readable_paths(self.packages)
        for path in folders:
            self._allow(ruleset, path, _READ_DIR)
        for path in readable:
            self._allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
        self._allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0))
        if self.libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            raise OSError(ctypes.get_errno(), "Landlock: " + os.strerror(ctypes.get_errno()))
        os.close(ruleset)
        return abi

    def _allow(self, ruleset: int, path: str, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # what is not there needs no rule
        rule = struct.pack("=Qi", access, fd)
        if self.libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), f"Landlock rule for {path}: " + os.strerror(ctypes.get_errno()))
        os.close(fd)

    # seccomp

    def _process_filter(self, abi: int) -> _Program:
        column, program = _column(), _Program()
        program.load(4)
        program.emit(0x15, 1, 0, _AUDIT_ARCH[platform.machine()])
        program.errno(_ENOSYS)
        program.load_number()
        calls = [*_ALLOWED.values(), _CLONE, _FORK, _KILL, _TKILL, _TGKILL, _SIGQUEUE, _TGSIGQUEUE]
        if abi >= 1:
            calls += _FILES_BY_NAME.values()
        allowed = {number for number in (numbers[column] for numbers in calls) if number is not None}
        program.allow_if_argument_in(_FCNTL[column], 1, _FCNTLS)
        program.allow_if_argument_in(_IOCTL[column], 1, _IOCTLS)
        program.allow_if_argument_in(_PRLIMIT[column], 0, (0,))
        program.when(_CLONE3[column], _returning(_ERRNO | _ENOSYS))  # so that clone is used, whose flags can be seen
        if abi < 3:  # opening for truncation is not governed by early versions of Landlock, nothing is without it
            refused = os.O_TRUNC if abi else _O_WRITING
            for numbers, index in ((_OPEN, 1), (_OPENAT, 2)):
                number = numbers[column]
                if number is not None:
                    program.allow_if_bits(number, index, refused, wanted=False)
                    allowed.discard(number)
        body = _Program()  # socketpair(AF_UNIX, SOCK_STREAM): reaches nobody
        body.load_argument(0)
        body.emit(0x15, 0, 4, 1)
        body.load_argument(1)
        body.emit(0x54, 0, 0, 0xF)
        body.emit(0x15, 0, 1, 1)
        body.ret(_ALLOW)
        body.errno(_EPERM)
        program.when(_SOCKETPAIR[column], body)
        body = _Program()  # sendto without an address: to the peer of a pair
        body.load_argument(4)
        body.emit(0x15, 0, 3, 0)
        body.load_argument(4, high=True)
        body.emit(0x15, 0, 1, 0)
        body.ret(_ALLOW)
        body.errno(_EPERM)
        program.when(_SENDTO[column], body)
        body = _Program()  # the death signal and nothing weaker; the thread's name
        body.load_argument(0)
        body.emit(0x15, 5, 0, 15)
        body.emit(0x15, 4, 0, 16)
        body.emit(0x15, 0, 2, 1)
        body.load_argument(1)
        body.emit(0x15, 1, 0, 9)
        body.errno(_EPERM)
        body.ret(_ALLOW)
        program.when(_PRCTL[column], body)
        body = _Program()  # one more filter, without flags
        body.load_argument(0)
        body.emit(0x15, 0, 3, 1)
        body.load_argument(1)
        body.emit(0x15, 0, 1, 0)
        body.ret(_ALLOW)
        body.errno(_EPERM)
        program.when(_SECCOMP[column], body)
        for first, last in _ranges(sorted(allowed)):
            if first == last:
                program.emit(0x15, 0, 1, first)
            else:
                program.emit(0x35, 0, 2, first)
                program.emit(0x25, 1, 0, last)
            program.ret(_ALLOW)
        program.errno(_EPERM)
        return program

    def _child_filter(self, pid: int) -> _Program:
        column, program = _column(), _Program()
        program.load_number()
        body = _Program()  # threads, not processes
        body.load_argument(0)
        body.emit(0x45, 0, 1, _CLONE_THREAD)
        body.ret(_ALLOW)
        body.errno(_EPERM)
        program.when(_CLONE[column], body)
        signals = [numbers[column] for numbers in (_KILL, _TKILL, _TGKILL, _SIGQUEUE, _TGSIGQUEUE)]
        refused = [number for number in (_FORK[column], _SECCOMP[column]) if number is not None]
        # one block: signals only to oneself
        for k, number in enumerate(signals):
            program.emit(0x15, len(signals) - k + len(refused), 0, number)
        for k, fork_or_filter in enumerate(refused):
            program.emit(0x15, len(refused) - k + 2, 0, fork_or_filter)
        program.ret(_ALLOW)
        program.load_argument(0)
        program.emit(0x15, 1, 0, pid)
        program.errno(_EPERM)
        program.ret(_ALLOW)
        return program


FILE_SIZE_LIMIT = 16 << 20  # bytes that a program may write to the file it is given for its output


def readable_paths(packages: list[str]) -> tuple[list[str], list[str]]:
    """
    What a program may read: the standard library, shared libraries, time zones, and the given packages.

    Args:
        packages (`list[str]`): Folders of third-party packages.

    Returns:
        `tuple[list[str], list[str]]`: folders that may be listed (with all below them), and files and folders that may
        be read. Installed packages, among which test data may lie, are readable only if named.
    """
    library = os.path.dirname(os.__file__)
    folders = [library, *{os.path.dirname(package) for package in packages}]
    readable = [
        os.path.join(library, name) for name in os.listdir(library) if name not in ("site-packages", "dist-packages")
    ]
    zipped = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    readable.append(zipped)
    machine = platform.machine()
    for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", os.path.join(sys.base_prefix, "lib")):
        readable += [*glob.glob(os.path.join(folder, "lib*.so*")), os.path.join(folder, f"{machine}-linux-gnu")]
    readable += ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom", "/dev/random", "/dev/zero"]
    return folders, readable + packages


_ZERO, _SIGKILL = ctypes.c_ulong(0), ctypes.c_ulong(9)


def die_with_parent(libc: ctypes.CDLL) -> None:
    """Has the kernel kill this process when the thread that made it ends (Linux only)."""
    libc.prctl(1, _SIGKILL, _ZERO, _ZERO, _ZERO)  # PR_SET_PDEATHSIG


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> int:
    return libc.prctl(option, ctypes.c_ulong(value), _ZERO, _ZERO, _ZERO)


def _volunteer_for_the_oom_killer() -> None:
    """Where memory runs out, programs go first."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("900")
    except OSError:
        pass  # without /proc the kernel chooses by size alone


def _returning(value: int) -> _Program:
    program = _Program()
    program.ret(value)
    return program


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
