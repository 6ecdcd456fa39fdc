"""The allowed system calls, as filters in classic BPF made from the tables of `syscalls.py`.

The filter of a zygote decides what is allowed at all. That of a child takes away what only the zygote may do. That of threads
asks the worker before a thread is made, so that the worker can count them. A refused call fails with an error number; it does
not kill the process.
"""

import ctypes
import os
import struct

from . import syscalls


ALLOW, ASK, ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
EPERM, ENOENT, ENOSYS = 1, 2, 38
_EQUAL, _GREATER, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45  # jumps
ANY_PID = 0xFEEDF00D  # stands for the process's own id until the filter is installed
_NEW_LISTENER = 1 << 3
_CLONE_THREAD = 0x00010000
_AT_EMPTY_PATH = 0x1000
_O_PATH = 0x200000
_O_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Instructions:
    """The instructions of a filter, in order."""

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

    def when(self, number: int | None, body: "Instructions") -> None:
        """Runs `body`, which ends in a return, for the system call `number`."""
        if number is not None:
            self.emit(_EQUAL, 0, len(body.code), number)
            self.code += body.code


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """
    A filter that is ready to be installed.

    Everything is prepared here, before forking: a child copies a page of memory for each object that it touches.
    """

    def __init__(self, instructions: Instructions, machine: str, libc: ctypes.CDLL):
        raw = b"".join(instructions.code)
        place = raw.find(struct.pack("I", ANY_PID))
        self.buffer = ctypes.create_string_buffer(raw, len(raw))
        self.place = None if place < 0 else place
        self.program = _SockFprog(len(instructions.code), ctypes.addressof(self.buffer))
        self.reference = ctypes.byref(self.program)
        self.number = syscalls.SECCOMP[syscalls.COLUMNS[machine]]
        self.syscall = libc.syscall

    def install(self, listen: bool = False) -> int:
        """Installs the filter for this process, whose id replaces `ANY_PID`. With `listen`, returns the descriptor on which
        the kernel asks about calls that the filter answers with `ASK`."""
        if self.place is not None:
            struct.pack_into("I", self.buffer, self.place, os.getpid())
        result = self.syscall(self.number, 1, _NEW_LISTENER if listen else 0, self.reference)
        if result < 0:
            raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))
        return result


def _answer(value: int) -> Instructions:
    instructions = Instructions()
    instructions.ret(value)
    return instructions


def _checked(checks: syscalls.Checks, error: int = EPERM) -> Instructions:
    """Allows a call whose arguments pass all checks."""
    body = Instructions()
    for index, test, value in checks:
        body.load_argument(int(index), high=index != int(index))
        if test == "in":
            for k, each in enumerate(value):
                body.emit(_EQUAL, len(value) - k, 0, each)
        elif test == "any":
            body.emit(_ANY_BIT, 1, 0, value)
        else:
            body.emit(_ANY_BIT if test == "none" else _GREATER, 0, 1, value)
        body.ret(ERRNO | error)
    body.ret(ALLOW)
    return body


def _truncates_only() -> Instructions:
    """Refuses `O_TRUNC` without write access, which Landlock before version 3 does not check."""
    body = Instructions()
    body.load_argument(2)
    body.emit(0x54, 0, 0, os.O_TRUNC | os.O_ACCMODE)
    body.emit(_EQUAL, 0, 1, os.O_TRUNC)
    body.ret(ERRNO | EPERM)
    body.ret(ALLOW)
    return body


def _prctl() -> Instructions:
    """Allows SIGKILL as the death signal, and setting and getting the name of a thread."""
    body = Instructions()
    body.load_argument(0)
    body.emit(_EQUAL, 5, 0, 15)
    body.emit(_EQUAL, 4, 0, 16)
    body.emit(_EQUAL, 0, 2, 1)
    body.load_argument(1)
    body.emit(_EQUAL, 1, 0, 9)
    body.ret(ERRNO | EPERM)
    body.ret(ALLOW)
    return body


