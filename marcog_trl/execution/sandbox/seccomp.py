"""Filters of system calls: classic BPF over a call's number and arguments, from the tables of `calls.py`.

Forbidden calls fail with an error number, they do not kill. The filter of a zygote decides what is allowed at all; that of a
child takes away what only the zygote may do; that of threads hands their making to the worker, which counts them.
"""

import ctypes
import os
import struct

from . import calls


ALLOW, ASK, ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
EPERM, ENOENT, ENOSYS = 1, 2, 38
ANY_PID = 0xFEEDF00D  # stands for the process's own id until the filter is installed
_NEW_LISTENER = 1 << 3
_CLONE_THREAD = 0x00010000
_MSG_OOB = 1
_AT_EMPTY_PATH = 0x1000
_O_PATH = 0x200000
_O_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Program:
    """A filter in the making."""

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

    def require(self, jump: int, value: int, error: int = EPERM) -> None:
        """Refuses unless the loaded value compares like that with `value`."""
        self.emit(jump, 1, 0, value)
        self.ret(ERRNO | error)

    def refuse_if(self, jump: int, value: int, error: int = EPERM) -> None:
        self.emit(jump, 0, 1, value)
        self.ret(ERRNO | error)

    def when(self, number: int | None, body: "Program") -> None:
        """`body`, which ends in a return, for the call `number`."""
        if number is not None:
            self.emit(_EQUAL, 0, len(body.code), number)
            self.code += body.code


_EQUAL, _GREATER, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45


def _answer(value: int) -> Program:
    program = Program()
    program.ret(value)
    return program


def _argument_in(index: int, values: tuple[int, ...], error: int = EPERM) -> Program:
    body = Program()
    body.load_argument(index)
    for k, value in enumerate(values):
        body.emit(_EQUAL, len(values) - k, 0, value)
    body.ret(ERRNO | error)
    body.ret(ALLOW)
    return body


def _argument_at_most(index: int, largest: int) -> Program:
    body = Program()
    body.load_argument(index)
    body.refuse_if(_GREATER, largest)
    body.ret(ALLOW)
    return body


def _bits(index: int, refused: int = 0, wanted: int = 0, error: int = EPERM) -> Program:
    """Allows a call whose argument has one of the `wanted` bits (if any are given) and none of the `refused`."""
    body = Program()
    body.load_argument(index)
    if wanted:
        body.require(_ANY_BIT, wanted, error)
    if refused:
        body.refuse_if(_ANY_BIT, refused, error)
    body.ret(ALLOW)
    return body


def _truncates_only() -> Program:
    """Refuses to open for truncation what is not opened for writing: Landlock before version 3 overlooks that."""
    body = Program()
    body.load_argument(2)
    body.emit(0x54, 0, 0, os.O_TRUNC | os.O_ACCMODE)
    body.refuse_if(_EQUAL, os.O_TRUNC)
    body.ret(ALLOW)
    return body


def _socketpair() -> Program:
    """socketpair(AF_UNIX, SOCK_STREAM), which reaches nobody."""
    body = Program()
    body.load_argument(0)
    body.require(_EQUAL, 1)
    body.load_argument(1)
    body.emit(0x54, 0, 0, 0xF)
    body.require(_EQUAL, 1)
    body.ret(ALLOW)
    return body


def _sendto() -> Program:
    """Sends without an address, which goes to the peer of a pair, and no urgent bytes, which confuse who waits for it."""
    body = Program()
    for high in (False, True):
        body.load_argument(4, high)
        body.require(_EQUAL, 0)
    body.load_argument(3)
    body.refuse_if(_ANY_BIT, _MSG_OOB)
    body.ret(ALLOW)
    return body


def _prctl() -> Program:
    """The death signal and nothing weaker; the thread's name."""
    body = Program()
    body.load_argument(0)
    body.emit(_EQUAL, 5, 0, 15)
    body.emit(_EQUAL, 4, 0, 16)
    body.emit(_EQUAL, 0, 2, 1)
    body.load_argument(1)
    body.emit(_EQUAL, 1, 0, 9)
    body.ret(ERRNO | EPERM)
    body.ret(ALLOW)
    return body


def _own_socket() -> Program:
    body = Program()
    body.load_argument(1)
    body.require(_EQUAL, 1)  # SOL_SOCKET
    body.code += _argument_in(2, calls.SOCKET_OPTIONS).code
    return body


def _one_more_filter() -> Program:
    body = Program()
    body.load_argument(0)
    body.require(_EQUAL, 1)
    body.load_argument(1)
    body.require(_EQUAL, 0)
    body.ret(ALLOW)
    return body


