"""What the isolation levels promise, when they are refused, and what the filters of system calls decide on both architectures."""

import os
import struct
import subprocess
import sys

import pytest

from marcog_trl.execution import CodeExecutor, Job, isolation
from marcog_trl.execution.sandbox import seccomp, syscalls


def test_the_tier_is_told():
    here = isolation.resolve("best_effort")
    assert here.level == "best_effort" and (here.landlock_abi > 0, here.seccomp) == (
        isolation.probe()[0] > 0,
        isolation.probe()[1],
    )
    assert str(isolation.Isolation("strict", 7, True)).startswith("confined (Landlock ABI 7, seccomp")
    assert isolation.Isolation("best_effort", 0, True).tier == "partial"
    assert isolation.resolve("none").tier == "limits"


@pytest.mark.parametrize(
    ("found", "missing"), [((0, True), "Landlock"), ((5, False), "seccomp"), ((0, False), "Landlock")]
)
def test_strict_refuses_and_says_what_is_missing(monkeypatch, found, missing):
    monkeypatch.setattr(isolation, "probe", lambda: found)
    with pytest.raises(RuntimeError, match=f"missing {missing}.*best_effort") as refused:
        CodeExecutor(isolation="strict")
    assert isinstance(refused.value, ValueError)  # what commands say in one line
    with pytest.warns(UserWarning, match="incomplete confinement"):
        assert CodeExecutor(isolation="best_effort").isolation.tier != "confined"


def test_strict_names_other_systems(monkeypatch):
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    isolation.probe.cache_clear()
    with pytest.raises(RuntimeError, match="Linux on x86_64 or aarch64"):
        CodeExecutor()
    monkeypatch.undo()
    isolation.probe.cache_clear()


def test_unknown_level():
    with pytest.raises(ValueError, match="isolation='docker'"):
        CodeExecutor(isolation="docker")


@pytest.mark.filterwarnings("ignore:programs run with incomplete confinement")
@pytest.mark.parametrize("tier", ["seccomp", "landlock", "nothing"])
def test_lesser_tiers_run_and_leave_no_processes(monkeypatch, tier):
    """If programs can start processes, these end with the job."""
    abi, seccomp = isolation.probe()
    found = {"seccomp": (0, seccomp), "landlock": (abi, False), "nothing": (0, False)}[tier]
    monkeypatch.setattr(isolation, "probe", lambda: found)
    orphan = (
        "import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            try: os.execv('/bin/sleep', ['marcog-orphan', '60'])\n            except OSError: time.sleep(60)\n"
        "        os._exit(0)\n    os.wait()\nexcept OSError: pass\ndef add(a, b): return a + b"
    )
    tests = ["assert add(1, 2) == 3", "assert abs(add(1, 2)) == 3"]
    with CodeExecutor(num_workers=1, isolation="best_effort", timeout=5) as executor:
        assert (
            executor.run([Job(code=orphan, tests=tests)] * 2 + [Job(code=orphan, tests=tests[:1])])[0].status
            == "passed"
        )
        executor.run([Job(code="def add(a, b): return a + b", tests=tests)])
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "marcog-orphan" not in left


X86 = {"read": 0, "clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "tgkill": 234, "socket": 41, "connect": 42,
       "socketpair": 53, "sendto": 44, "sendmsg": 46, "ptrace": 101, "memfd_create": 319, "shmget": 29, "chmod": 90, "fcntl": 72,
       "ioctl": 16, "prctl": 157, "prlimit64": 302, "openat": 257, "mount": 165, "io_uring_setup": 425, "process_vm_readv": 310,
       "seccomp": 317, "unlink": 87, "setns": 308, "mmap": 9, "pidfd_send_signal": 424, "utimensat": 280}  # fmt: skip
ARM = {"read": 63, "clone": 220, "clone3": 435, "execve": 221, "kill": 129, "tgkill": 131, "socket": 198, "connect": 203,
       "socketpair": 199, "sendto": 206, "sendmsg": 211, "ptrace": 117, "memfd_create": 279, "shmget": 194, "fchmodat": 53, "fcntl": 25,
       "ioctl": 29, "prctl": 167, "prlimit64": 261, "openat": 56, "mount": 40, "io_uring_setup": 425, "process_vm_readv": 270,
       "seccomp": 277, "unlinkat": 35, "setns": 268, "mmap": 222, "pidfd_send_signal": 424, "utimensat": 88}  # fmt: skip
