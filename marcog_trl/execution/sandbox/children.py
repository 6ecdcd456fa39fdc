"""The worker's end of the processes that run programs and tests, and of the zygotes that fork them."""

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

from . import limits, wire
from .forks import ENDED


BROKE = "the program's process broke its channel"
MOST_THREADS = 256  # of a program's process at a time
_TRIES = 4  # children to try, because some may have died while they waited for a job
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of <linux/seccomp.h>
_NOTIFICATION = 80  # bytes: a number (8), the id of a thread (4), and the system call
_CONTINUE = 1


def cpu_time(pid: int) -> float:
    """CPU time that a process has used, in seconds. Raises an `OSError` if it is gone, or the kernel does not tell."""
    return time.clock_gettime((~pid << 3) | 2)  # how Linux numbers the clocks of processes


def _tells_cpu_time() -> bool:
    try:
        cpu_time(os.getpid())
    except OSError:
        return False
    return True


_TELLS_CPU_TIME = _tells_cpu_time()


class Zygote:
    """
    Starts a zygote and talks to it. It is a fresh interpreter, because a fork of the driver would remember earlier jobs.

    Args:
        command (`list[str]`): The command line of a zygote. The number of a descriptor and the process id are added to it.
        terms (`dict`): Arguments of `Confinement`, and `modules` (path by name of modules that programs may import), `load`
            (names of those to import beforehand) and `folder` (path of a scratch folder, or `None`).

    Attributes:
        refusal (`str` or `None`): Why the process could not be confined; `None` if it is confined.
        left_out (`list[str]`): Paths that programs cannot read because the kernel refused the rule.
        threads_are_bounded (`bool`): Whether the number of a program's threads is limited.
        single (`bool`): Whether the zygote has a single thread. A fork would lack others that a package has started.
        folder (`int` or `None`): Descriptor of the scratch folder.
    """

    def __init__(self, command: list[str], terms: dict[str, Any]):
        self.sock, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            os.set_inheritable(descriptor, True)
            arguments = [*command, str(descriptor), str(os.getpid())]
            self.pid = os.posix_spawn(arguments[0], arguments, os.environ)
        self.may_have_children = not terms["seccomp"]
        self.ordered: deque[socket.socket] = deque()
        self.ready: deque[tuple[int, socket.socket]] = deque()
        wire.send(self.sock, terms)
        kinds, fds, _, _ = socket.recv_fds(self.sock, 2, 2)
        given = dict(zip(kinds.replace(b"-", b""), fds, strict=True))
        self.folder = given.get(ord("F"))
        self.threads_are_bounded = ord("L") in given
        if self.threads_are_bounded:
            threading.Thread(
                target=_count_threads, args=(given[ord("L")],), daemon=True, name="marcog-threads"
            ).start()
        hello = wire.receive(self.sock)
        self.refusal, self.left_out, self.single = hello["refused"], hello["left_out"], hello["single"]

    def close(self) -> None:
        """Ends the zygote and its children."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.sock.close()
        for sock in (*self.ordered, *(sock for _, sock in self.ready)):
            sock.close()

    def order(self) -> None:
        """Asks for a child, which `take` returns later."""
        ours, theirs = socket.socketpair()
        streams = os.open(os.devnull, os.O_RDWR)  # opened for each child, so that they share no file description
        socket.send_fds(self.sock, [b"F"], [theirs.fileno(), streams])
        os.close(streams)
        theirs.close()
        self.ordered.append(ours)

    def take(self) -> tuple[int, socket.socket]:
        """Returns a fresh child: its process id and the channel to it."""
        if not self.ready:
            if not self.ordered:
                self.order()
            self._collect()
        return self.ready.popleft()

    def settle(self) -> None:
        """Waits until all children that were ended are reaped."""
        while self.ordered:
            self._collect()
        self.sock.sendall(b"S")
        wire.read_exactly(self.sock, 1)

    def end(self, pid: int) -> None:
        """Kills a child and has it reaped, without waiting."""
        self._kill(pid)
        self.sock.sendall(b"R" + pid.to_bytes(4, "little"))

    def autopsy(self, pid: int) -> tuple[int, float]:
        """Kills a child unless it has ended by itself; returns its exit status (negative for the signal that ended it) and
        the CPU time that it used, in seconds."""
        while self.ordered:
            self._collect()
        self._kill(pid)
        self.sock.sendall(b"W" + pid.to_bytes(4, "little"))
        return ENDED.unpack(wire.read_exactly(self.sock, ENDED.size))

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # it exists until it is reaped, which only this class asks for
        if self.may_have_children:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has no session of its own yet, or nothing is left of it

    def _collect(self) -> None:
        pid = int.from_bytes(wire.read_exactly(self.sock, 4), "little")
        self.ready.append((pid, self.ordered.popleft()))


class Child:
    """A child process at work."""

    def __init__(self, zygote: Zygote, payload: dict, fds: list[int]):
        self.zygote = zygote
        body = wire.write(payload)
        for _ in range(_TRIES):
            self.pid, self.sock = zygote.take()
            try:
                socket.send_fds(self.sock, [len(body).to_bytes(4, "little")], fds)
                break
            except OSError:  # killed while it waited
                zygote.end(self.pid)
        try:
            self.sock.sendall(body)
        except OSError:
            pass  # it is gone, which reading will show
        self.reader = wire.FrameReader(self.sock, wire.LARGEST_ANSWER)
        self.running = True
        self.runs_program = payload["role"] != "judge"
        self.cpu_limit = payload["cpu_seconds"]
        self._cpu_time, self._begin = 0.0, time.monotonic()

    def cpu_time(self) -> float:
        """CPU time that the process has used, in seconds; wall-clock time where the kernel does not tell."""
        if self.running:
            with contextlib.suppress(OSError):  # it is gone: what it had used counts
                self._cpu_time = cpu_time(self.pid) if _TELLS_CPU_TIME else time.monotonic() - self._begin
        return self._cpu_time

    def receive(self, allowance: limits.Allowance) -> Any:
        """The next frame, a dict; `wire.TIMEOUT` if time is up; `None` if the child is gone or broke the channel."""
        while True:
            try:
                frame = self.reader.receive(allowance.look)
            except (EOFError, wire.BrokenChannel):
                return None
            if frame is not wire.TIMEOUT:
                return frame if type(frame) is dict else None
            if allowance.is_used_up():
                return frame

    def is_there(self) -> bool:
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def send(self, value: Any, allowance: limits.Allowance) -> None:
        """Sends a frame. If the child does not read it before time is up, or is gone, no answer will come."""
        body = wire.write(value)
        rest = memoryview(wire.HEADER.pack(len(body)) + body)
        try:
            while rest:
                try:
                    rest = rest[self.sock.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self.sock, select.POLLOUT)
                    left = min(max(0.0, allowance.look - time.monotonic()), wire.LONGEST_WAIT)
                    if not poll.poll(left * 1e3) and allowance.is_used_up():
                        return
        except OSError:
            return

    def end(self) -> None:
        if self.running:
            self.cpu_time()
            self.running = False
            self.sock.close()
            self.zygote.end(self.pid)

    def autopsy(self) -> tuple[str, str]:
        """Ends the child and returns a status and a message that say how it ended: out of CPU time, or dead."""
        self.running = False
        self.sock.close()
        self.exit, self._cpu_time = self.zygote.autopsy(self.pid)
        if self._cpu_time >= self.cpu_limit and self.exit in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timeout", "CPU time used up"
        if self.exit == -signal.SIGKILL:
            return "error", BROKE + " or was killed"
        if self.exit < 0:
            names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
            return "error", f"the program's process died of {names.get(-self.exit, f'signal {-self.exit}')}"
        return "error", f"the program's process ended with exit status {self.exit}"

    def hand(self, channel: socket.socket) -> None:
        """Sends a judge the channel to the next process of the program."""
        with contextlib.suppress(OSError):  # it is gone, which reading will show
            socket.send_fds(self.sock, [b"A"], [channel.fileno()])


def _count_threads(listener: int) -> None:
    """
    Limits the number of a program's threads: answers the questions of a filter of system calls, which asks before a thread is
    made, until no process with the filter is left.

    The kernel's resource limits cannot do this: they do not count threads of root, and count those of another user together
    with everything else that the user runs.
    """
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
