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
    assert str(isolation.Isolation("strict", 7, True, True)).startswith("confined (Landlock ABI 7, seccomp")
    assert isolation.Isolation("best_effort", 0, True, True).tier == "partial"
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


@pytest.mark.parametrize(("machine", "numbers"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_filters_decide_as_meant(machine, numbers):
    arch = syscalls.AUDIT_ARCH[machine]
    process, early, bare = (seccomp.process_filter(machine, abi, files=False) for abi in (7, 1, 0))
    files, early_files = (seccomp.process_filter(machine, abi, files=True) for abi in (7, 1))
    child, threads = seccomp.child_filter(machine, 4321), seccomp.thread_filter(machine)

    def both(name, *args):
        answers = [evaluate(program, arch, numbers[name], *args) for program in (process, child)]
        return max(answers, key=lambda answer: answer != ALLOW)

    assert both("read") == both("mmap") == ALLOW and both("clone3") == ENOSYS
    for name in set(numbers) & {
        "vfork",
        "execve",
        "socket",
        "connect",
        "sendmsg",
        "ptrace",
        "memfd_create",
        "shmget",
        "chmod",
        "fchmodat",
        "mount",
        "io_uring_setup",
        "process_vm_readv",
        "setns",
        "pidfd_send_signal",
        "utimensat",
        "setsockopt",
        "getpeername",
        "sched_getparam",
        "getpgid",
        "getsid",
        "capget",
        "fadvise64",
        "mincore",
        "rt_sigqueueinfo",
        "rt_tgsigqueueinfo",
        "statfs",
        "timerfd_create",
        "sendfile",
        "fsync",
    }:
        assert both(name) == EPERM, name
    assert both("clone", 17) == EPERM and both("clone", 0x3D0F00) == ALLOW
    assert evaluate(process, arch, numbers["clone"], 17) == ALLOW
    for name in ("kill", "tgkill"):
        assert (
            both(name, 4321) == ALLOW
            and both(name, 1) == both(name, 0) == both(name, -1) == both(name, -4321) == EPERM
        )
    assert (
        both("socketpair", 1, 1 | 0o2000000) == ALLOW and both("socketpair", 1, 2) == both("socketpair", 2, 1) == EPERM
    )
    assert (
        both("sendto", 3, 0, 0, 0, 0) == ALLOW
        and both("sendto", 3, 0, 0, 0, 1 << 40) == both("sendto", 3, 0, 0, 0, 8) == EPERM
    )
    assert (
        both("fcntl", 3, 4) == ALLOW and both("fcntl", 3, 8) == both("fcntl", 3, 10) == both("fcntl", 3, 15) == EPERM
    )
    assert both("sendto", 3, 0, 0, 1) == EPERM and both("sendto", 3, 0, 0, 0x40) == ALLOW  # urgent; MSG_DONTWAIT
    assert (
        both("getsockopt", 3, 1, 4) == ALLOW and both("getsockopt", 3, 1, 77) == both("getsockopt", 3, 6, 4) == EPERM
    )
    for clock in ("clock_gettime", "clock_nanosleep"):
        assert both(clock, 0) == both(clock, 3) == ALLOW and both(clock, ~77 << 3 | 2) == EPERM
    assert both("sched_getaffinity", 0) == ALLOW and both("sched_getaffinity", 77) == ENOSYS
    assert both("madvise", 0, 0, 4) == ALLOW and both("madvise", 0, 0, 21) == EPERM  # MADV_DONTNEED, MADV_PAGEOUT
    for lock in (5, 6, 7, 36, 37, 38):
        assert both("fcntl", 3, lock) == EPERM
        assert evaluate(files, arch, numbers["fcntl"], 3, lock) == (ALLOW if lock < 8 else EPERM)
    for look in {"stat", "lstat", "access", "faccessat", "readlink", "readlinkat"} & set(numbers):
        assert both(look) == ENOENT and evaluate(files, arch, numbers[look]) == ALLOW
    assert both("newfstatat", AT_FDCWD, 1, 1, 0) == ENOENT and both("newfstatat", 3, 1, 1, 0x1000) == ALLOW
    assert both("statx") == ENOSYS and both("chdir") == DONE
    assert [evaluate(files, arch, numbers[name]) for name in ("statx", "newfstatat", "chdir", "fsync")] == [ALLOW] * 4
    assert evaluate(threads, arch, numbers["clone"], 0x3D0F00) == ASK
    assert evaluate(threads, arch, numbers["clone"], 17) == evaluate(threads, arch, numbers["read"]) == ALLOW
    assert both("ioctl", 0, 0x5401) == ALLOW and both("ioctl", 0, 0x5412) == EPERM
    assert both("prctl", 1, 9) == both("prctl", 15) == ALLOW and both("prctl", 1, 0) == both("prctl", 22) == EPERM
    assert both("prlimit64", 0) == ALLOW and both("prlimit64", 77) == EPERM
    assert evaluate(process, arch, numbers["seccomp"], 1, 0) == ALLOW and both("seccomp", 1, 0) == EPERM
    assert evaluate(process, arch ^ 1, numbers["read"]) == ENOSYS
    if machine == "x86_64":
        assert both("fork") == EPERM and evaluate(process, arch, 0x40000000) == EPERM
    writing = os.O_WRONLY | os.O_TRUNC
    assert [evaluate(program, arch, numbers["openat"], 3, 0, writing) for program in (process, early, bare)] == [
        ALLOW,
        EPERM,
        EPERM,
    ]
    by_path = [evaluate(program, arch, numbers["openat"], 3, 0, 0x200000) for program in (process, bare, files)]
    assert by_path == [EPERM, EPERM, ALLOW]  # O_PATH opens what may not be read
    assert [evaluate(early_files, arch, numbers["openat"], 3, 0, flags) for flags in (writing, os.O_TRUNC)] == [
        ALLOW,
        EPERM,
    ]
    assert [evaluate(program, arch, numbers["openat"], 3, 0, 0) for program in (process, early, bare)] == [ALLOW] * 3
    unlink = numbers.get("unlink", numbers.get("unlinkat"))
    assert [evaluate(program, arch, unlink) for program in (process, bare)] == [ALLOW, EPERM]


def test_the_package_is_light():
    """Importing the executor imports neither torch nor numpy."""
    script = "import sys, marcog_trl.execution; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_refusal_of_strict_says_what_to_do():
    said = isolation.refusal(0, False)
    assert "Use Linux 5.13" in said and "CONFIG_SECCOMP_FILTER" in said and "--isolation best_effort" in said