X86 |= {"stat": 4, "lstat": 6, "newfstatat": 262, "statx": 332, "access": 21, "readlink": 89, "chdir": 80, "setsockopt": 54, "getsockopt": 55,
        "getpeername": 52, "clock_gettime": 228, "clock_nanosleep": 230, "sched_getaffinity": 204, "sched_getparam": 143, "getpgid": 121,
        "getsid": 124, "capget": 125, "fadvise64": 221, "madvise": 28, "mincore": 27, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "statfs": 137, "timerfd_create": 283, "sendfile": 40, "fsync": 74, "open": 2}  # fmt: skip
ARM |= {"newfstatat": 79, "statx": 291, "faccessat": 48, "readlinkat": 78, "chdir": 49, "setsockopt": 208, "getsockopt": 209,
        "getpeername": 205, "clock_gettime": 113, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_getparam": 121, "getpgid": 155,
        "getsid": 156, "capget": 90, "fadvise64": 223, "madvise": 233, "mincore": 232, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "statfs": 43, "timerfd_create": 85, "sendfile": 71, "fsync": 82}  # fmt: skip
ALLOW, ASK, DONE, EPERM, ENOENT, ENOSYS = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x00050001, 0x00050002, 0x00050026
AT_FDCWD = -100


def evaluate(program, arch, number, *args):
    """The kernel's answer to a system call: runs classic BPF on struct seccomp_data."""
    args = [*args, *[0] * (6 - len(args))]
    data = struct.pack("iIQ6Q", number, arch, 0, *[arg & (1 << 64) - 1 for arg in args])
    code = [struct.unpack("HBBI", item) for item in program.code]
    position, register = 0, 0
    while True:
        operation, jump_true, jump_false, k = code[position]
        position += 1
        if operation == 0x20:
            register = struct.unpack_from("I", data, k)[0]
        elif operation == 0x54:
            register &= k
        elif operation == 0x06:
            return k
        else:
            true = {0x15: register == k, 0x25: register > k, 0x35: register >= k, 0x45: bool(register & k)}[operation]
            position += jump_true if true else jump_false


