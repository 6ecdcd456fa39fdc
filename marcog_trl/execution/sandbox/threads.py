"""Limits the number of a program's threads.

The kernel's resource limits cannot do this: they do not count threads of root, and count those of another user together with
everything else that the user runs. Instead, a filter of system calls asks the worker before a program makes a thread.
"""

import errno
import fcntl
import os
import select
import struct
import threading


MOST_THREADS = 256  # per process at a time
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of <linux/seccomp.h>
_NOTIFICATION = 80  # bytes: a number (8), the id of a thread (4), and the system call
_CONTINUE = 1


def supervise(listener: int) -> None:
    """Starts a thread that answers the questions of a filter, until no process with the filter is left."""
    threading.Thread(target=_serve, args=(listener,), daemon=True, name="marcog-threads").start()


def _serve(listener: int) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    made = 0
    while True:
        events = poll.poll()[0][1]
        if not events & select.POLLIN:
            os.close(listener)
            return
        question = bytearray(_NOTIFICATION)
        try:
            fcntl.ioctl(listener, _RECEIVE, question)
            number, thread = struct.unpack_from("QI", question)
            running = _threads_of(thread)
            made = made + 1 if running is None else 0  # without /proc, assume that no thread has ended
            refused = (made if running is None else running) >= MOST_THREADS
            answer = struct.pack("QqiI", number, 0, -errno.EAGAIN if refused else 0, 0 if refused else _CONTINUE)
            fcntl.ioctl(listener, _SEND, bytearray(answer))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):  # otherwise, the process that asked is gone
                raise


def _threads_of(thread: int) -> int | None:
    """Number of threads in a thread's process; `None` if /proc does not say."""
    try:
        with open(f"/proc/{thread}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    except (OSError, StopIteration):
        return None
