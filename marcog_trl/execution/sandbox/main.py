"""Entry of a worker process: takes jobs from the executor's socket, has a fresh child run each, and answers verdicts.

Started as a script in an isolated interpreter with an empty environment: `main.py SOCKET_FD PARENT_PID`. This process
enforces the limits from outside and never runs a program. Its children come from a zygote that was confined at start and
that receives nothing but descriptors, so that no job leaves traces for the next.
"""

import gc
import os
import select
import socket
import sys
import time


sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox import runner, wire
from sandbox.confine import Confinement


sys.path.pop(0)


class Zygote:
    """A confined process whose only work is to fork children."""

    def __init__(self, confinement: Confinement, unwanted: socket.socket):
        self.sock, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            unwanted.close()
            self.sock.close()
            os.dup2(1, 2)  # programs have nobody to talk to
            try:
                serve_forks(theirs, confinement)
            finally:
                os._exit(1)
        theirs.close()
        self.refusal = wire.receive(self.sock)["refused"]

    def fork(self) -> tuple[int, socket.socket]:
        """Forks a child and returns its process id and the channel to it."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self.sock, [b"F"], [theirs.fileno()])
        theirs.close()
        return int.from_bytes(wire.read_exactly(self.sock, 4), "little"), ours

    def end(self, pid: int) -> int:
        """Kills and reaps a child; returns its exit status, negative for the signal that ended it."""
        os.kill(pid, 9)
        self.sock.sendall(b"R" + pid.to_bytes(4, "little"))
        return int.from_bytes(wire.read_exactly(self.sock, 4), "little", signed=True)


def serve_forks(sock: socket.socket, confinement: Confinement) -> None:
    runner.preload()
    try:
        confinement.confine_process()
    except OSError as error:
        wire.send(sock, {"refused": str(error)})
        return
    wire.send(sock, {"refused": None})
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, 5, 1)
        if not message:
            return
        if message[:1] == b"R":
            while len(message) < 5:
                message += sock.recv(5 - len(message))
            _, status = os.waitpid(int.from_bytes(message[1:5], "little"), 0)
            sock.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            continue
        pid = os.fork()
        if pid == 0:
            sock.close()
            runner.child(fds[0], confinement)
        os.close(fds[0])
        sock.sendall(pid.to_bytes(4, "little"))


def run_job(job: dict, zygote: Zygote) -> dict:
    """Has one job run in a fresh child, within its limits, and returns its verdict as a frame."""
    start = time.monotonic()
    deadline = start + job["timeout"]
    results: list = []
    pid, channel = zygote.fork()
    message = ""
    begun = start
    try:
        wire.send(channel, job)
        reader = wire.Reader(channel)
        while len(results) < job["total"] and not message:
            limit = deadline if job["test_timeout"] is None else min(deadline, begun + job["test_timeout"])
            frame = reader.receive(limit)
            now = time.monotonic()
            if frame is wire.TIMEOUT:
                message = "time limit reached"
                results.append(["timeout", message, now - begun])
            elif not isinstance(frame, dict):
                message = "the process ended or broke the channel"
                results.append(["error", message, now - begun])
            elif "load" in frame:
                message = frame["load"]
                results += [["error", message, 0.0]] * job["total"]
            else:
                results.append([frame["status"], frame["message"], now - begun])
            begun = now
    finally:
        channel.close()
        zygote.end(pid)
    results += [["skipped", "not reached", 0.0]] * (job["total"] - len(results))
    statuses = {result[0] for result in results}
    status = next((name for name in ("timeout", "error", "failed", "skipped") if name in statuses), "passed")
    first = next((result[1] for result in results if result[0] != "passed"), "")
    return {
        "status": "failed" if status == "skipped" else status,
        "tests": results,
        "message": first,
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    hello = wire.receive(sock)
    zygote = Zygote(Confinement(hello["landlock"], hello["seccomp"], []), sock)
    wire.send(sock, {"refused": zygote.refusal} if zygote.refusal else {"ready": True})
    if zygote.refusal:
        return
    while True:
        while not select.select([sock], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        job = wire.receive(sock)
        if job is None:
            return
        wire.send(sock, run_job(job, zygote))


if __name__ == "__main__":
    main()
