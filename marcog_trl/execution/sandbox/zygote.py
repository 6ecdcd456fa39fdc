"""A confined process whose only work is to fork children. Receives descriptors and nothing else, so that no job's text is
ever in its memory, and therefore in none of its children's but the one that reads it for itself.
"""

import _sitebuiltins
import builtins
import gc
import os
import signal
import socket
import struct
import sys
from collections import deque

from . import echo, judge, rehearsal, solution, wire
from .confine import Confinement


# What programs import most. Each module makes every fork a little slower, asyncio and unittest.mock twice as slow.
_PRELOADED = (
    "abc array ast base64 bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json math numbers operator os random re statistics string struct textwrap time traceback types "
    "typing"
)
_ENDED = struct.Struct("<id")  # exit status, CPU seconds


class Zygote:
    """
    The driver's end of the zygote.

    Args:
        confinement (`Confinement`): What the zygote applies to itself and its children.
        unwanted (`socket.socket`): The driver's own channel, which the zygote must not keep.

    Attributes:
        refusal (`str` or `None`): Why the confinement is not possible, if it is not.
    """

    def __init__(self, confinement: Confinement, unwanted: socket.socket):
        self.sock, theirs = socket.socketpair()
        self.may_have_children = not confinement.seccomp
        self.ordered: deque[socket.socket] = deque()
        self.ready: deque[tuple[int, socket.socket]] = deque()
        driver = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                unwanted.close()
                self.sock.close()
                os.dup2(1, 2)  # programs have nobody to talk to
                _serve(theirs, confinement, driver)
            finally:
                os._exit(1)
        theirs.close()
        self.refusal = wire.receive(self.sock)["refused"]

    def order(self) -> None:
        """Asks for a child, to be taken later."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self.sock, [b"F"], [theirs.fileno()])
        theirs.close()
        self.ordered.append(ours)

    def take(self) -> tuple[int, socket.socket]:
        """A fresh child: its process id and the channel to it."""
        if not self.ready:
            if not self.ordered:
                self.order()
            self._collect()
        return self.ready.popleft()

    def end(self, pid: int) -> None:
        """Kills a child and has it reaped, without waiting."""
        self._kill(pid)
        self.sock.sendall(b"R" + pid.to_bytes(4, "little"))

    def autopsy(self, pid: int) -> tuple[int, float]:
        """Kills a child unless it has ended by itself; returns its exit status (negative: the signal that ended it) and
        the CPU time that it used, in seconds."""
        while self.ordered:
            self._collect()
        self._kill(pid)
        self.sock.sendall(b"W" + pid.to_bytes(4, "little"))
        return _ENDED.unpack(wire.read_exactly(self.sock, _ENDED.size))

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # it exists until it is reaped, and only we have it reaped
        if self.may_have_children:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it had not yet begun a session of its own, or nothing is left of it

    def _collect(self) -> None:
        pid = int.from_bytes(wire.read_exactly(self.sock, 4), "little")
        self.ready.append((pid, self.ordered.popleft()))


def _serve(sock: socket.socket, confinement: Confinement, driver: int) -> None:
    register, os.register_at_fork = os.register_at_fork, lambda **hooks: None
    import random  # without its hook, which seeds every child anew

    random.seed(0)  # children are seeded alike
    os.register_at_fork = register
    for name in _PRELOADED.split():
        __import__(name)
    echo.tape.record()
    rehearsal.rehearse()
    builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", ""), _sitebuiltins.Quitter("quit", "")
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
        del sys.modules[name]  # programs find no module of ours
    sys.argv[:] = [""]
    sys.path[:] = [*sys.path, *confinement.search_path()]
    try:
        confinement.confine_process(driver)
    except OSError as error:
        wire.send(sock, {"refused": str(error)})
        return
    wire.send(sock, {"refused": None})
    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if message == b"F":
            pid = os.fork()
            if pid == 0:
                _be_a_child(sock, fds[0], confinement)
            alive.add(pid)
            os.close(fds[0])
            sock.sendall(pid.to_bytes(4, "little"))
        elif message in (b"R", b"W"):
            pid = int.from_bytes(wire.read_exactly(sock, 4), "little")
            _, status, usage = os.wait4(pid, 0)
            alive.discard(pid)
            if not confinement.seccomp:
                _end_orphans(alive)
            if message == b"W":
                cpu = usage.ru_utime + usage.ru_stime
                sock.sendall(_ENDED.pack(os.waitstatus_to_exitcode(status), cpu))
        else:
            return


def _end_orphans(alive: set[int]) -> None:
    """Kills the processes that a program left behind, which are children of this one now."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                orphans = {int(pid) for pid in file.read().split()} - alive
        except OSError:
            return  # not Linux, or without this file: the session has been killed, and that is all that can be done
        if not orphans:
            return
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_a_child(zygote: socket.socket, fd: int, confinement: Confinement) -> None:
    """Reads what to do, does it, and never returns."""
    try:
        zygote.close()
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
        confinement.confine_child()  # most of what it takes to start, done before there is work
        header, fds, _, _ = socket.recv_fds(control, 4, 2)
        if len(header) < 4:
            return
        payload = wire.parse(wire.read_exactly(control, int.from_bytes(header, "little")))
        confinement.limit_child(payload["memory_mb"] << 20, payload["cpu_seconds"])
        role = payload["role"]
        if role == "direct":
            solution.serve_direct(control, payload)
        elif role == "script":
            solution.run_script(control, payload, fds)
        elif role == "solution":
            solution.serve_judge(control, payload, fds[0])
        else:
            judge.serve(control, payload, fds[0] if fds else None)
    finally:
        os._exit(0)
