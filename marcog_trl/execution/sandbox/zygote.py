"""The driver's end of a zygote, which forks the children that run programs and tests."""

import os
import signal
import socket
from collections import deque
from typing import Any

from . import threads, wire
from .forks import ENDED


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
            threads.supervise(given[ord("L")])
        hello = wire.receive(self.sock)
        self.refusal = hello["refused"]
        self.left_out: list[str] = []
        self.single = True
        if self.refusal is None:
            self.left_out, self.single = hello["left_out"], hello["single"]

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