def process_filter(machine: str, abi: int, files: bool) -> Program:
    """
    What a zygote and its children may do.

    Args:
        machine (`str`): `"x86_64"` or `"aarch64"`.
        abi (`int`): Version of Landlock that guards the files; 0 without.
        files (`bool`): Whether programs have a scratch folder.
    """
    column, program = calls.COLUMNS[machine], Program()
    program.load(4)
    program.require(_EQUAL, calls.AUDIT_ARCH[machine], ENOSYS)
    program.load_number()
    groups = [*calls.ALLOWED.values(), *calls.OPENING.values(), calls.CLONE, calls.FORK]
    groups += [calls.KILL, calls.TKILL, calls.TGKILL]
    if abi:
        groups += calls.CHANGING_FILES.values()
    if files:
        groups += [*calls.LOOKING_AT_FILES.values(), *calls.CHANGING_FOLDER.values(), *calls.WRITING_THROUGH.values()]
    allowed = {number for number in (numbers[column] for numbers in groups) if number is not None}

    fcntls = calls.FCNTLS + (calls.FCNTL_LOCKS if files else ())
    program.when(calls.FCNTL[column], _argument_in(1, fcntls))
    program.when(calls.IOCTL[column], _argument_in(1, calls.IOCTLS))
    program.when(calls.PRLIMIT[column], _argument_in(0, (0,)))
    program.when(calls.SCHED_GETAFFINITY[column], _argument_in(0, (0,), ENOSYS))
    program.when(calls.MADVISE[column], _argument_in(2, calls.ADVICE))
    for numbers in calls.CLOCKS:
        program.when(numbers[column], _argument_at_most(0, 11))
    program.when(calls.CLONE3[column], _answer(ERRNO | ENOSYS))  # so that clone is used, whose flags can be seen
    program.when(calls.SOCKETPAIR[column], _socketpair())
    program.when(calls.SENDTO[column], _sendto())
    program.when(calls.GETSOCKOPT[column], _own_socket())
    program.when(calls.PRCTL[column], _prctl())
    program.when(calls.SECCOMP[column], _one_more_filter())
    _opening(program, column, abi, files, allowed)
    if not files:
        _looking(program, column)
    for first, last in _ranges(sorted(allowed)):
        if first == last:
            program.emit(_EQUAL, 0, 1, first)
        else:
            program.emit(_AT_LEAST, 0, 2, first)
            program.emit(_GREATER, 1, 0, last)
        program.ret(ALLOW)
    program.ret(ERRNO | EPERM)
    return program


def _opening(program: Program, column: int, abi: int, files: bool, allowed: set[int]) -> None:
    refused = (0 if files else _O_PATH) | (_O_WRITING if not abi else os.O_TRUNC if abi < 3 and not files else 0)
    for index, numbers in enumerate(calls.OPENING.values(), start=1):
        number = numbers[column]
        if number is not None and refused:
            program.when(number, _bits(index, refused))
            allowed.discard(number)
        elif number is not None and files and abi < 3:
            program.when(number, _truncates_only())
            allowed.discard(number)


def _looking(program: Program, column: int) -> None:
    """What a program may not read does not exist for it, and it goes nowhere."""
    for name, numbers in calls.LOOKING_AT_FILES.items():
        if name == "newfstatat":  # with an empty path, glibc asks for an open file by it
            program.when(numbers[column], _bits(3, wanted=_AT_EMPTY_PATH, error=ENOENT))
        else:
            program.when(numbers[column], _answer(ERRNO | (ENOSYS if name == "statx" else ENOENT)))
    for numbers in calls.CHANGING_FOLDER.values():
        program.when(numbers[column], _answer(ERRNO | 0))  # done, and without effect


def child_filter(machine: str, pid: int) -> Program:
    """What a child may do of that: no processes, and no signals to others than `pid`, itself."""
    column, program = calls.COLUMNS[machine], Program()
    program.load_number()
    program.when(calls.CLONE[column], _bits(0, wanted=_CLONE_THREAD))
    signals = [numbers[column] for numbers in (calls.KILL, calls.TKILL, calls.TGKILL)]
    refused = [number for number in (calls.FORK[column], calls.SECCOMP[column]) if number is not None]
    # one block: signals only to oneself
    for k, number in enumerate(signals):
        program.emit(_EQUAL, len(signals) - k + len(refused), 0, number)
    for k, number in enumerate(refused):
        program.emit(_EQUAL, len(refused) - k + 2, 0, number)
    program.ret(ALLOW)
    program.load_argument(0)
    program.emit(_EQUAL, 1, 0, pid)
    program.ret(ERRNO | EPERM)
    program.ret(ALLOW)
    return program


def thread_filter(machine: str) -> Program:
    """Hands the making of threads to whoever listens."""
    program = Program()
    program.load_number()
    body = Program()
    body.load_argument(0)
    body.emit(_ANY_BIT, 0, 1, _CLONE_THREAD)
    body.ret(ASK)
    body.ret(ALLOW)
    program.when(calls.CLONE[calls.COLUMNS[machine]], body)
    program.ret(ALLOW)
    return program


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """A filter ready to be installed: what a child does costs a page copied for each thing that it touches."""

    def __init__(self, program: Program, machine: str, libc: ctypes.CDLL):
        raw = b"".join(program.code)
        place = raw.find(struct.pack("I", ANY_PID))
        self.buffer = ctypes.create_string_buffer(raw, len(raw))
        self.place = None if place < 0 else place
        self.program = _SockFprog(len(program.code), ctypes.addressof(self.buffer))
        self.reference = ctypes.byref(self.program)
        self.number = calls.SECCOMP[calls.COLUMNS[machine]]
        self.syscall = libc.syscall

    def install(self, listen: bool = False) -> int:
        """Takes effect for this process, whose id is the one that the filter may name. With `listen`, returns the
        descriptor that gets to hear of the calls that the filter hands over."""
        if self.place is not None:
            struct.pack_into("I", self.buffer, self.place, os.getpid())
        result = self.syscall(self.number, 1, _NEW_LISTENER if listen else 0, self.reference)
        if result < 0:
            raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))
        return result
