"""Filters of system calls as classic BPF: their instructions, and how they are installed.

A refused call fails with an error number; it does not kill the process.
"""

import ctypes
import os
import struct

from .syscalls import COLUMNS, SECCOMP


ALLOW, ASK, ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
EPERM, ENOENT, ENOSYS = 1, 2, 38
EQUAL, GREATER, AT_LEAST, ANY_BIT = 0x15, 0x25, 0x35, 0x45  # jumps
ANY_PID = 0xFEEDF00D  # stands for the process's own id until the filter is installed
_NEW_LISTENER = 1 << 3


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

    def require(self, jump: int, value: int, error: int = EPERM) -> None:
        """Refuses the call unless the loaded value passes the comparison `jump` with `value`."""
        self.emit(jump, 1, 0, value)
        self.ret(ERRNO | error)

    def refuse_if(self, jump: int, value: int, error: int = EPERM) -> None:
        self.emit(jump, 0, 1, value)
        self.ret(ERRNO | error)

    def when(self, number: int | None, body: "Instructions") -> None:
        """Runs `body`, which ends in a return, for the system call `number`."""
        if number is not None:
            self.emit(EQUAL, 0, len(body.code), number)
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
        self.number = SECCOMP[COLUMNS[machine]]
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
