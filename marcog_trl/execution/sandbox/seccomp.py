"""Which system calls are allowed, as filters made from the tables of `syscalls.py`.

The filter of a zygote decides what is allowed at all. That of a child takes away what only the zygote may do. That of threads
asks the worker before a thread is made, so that the worker can count them.
"""

import os

from . import syscalls
from .bpf import ALLOW, ANY_BIT, ASK, AT_LEAST, ENOENT, ENOSYS, EPERM, EQUAL, ERRNO, GREATER, Instructions


_CLONE_THREAD = 0x00010000
_MSG_OOB = 1
_AT_EMPTY_PATH = 0x1000
_O_PATH = 0x200000
_O_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _answer(value: int) -> Instructions:
    instructions = Instructions()
    instructions.ret(value)
    return instructions


def _argument_in(index: int, values: tuple[int, ...], error: int = EPERM) -> Instructions:
    body = Instructions()
    body.load_argument(index)
    for k, value in enumerate(values):
        body.emit(EQUAL, len(values) - k, 0, value)
    body.ret(ERRNO | error)
    body.ret(ALLOW)
    return body


def _argument_at_most(index: int, largest: int) -> Instructions:
    body = Instructions()
    body.load_argument(index)
    body.refuse_if(GREATER, largest)
    body.ret(ALLOW)
    return body


def _bits(index: int, refused: int = 0, wanted: int = 0, error: int = EPERM) -> Instructions:
    """Allows a call whose argument has one of the `wanted` bits (if any are given) and none of the `refused`."""
    body = Instructions()
    body.load_argument(index)
    if wanted:
        body.require(ANY_BIT, wanted, error)
    if refused:
        body.refuse_if(ANY_BIT, refused, error)
    body.ret(ALLOW)
    return body


def _truncates_only() -> Instructions:
    """Refuses `O_TRUNC` without write access, which Landlock before version 3 does not check."""
    body = Instructions()
    body.load_argument(2)
    body.emit(0x54, 0, 0, os.O_TRUNC | os.O_ACCMODE)
    body.refuse_if(EQUAL, os.O_TRUNC)
    body.ret(ALLOW)
    return body


def _socketpair() -> Instructions:
    """Allows socketpair(AF_UNIX, SOCK_STREAM), which reaches no other process."""
    body = Instructions()
    body.load_argument(0)
    body.require(EQUAL, 1)
    body.load_argument(1)
    body.emit(0x54, 0, 0, 0xF)
    body.require(EQUAL, 1)
    body.ret(ALLOW)
    return body


def _sendto() -> Instructions:
    """Allows sending without an address, to the other end of a pair, and without urgent bytes, which `recv` leaves unread."""
    body = Instructions()
    for high in (False, True):
        body.load_argument(4, high)
        body.require(EQUAL, 0)
    body.load_argument(3)
    body.refuse_if(ANY_BIT, _MSG_OOB)
    body.ret(ALLOW)
    return body


def _prctl() -> Instructions:
    """Allows SIGKILL as the death signal, and setting and getting the name of a thread."""
    body = Instructions()
    body.load_argument(0)
    body.emit(EQUAL, 5, 0, 15)
    body.emit(EQUAL, 4, 0, 16)
    body.emit(EQUAL, 0, 2, 1)
    body.load_argument(1)
    body.emit(EQUAL, 1, 0, 9)
    body.ret(ERRNO | EPERM)
    body.ret(ALLOW)
    return body


def _own_socket() -> Instructions:
    body = Instructions()
    body.load_argument(1)
    body.require(EQUAL, 1)  # SOL_SOCKET
    body.code += _argument_in(2, syscalls.SOCKET_OPTIONS).code
    return body


