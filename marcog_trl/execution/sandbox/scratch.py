"""A folder for the files of programs whose tests work with files: one per worker, emptied after each job.

If the kernel allows mounting (for root, or in a user namespace), it is a file system in memory with a fixed size, which no
other process sees, and which ends with its zygote. Otherwise it is a folder in shared memory or among the temporary files. A
thread of the worker checks its size 50 times a second, and kills the program if there is too much in it.
"""

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from .confine import MOST_BYTES, MOST_FILES


_PREFIX = "marcog-scratch-"
_INTERVAL = 0.02  # seconds between two checks
_STALE = 60.0  # seconds after which a folder that no process holds is removed


def reserve() -> str:
    """Path of a folder that `make` can make."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    return os.path.join(place, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")


def make(path: str) -> None:
    """Makes and holds the folder, unless it exists. Removes the folders of executors that were killed."""
    if os.path.exists(path):
        return
    os.mkdir(path, 0o700)
    hold(path)
    place = os.path.dirname(path)
    for name in os.listdir(place):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # it belongs to another user, or is in use
                other = os.path.join(place, name)
                if time.time() - os.stat(other).st_mtime > _STALE:
                    os.close(hold(other))
                    remove(other)


def hold(folder: str) -> int:
    """A descriptor of the folder, which no other process can hold until it is closed; raises OSError if one does."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove(folder: str) -> None:
    """Removes a folder, if it exists, with everything in it. No program may use it any more."""
    if not os.path.exists(folder):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        empty(fd)
    finally:
        os.close(fd)
    os.rmdir(folder)


def empty(fd: int) -> None:
    """Removes everything in the open folder, at any depth, without following links."""
    while names := os.listdir(fd):
        for name in names:
            if not _is_folder(name, fd):
                os.unlink(name, dir_fd=fd)
                continue
            below = _enter(name, fd)
            try:
                for inner in os.listdir(below):
                    if _is_folder(inner, below):
                        os.close(_enter(inner, below))  # which makes it writable, as moving it requires
                    os.rename(inner, secrets.token_hex(8), src_dir_fd=below, dst_dir_fd=fd)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=fd)


def _is_folder(name: str, fd: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


def _enter(name: str, fd: int) -> int:
    os.chmod(name, 0o700, dir_fd=fd)  # a program may have made it unreadable
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)


def holds_too_much(fd: int) -> bool:
    """Whether the open folder contains too many bytes or files, too many levels of folders, or unreadable folders."""
    size = files = 0
    open_folders = [(os.dup(fd), 0)]
    try:
        while open_folders:
            folder, depth = open_folders.pop()
            try:
                for name in os.listdir(folder):
                    try:
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if stat.S_ISDIR(found.st_mode):
                            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                            open_folders.append((os.open(name, flags, dir_fd=folder), depth + 1))
                    except PermissionError:
                        return True
                    except OSError:
                        continue  # removed meanwhile
                    size, files = size + found.st_blocks * 512, files + 1
                    if size > MOST_BYTES or files > MOST_FILES or len(open_folders) > 64 or depth > 64:
                        return True
            finally:
                os.close(folder)
    finally:
        for folder, _ in open_folders:
            os.close(folder)
    return False


@contextlib.contextmanager
def watched(fd: int, stop_programs: Callable[[], None]) -> Iterator[threading.Event]:
    """Checks the open folder while the block runs, and stops the programs if there is too much in it. Yields an event that
    says whether this has happened."""
    done, overfull = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_INTERVAL):
            if holds_too_much(fd):
                overfull.set()
                stop_programs()

    thread = threading.Thread(target=watch, daemon=True, name="marcog-scratch")
    thread.start()
    try:
        yield overfull
    finally:
        done.set()
        thread.join()
