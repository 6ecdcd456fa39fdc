"""The worker's end of the processes that run programs and tests: their channels, and how they end."""

import contextlib
import select
import signal
import socket
import time
from typing import Any

from . import wire
from .zygote import Zygote


BROKE = "the program's process broke its channel"
_TRIES = 4  # children to try, because some may have died while they waited for a job


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

    def receive(self, deadline: float) -> Any:
        """The next frame, a dict; `wire.TIMEOUT` at the deadline; `None` if the child is gone or broke the channel."""
        try:
            frame = self.reader.receive(deadline)
        except (EOFError, wire.BrokenChannel):
            return None
        return frame if frame is wire.TIMEOUT or type(frame) is dict else None

    def is_there(self) -> bool:
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def send(self, value: Any, deadline: float) -> None:
        """Sends a frame. If the child does not read it before the deadline, or is gone, no answer will come."""
        body = wire.write(value)
        rest = memoryview(wire.HEADER.pack(len(body)) + body)
        try:
            while rest:
                try:
                    rest = rest[self.sock.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self.sock, select.POLLOUT)
                    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                        return
        except OSError:
            return

    def end(self) -> None:
        if self.running:
            self.running = False
            self.sock.close()
            self.zygote.end(self.pid)

    def autopsy(self, cpu_limit: float) -> tuple[str, str]:
        """Ends the child and returns a status and a message that say how it ended: out of CPU time, or dead."""
        self.running = False
        self.sock.close()
        self.exit, cpu = self.zygote.autopsy(self.pid)
        if cpu >= cpu_limit and self.exit in (-signal.SIGXCPU, -signal.SIGKILL):
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
