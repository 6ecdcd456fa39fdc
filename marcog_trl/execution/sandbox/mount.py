"""Mounts a file system in memory with a fixed size, if the kernel allows it."""

import ctypes
import os


LARGEST, MOST_FILES = 64 << 20, 1024  # bytes in total, files and folders in total
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_MOUNT_FLAGS = 0xE  # MS_NOSUID | MS_NODEV | MS_NOEXEC


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
    options = f"size={LARGEST},nr_inodes={MOST_FILES},mode=700".encode()
    return (
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None) == 0
        and libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(_MOUNT_FLAGS), options) == 0
    )
