"""The system calls that programs may make, each group with its reason, as numbers of x86_64 and aarch64.

A call is listed because CPython, numpy or threads need it, or because many programs use it and it reaches nothing outside
their process. `None` means that an architecture does not have the call. Calls that are not listed are refused. `seccomp.py`
makes filters from these tables.
"""

from typing import Any


Numbers = tuple[int | None, int | None]  # (x86_64, aarch64)

COLUMNS = {"x86_64": 0, "aarch64": 1}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

ALLOWED: dict[str, Numbers] = {
    # Reading and writing open files: the standard streams, the channel to the worker, modules that are imported
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),  # with writev: how musl reads and writes, and how glibc prints that it aborts
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "lseek": (8, 62),
    "close": (3, 57),
    "close_range": (436, 436),
    "fstat": (5, 80),
    "ftruncate": (77, 46),  # files that are open for writing: the output of a script, files in the scratch folder
    "getdents64": (217, 61),  # lists open folders, for imports
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    # Memory: the interpreter's allocators, numpy's arrays, module mmap
    "brk": (12, 214),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "msync": (26, 227),
    # Threads and locks
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "gettid": (186, 178),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),  # for the zygote, which waits for its children; programs have none
    # Signals of the process itself: module signal, faulthandler, time limits that programs set for themselves
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),  # by which the kernel resumes interrupted calls
    "pause": (34, None),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # Time and sleeping
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    # Waiting for pipes and socket pairs of the process: module select, loop of asyncio
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),  # how children receive the descriptors of a job
    "getsockname": (51, 204),  # how a socket object learns what its descriptor is
    # What a process may know about itself and the machine
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getcwd": (79, 17),
    "umask": (95, 166),  # only of this process, and invisible to others
    "uname": (63, 160),  # module platform
    "sysinfo": (99, 179),  # memory of the machine, which qsort of glibc asks for
    "getrandom": (318, 278),
}

# Opening is allowed, and controlled by Landlock. Without Landlock, and with early versions, the filter checks some flags.
OPENING: dict[str, Numbers] = {"open": (2, None), "openat": (257, 56)}
# Calls that change the file system by name. Landlock refuses them with the error that programs expect.
CHANGING_FILES: dict[str, Numbers] = {
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
# Calls that ask about files by name. Landlock does not control them, so they would also tell about files that may not be
# read. Only programs with a scratch folder may make them; for others, no such file exists.
LOOKING_AT_FILES: dict[str, Numbers] = {
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
}
CHANGING_FOLDER: dict[str, Numbers] = {"chdir": (80, 49)}
# What else programs with a scratch folder need: sqlite writes through to the disk
WRITING_THROUGH: dict[str, Numbers] = {"fsync": (74, 82), "fdatasync": (75, 83), "fchdir": (81, 50)}

CLONE, CLONE3, FORK = (56, 220), (435, 435), (57, None)
KILL, TKILL, TGKILL = (62, 129), (200, 130), (234, 131)
SECCOMP, PRCTL, SCHED_GETAFFINITY = (317, 277), (157, 167), (204, 123)

# Calls that are allowed if their arguments pass all checks. A check is the index of an argument (and a half: its upper 32
# bits), what to check, and a value: "in" a tuple, "most" a number, "any" or "none" of the bits
Checks = tuple[tuple[float, str, Any], ...]
_FCNTLS = (0, 1, 2, 3, 4, 1030)  # duplicating, and flags of the process's own descriptors; not owners, leases or seals
FCNTL: tuple[Numbers, Checks] = ((72, 25), ((1, "in", _FCNTLS),))
# other processes see locks, so only programs with a scratch folder may take them, as sqlite must
FCNTL_WITH_LOCKS: tuple[Numbers, Checks] = ((72, 25), ((1, "in", (*_FCNTLS, 5, 6, 7)),))
_CLOCK: Checks = ((0, "most", 11),)  # clocks of the system and of this process; those of others have negative numbers
CHECKED: tuple[tuple[Numbers, Checks], ...] = (
    # ioctl: TCGETS (is this a terminal?), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    ((16, 29), ((1, "in", (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),)),
    ((302, 261), ((0, "in", (0,)),)),  # prlimit64: limits of this process only, which can only be lowered
    # madvise: what allocators tell about their memory; nothing that empties the page cache, which all processes share
    ((28, 233), ((2, "in", (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)),)),
    ((228, 113), _CLOCK),  # clock_gettime
    ((229, 114), _CLOCK),  # clock_getres
    ((230, 115), _CLOCK),  # clock_nanosleep
    # socketpair: AF_UNIX and SOCK_STREAM, with flags, which reaches no other process
    ((53, 199), ((0, "in", (1,)), (1, "in", (1, 0o4001, 0o2000001, 0o2004001)))),
    # sendto: without an address, to the other end of a pair, and without urgent bytes, which `recv` leaves unread
    ((44, 206), ((4, "in", (0,)), (4.5, "in", (0,)), (3, "none", 1))),
    # getsockopt: SO_TYPE, SO_ERROR, SO_PROTOCOL, SO_DOMAIN, by which a socket object learns what its descriptor is
    ((55, 209), ((1, "in", (1,)), (2, "in", (3, 4, 38, 39)))),
    (SECCOMP, ((0, "in", (1,)), (1, "in", (0,)))),  # one more filter
)