def _one_more_filter() -> Instructions:
    body = Instructions()
    body.load_argument(0)
    body.require(EQUAL, 1)
    body.load_argument(1)
    body.require(EQUAL, 0)
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
    instructions.require(EQUAL, syscalls.AUDIT_ARCH[machine], ENOSYS)
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

    fcntls = syscalls.FCNTLS + (syscalls.FCNTL_LOCKS if files else ())
    instructions.when(syscalls.FCNTL[column], _argument_in(1, fcntls))
    instructions.when(syscalls.IOCTL[column], _argument_in(1, syscalls.IOCTLS))
    instructions.when(syscalls.PRLIMIT[column], _argument_in(0, (0,)))
    instructions.when(syscalls.SCHED_GETAFFINITY[column], _argument_in(0, (0,), ENOSYS))
    instructions.when(syscalls.MADVISE[column], _argument_in(2, syscalls.ADVICE))
    for numbers in syscalls.CLOCKS:
        instructions.when(numbers[column], _argument_at_most(0, 11))
    # so that clone is used, whose flags a filter can see
    instructions.when(syscalls.CLONE3[column], _answer(ERRNO | ENOSYS))
    instructions.when(syscalls.SOCKETPAIR[column], _socketpair())
    instructions.when(syscalls.SENDTO[column], _sendto())
    instructions.when(syscalls.GETSOCKOPT[column], _own_socket())
    instructions.when(syscalls.PRCTL[column], _prctl())
    instructions.when(syscalls.SECCOMP[column], _one_more_filter())
    _opening(instructions, column, abi, files, allowed)
    if not files:
        _looking(instructions, column)
    for first, last in _ranges(sorted(allowed)):
        if first == last:
            instructions.emit(EQUAL, 0, 1, first)
        else:
            instructions.emit(AT_LEAST, 0, 2, first)
            instructions.emit(GREATER, 1, 0, last)
        instructions.ret(ALLOW)
    instructions.ret(ERRNO | EPERM)
    return instructions


def _opening(instructions: Instructions, column: int, abi: int, files: bool, allowed: set[int]) -> None:
    refused = (0 if files else _O_PATH) | (_O_WRITING if not abi else os.O_TRUNC if abi < 3 and not files else 0)
    for index, numbers in enumerate(syscalls.OPENING.values(), start=1):
        number = numbers[column]
        if number is not None and refused:
            instructions.when(number, _bits(index, refused))
            allowed.discard(number)
        elif number is not None and files and abi < 3:
            instructions.when(number, _truncates_only())
            allowed.discard(number)


def _looking(instructions: Instructions, column: int) -> None:
    """Files are reported as missing to programs without a scratch folder, and changing the folder has no effect."""
    for name, numbers in syscalls.LOOKING_AT_FILES.items():
        if name == "newfstatat":  # with an empty path, glibc uses it for open files
            instructions.when(numbers[column], _bits(3, wanted=_AT_EMPTY_PATH, error=ENOENT))
        else:
            instructions.when(numbers[column], _answer(ERRNO | (ENOSYS if name == "statx" else ENOENT)))
    for numbers in syscalls.CHANGING_FOLDER.values():
        instructions.when(numbers[column], _answer(ERRNO | 0))  # reports success and does nothing


def child_filter(machine: str, pid: int) -> Instructions:
    """The filter of a child, on top of its zygote's: no new processes, and signals only to `pid`, which is itself."""
    column, instructions = syscalls.COLUMNS[machine], Instructions()
    instructions.load_number()
    instructions.when(syscalls.CLONE[column], _bits(0, wanted=_CLONE_THREAD))
    signals = [numbers[column] for numbers in (syscalls.KILL, syscalls.TKILL, syscalls.TGKILL)]
    refused = [number for number in (syscalls.FORK[column], syscalls.SECCOMP[column]) if number is not None]
    # all these jump to one block at the end
    for k, number in enumerate(signals):
        instructions.emit(EQUAL, len(signals) - k + len(refused), 0, number)
    for k, number in enumerate(refused):
        instructions.emit(EQUAL, len(refused) - k + 2, 0, number)
    instructions.ret(ALLOW)
    instructions.load_argument(0)
    instructions.emit(EQUAL, 1, 0, pid)
    instructions.ret(ERRNO | EPERM)
    instructions.ret(ALLOW)
    return instructions


def thread_filter(machine: str) -> Instructions:
    """The filter that asks a listener before a thread is made."""
    instructions = Instructions()
    instructions.load_number()
    body = Instructions()
    body.load_argument(0)
    body.emit(ANY_BIT, 0, 1, _CLONE_THREAD)
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