def process_filter(machine: str, abi: int, files: bool) -> Instructions:
    """
    The filter of a zygote and its children.

    Args:
        machine (`str`): `"x86_64"` or `"aarch64"`.
        abi (`int`): Version of Landlock that guards files; 0 without Landlock.
        files (`bool`): Whether programs have a scratch folder.
    """
    column, instructions = syscalls.COLUMNS[machine], Instructions()
    instructions.load(4)
    instructions.emit(_EQUAL, 1, 0, syscalls.AUDIT_ARCH[machine])
    instructions.ret(ERRNO | ENOSYS)
    instructions.load_number()
    groups = [*syscalls.ALLOWED.values(), *syscalls.OPENING.values(), syscalls.CLONE, syscalls.FORK]
    groups += [syscalls.KILL, syscalls.TKILL, syscalls.TGKILL]
    if abi:
        groups += syscalls.CHANGING_FILES.values()
    if files:
        groups += [
            *syscalls.LOOKING_AT_FILES.values(),
            *syscalls.CHANGING_FOLDER.values(),
            *syscalls.WRITING_THROUGH.values(),
        ]
    allowed = {number for number in (numbers[column] for numbers in groups) if number is not None}

    for numbers, checks in (*syscalls.CHECKED, syscalls.FCNTL_WITH_LOCKS if files else syscalls.FCNTL):
        instructions.when(numbers[column], _checked(checks))
    instructions.when(syscalls.SCHED_GETAFFINITY[column], _checked(((0, "in", (0,)),), ENOSYS))
    # so that clone is used, whose flags a filter can see
    instructions.when(syscalls.CLONE3[column], _answer(ERRNO | ENOSYS))
    instructions.when(syscalls.PRCTL[column], _prctl())
    _opening(instructions, column, abi, files, allowed)
    if not files:
        _looking(instructions, column)
    for first, last in _ranges(sorted(allowed)):
        if first == last:
            instructions.emit(_EQUAL, 0, 1, first)
        else:
            instructions.emit(_AT_LEAST, 0, 2, first)
            instructions.emit(_GREATER, 1, 0, last)
        instructions.ret(ALLOW)
    instructions.ret(ERRNO | EPERM)
    return instructions


def _opening(instructions: Instructions, column: int, abi: int, files: bool, allowed: set[int]) -> None:
    refused = (0 if files else _O_PATH) | (_O_WRITING if not abi else os.O_TRUNC if abi < 3 and not files else 0)
    for index, numbers in enumerate(syscalls.OPENING.values(), start=1):
        number = numbers[column]
        if number is not None and refused:
            instructions.when(number, _checked(((index, "none", refused),)))
            allowed.discard(number)
        elif number is not None and files and abi < 3:
            instructions.when(number, _truncates_only())
            allowed.discard(number)


def _looking(instructions: Instructions, column: int) -> None:
    """Files are reported as missing to programs without a scratch folder, and changing the folder has no effect."""
    for name, numbers in syscalls.LOOKING_AT_FILES.items():
        if name == "newfstatat":  # with an empty path, glibc uses it for open files
            instructions.when(numbers[column], _checked(((3, "any", _AT_EMPTY_PATH),), ENOENT))
        else:
            instructions.when(numbers[column], _answer(ERRNO | (ENOSYS if name == "statx" else ENOENT)))
    for numbers in syscalls.CHANGING_FOLDER.values():
        instructions.when(numbers[column], _answer(ERRNO | 0))  # reports success and does nothing


def child_filter(machine: str, pid: int) -> Instructions:
    """The filter of a child, on top of its zygote's: no new processes, and signals only to `pid`, which is itself."""
    column, instructions = syscalls.COLUMNS[machine], Instructions()
    instructions.load_number()
    instructions.when(syscalls.CLONE[column], _checked(((0, "any", _CLONE_THREAD),)))
    signals = [numbers[column] for numbers in (syscalls.KILL, syscalls.TKILL, syscalls.TGKILL)]
    refused = [number for number in (syscalls.FORK[column], syscalls.SECCOMP[column]) if number is not None]
    # all these jump to one block at the end
    for k, number in enumerate(signals):
        instructions.emit(_EQUAL, len(signals) - k + len(refused), 0, number)
    for k, number in enumerate(refused):
        instructions.emit(_EQUAL, len(refused) - k + 2, 0, number)
    instructions.ret(ALLOW)
    instructions.load_argument(0)
    instructions.emit(_EQUAL, 1, 0, pid)
    instructions.ret(ERRNO | EPERM)
    instructions.ret(ALLOW)
    return instructions


def thread_filter(machine: str) -> Instructions:
    """The filter that asks a listener before a thread is made."""
    instructions = Instructions()
    instructions.load_number()
    body = Instructions()
    body.load_argument(0)
    body.emit(_ANY_BIT, 0, 1, _CLONE_THREAD)
    body.ret(ASK)
    body.ret(ALLOW)
    instructions.when(syscalls.CLONE[syscalls.COLUMNS[machine]], body)
    instructions.ret(ALLOW)
    return instructions


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