REFUSED = (
    "vfork execve socket connect sendmsg ptrace memfd_create shmget chmod fchmodat mount io_uring_setup process_vm_readv setns "
    "pidfd_send_signal utimensat setsockopt getpeername sched_getparam getpgid getsid capget fadvise64 mincore rt_sigqueueinfo "
    "rt_tgsigqueueinfo statfs timerfd_create sendfile fsync"
).split()
WRITING, BY_PATH = os.O_WRONLY | os.O_TRUNC, 0x200000  # O_PATH opens what may not be read
CHILD, OTHER = 4321, 77  # process ids
# what a program may do: a system call with its arguments, and the answer
DECISIONS = [
    *[(name, (), EPERM) for name in REFUSED],
    *[(name, (), ALLOW) for name in ("read", "mmap")],
    ("clone3", (), ENOSYS), ("clone", (17,), EPERM), ("clone", (0x3D0F00,), ALLOW), ("fork", (), EPERM),
    *[(name, (CHILD,), ALLOW) for name in ("kill", "tgkill")],
    *[(name, (pid,), EPERM) for name in ("kill", "tgkill") for pid in (1, 0, -1, -CHILD)],
    ("socketpair", (1, 1 | 0o2000000), ALLOW), ("socketpair", (1, 2), EPERM), ("socketpair", (2, 1), EPERM),
    ("sendto", (3, 0, 0, 0, 0), ALLOW), ("sendto", (3, 0, 0, 0, 1 << 40), EPERM), ("sendto", (3, 0, 0, 0, 8), EPERM),
    ("sendto", (3, 0, 0, 1), EPERM), ("sendto", (3, 0, 0, 0x40), ALLOW),  # urgent; MSG_DONTWAIT
    ("fcntl", (3, 4), ALLOW), *[("fcntl", (3, command), EPERM) for command in (5, 6, 7, 8, 10, 15, 36, 37, 38)],
    ("getsockopt", (3, 1, 4), ALLOW), ("getsockopt", (3, 1, 77), EPERM), ("getsockopt", (3, 6, 4), EPERM),
    *[(name, (clock,), ALLOW) for name in ("clock_gettime", "clock_nanosleep") for clock in (0, 3)],
    *[(name, (~OTHER << 3 | 2,), EPERM) for name in ("clock_gettime", "clock_nanosleep")],
    ("sched_getaffinity", (0,), ALLOW), ("sched_getaffinity", (OTHER,), ENOSYS),
    ("madvise", (0, 0, 4), ALLOW), ("madvise", (0, 0, 21), EPERM),  # MADV_DONTNEED, MADV_PAGEOUT
    *[(name, (), ENOENT) for name in "stat lstat access faccessat readlink readlinkat".split()],
    ("newfstatat", (AT_FDCWD, 1, 1, 0), ENOENT), ("newfstatat", (3, 1, 1, 0x1000), ALLOW),
    ("statx", (), ENOSYS), ("chdir", (), DONE),
    ("ioctl", (0, 0x5401), ALLOW), ("ioctl", (0, 0x5412), EPERM),
    ("prctl", (1, 9), ALLOW), ("prctl", (15,), ALLOW), ("prctl", (1, 0), EPERM), ("prctl", (22,), EPERM),
    ("prlimit64", (0,), ALLOW), ("prlimit64", (OTHER,), EPERM), ("seccomp", (1, 0), EPERM),
]  # fmt: skip
# the same for one filter alone
ALONE = {
    "zygote": [("clone", (17,), ALLOW), ("seccomp", (1, 0), ALLOW), ("openat", (3, 0, WRITING), ALLOW), ("openat", (3, 0, BY_PATH), EPERM),
               ("openat", (3, 0, 0), ALLOW), ("unlink", (), ALLOW), ("unlinkat", (), ALLOW)],
    "early Landlock": [("openat", (3, 0, WRITING), EPERM), ("openat", (3, 0, 0), ALLOW)],
    "no Landlock": [("openat", (3, 0, WRITING), EPERM), ("openat", (3, 0, BY_PATH), EPERM), ("openat", (3, 0, 0), ALLOW),
                    ("unlink", (), EPERM), ("unlinkat", (), EPERM)],
    "files": [*[("fcntl", (3, lock), ALLOW if lock < 8 else EPERM) for lock in (5, 6, 7, 36, 37, 38)], ("openat", (3, 0, BY_PATH), ALLOW),
              *[(name, (), ALLOW) for name in "stat lstat access faccessat readlink readlinkat statx newfstatat chdir fsync".split()]],
    "files, early Landlock": [("openat", (3, 0, WRITING), ALLOW), ("openat", (3, 0, os.O_TRUNC), EPERM)],
    "threads": [("clone", (0x3D0F00,), ASK), ("clone", (17,), ALLOW), ("read", (), ALLOW)],
}  # fmt: skip


@pytest.mark.parametrize(("machine", "numbers"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_filters_decide_as_meant(machine, numbers):
    arch = syscalls.AUDIT_ARCH[machine]
    filters = {
        "zygote": seccomp.process_filter(machine, 7, files=False),
        "early Landlock": seccomp.process_filter(machine, 1, files=False),
        "no Landlock": seccomp.process_filter(machine, 0, files=False),
        "files": seccomp.process_filter(machine, 7, files=True),
        "files, early Landlock": seccomp.process_filter(machine, 1, files=True),
        "threads": seccomp.thread_filter(machine),
    }
    child = seccomp.child_filter(machine, CHILD)
    tried = 0
    for name, args, right in DECISIONS:
        if name in numbers:
            answers = [evaluate(program, arch, numbers[name], *args) for program in (filters["zygote"], child)]
            assert max(answers, key=lambda answer: answer != ALLOW) == right, (name, args)
            tried += 1
    for which, decisions in ALONE.items():
        for name, args, right in decisions:
            if name in numbers:
                assert evaluate(filters[which], arch, numbers[name], *args) == right, (which, name, args)
                tried += 1
    assert tried > 100
    assert evaluate(filters["zygote"], arch ^ 1, numbers["read"]) == ENOSYS
    if machine == "x86_64":
        assert evaluate(filters["zygote"], arch, 0x40000000) == EPERM


def test_the_package_is_light():
    """Importing the executor imports neither torch nor numpy."""
    script = "import sys, marcog_trl.execution; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_refusal_of_strict_says_what_to_do():
    said = isolation.refusal(0, False)
    assert "Use Linux 5.13" in said and "CONFIG_SECCOMP_FILTER" in said and "--isolation best_effort" in said
