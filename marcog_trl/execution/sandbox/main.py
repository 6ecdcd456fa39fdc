"""Entry of a worker process: takes jobs from the executor's socket, has fresh children run them, answers with verdicts.

Started as a script in an isolated interpreter: `main.py SOCKET_FD PARENT_PID`. This process holds the expected values,
enforces the limits from outside, and runs neither programs nor tests.
"""

import ctypes
import os
import select
import socket
import sys


sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandbox import wire
from sandbox.confine import Confinement, die_with_parent
from sandbox.driver import Driver
from sandbox.zygote import Zygote


sys.path.pop(0)
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    if sys.platform.startswith("linux"):
        die_with_parent(ctypes.CDLL(None))
    hello = wire.receive(sock)
    zygote = Zygote(Confinement(hello["landlock"], hello["seccomp"], hello["packages"]), sock)
    wire.send(sock, {"refused": zygote.refusal})
    if zygote.refusal is not None:
        return
    driver = Driver(zygote)
    while True:
        while not select.select([sock], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        try:
            job = wire.receive(sock, largest=1 << 31)  # the executor is trusted, and may have large tests
        except EOFError:
            return
        wire.send(sock, driver.run(job))


if __name__ == "__main__":
    main()
