"""Entry point of a worker: takes jobs from the executor's socket, has fresh children run them, and answers with verdicts.

It runs as a script in an isolated interpreter: `main.py worker SOCKET_FD PARENT_PID`. This process holds the expected values,
enforces the limits from outside, and runs neither programs nor tests. `main.py zygote SOCKET_FD PARENT_PID` is the entry point
of the zygotes, the processes that a worker starts to fork children.
"""

import ctypes
import os
import select
import signal
import socket
import sys


_OPTIONS = ["-s", "-P", "-S"]  # isolated as by -I, except for the environment variables that the executor sets

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if sys.argv[1] == "zygote":
    from sandbox import forks
else:
    from sandbox import wire
    from sandbox.confine import die_with_parent
    from sandbox.driver import Driver
sys.dont_write_bytecode = True  # of what programs import; the modules above are compiled only once
sys.path.pop(0)
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]


def main() -> None:
    descriptor, parent = int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(descriptor, False)  # zygotes and programs must not get it
    sock = socket.socket(fileno=descriptor)
    if sys.argv[1] == "zygote":
        try:
            forks.serve(sock, parent)
        finally:
            os._exit(1)
    _take_signals_back()
    if sys.platform.startswith("linux"):
        die_with_parent(ctypes.CDLL(None))
    driver = Driver(wire.receive(sock), [sys.executable, *_OPTIONS, os.path.abspath(__file__), "zygote"])
    wire.send(sock, driver.report())
    if driver.zygote.refusal is not None:
        return
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        while not poll.poll(1000):
            if os.getppid() != parent:
                return
        try:
            job = wire.receive(sock, largest=1 << 31)  # the executor is trusted, and its tests may be large
        except EOFError:
            return
        wire.send(sock, driver.run(job, lambda: wire.send(sock, {"starting": True})))


def _take_signals_back() -> None:
    """Restores the default handling of signals, which this process may have inherited otherwise."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
