"""Changes what this process and its children see mounted, if the kernel allows it."""

import ctypes
import os
import struct


MOST_BYTES, MOST_FILES = 64 << 20, 1024  # bytes in total, files and folders in total
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_MOUNT_SETATTR = 442  # the system call, on all architectures
_NOATIME, _ATIME_BITS, _SLAVE, _RECURSIVE = 0x10, 0x70, 0x80000, 0x8000
_MOUNT_FLAGS = 0xE  # MS_NOSUID | MS_NODEV | MS_NOEXEC


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
