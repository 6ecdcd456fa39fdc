"""Rules of Landlock for what a process and its children may do with files. Rules can only become stricter."""

import ctypes
import glob
import os
import platform
import struct
import sys


# The same numbers on all architectures
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM, _REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12, 1 << 13
_SCRATCH = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM


class Ruleset:
    """
    A set of rules.

    Args:
        libc (`ctypes.CDLL`): The C library, with `use_errno`.
        strict (`bool`): Whether to raise an error if the kernel refuses a rule. Otherwise the rule is left out, and programs
            cannot use the path.

    Attributes:
        abi (`int`): Version of Landlock.
        left_out (`list[str]`): Paths whose rules the kernel refused.

    Raises:
        OSError: If the kernel refuses.
    """

    def __init__(self, libc: ctypes.CDLL, strict: bool):
        self.libc = libc
        self.strict = strict
        self.left_out: list[str] = []
        self.abi = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
        if self.abi < 1:
            raise _error("Landlock")
        self.handled = (1 << 13) - 1
        self.handled |= sum(bit for version, bit in ((2, _REFER), (3, _TRUNCATE), (5, 1 << 15)) if self.abi >= version)
        attributes = struct.pack("QQQ", self.handled, 3, 3)[: 8 if self.abi < 4 else 16 if self.abi < 6 else 24]
        self.fd = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        if self.fd < 0:
            raise _error("Landlock")

    def read(self, path: str) -> None:
        """Allows reading a file, or a folder and everything in it."""
        self._allow(path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))

    def write(self, path: str) -> None:
        """Allows reading and writing one file."""
        self._allow(path, _READ_FILE | _WRITE_FILE | _TRUNCATE)

    def use(self, folder: str) -> None:
        """Allows everything in a folder except executing files and making devices, pipes and sockets."""
        self._allow(folder, _SCRATCH | _TRUNCATE | _REFER)

    def restrict(self) -> None:
        """Applies the rules to this process and its future children."""
        if self.libc.syscall(_RESTRICT_SELF, self.fd, 0) != 0:
            raise _error("Landlock")
        os.close(self.fd)

    def _allow(self, path: str, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # a missing file needs no rule
        try:
            rule = struct.pack("=Qi", access & self.handled, fd)
            if self.libc.syscall(_ADD_RULE, self.fd, _RULE_PATH_BENEATH, rule, 0) != 0:
                if self.strict:
                    raise _error(f"Landlock rule for {path}")
                self.left_out.append(path)
        finally:
            os.close(fd)


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
