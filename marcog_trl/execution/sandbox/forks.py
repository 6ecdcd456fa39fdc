"""The zygote: a confined process that only forks children.

It receives descriptors and no text. So the text of a job is never in its memory, nor in that of any child but the one that
reads it. Before it is confined, it prepares what its children find: modules that programs import, and code that has run.
"""

import _sitebuiltins
import base64
import builtins
import contextlib
import errno
import gc
import importlib.machinery
import importlib.util
import marshal
import math
import os
import posix
import signal
import socket
import struct
import sys
from typing import Any

from . import handles, judge, limits, output, solution, wire
from .confine import Confinement, keep_access_times, mount


ENDED = struct.Struct("<id")  # exit status, CPU seconds

# What programs import most. Each module makes every fork a little slower; asyncio or unittest.mock would double its time.
_PRELOADED = (
    "abc array ast base64 bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json math numbers operator os random re statistics string struct textwrap time traceback types "
    "typing"
)
_ROUNDS = 10  # of the rehearsal
_PROGRAM = {
    "code": "class C:\n    def m(self, x): return x * x\ndef f(x): return x * x + 1\ndef g(): return C()\n",
    "exports": ["f", "g"],
    "entry_point": "f",
}
_SETUP = "def close(a, b): return abs(a - b) < 1e-9"
_TESTS = (_SETUP, "assert close(f(1), 2)", "assert close(f(2), 5)", "c = g()\nassert c.m(2) == 4")


def serve(sock: socket.socket, driver: int) -> None:
    """Does the work of a zygote until the driver is gone."""
    terms = wire.receive(sock)
    load, modules = terms.pop("load"), terms.pop("modules")
    confinement = Confinement(**terms)
    _prepare(load, modules)
    single = _is_single()
    keep_access_times()
    if confinement.folder is not None:
        mount(confinement.folder)
    hello = {"refused": None, "left_out": confinement.left_out, "single": single}
    try:
        _confine(confinement, sock, driver)
    except (OSError, ValueError) as error:
        wire.send(sock, {**hello, "refused": str(error)})
        return
    wire.send(sock, hello)
    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if message == b"F":
            pid = os.fork()
            if pid == 0:
                _be_a_child(sock, fds[0], fds[1], confinement)
            alive.add(pid)
            os.close(fds[0])
            os.close(fds[1])
            sock.sendall(pid.to_bytes(4, "little"))
        elif message in (b"R", b"W"):
            pid = int.from_bytes(wire.read_exactly(sock, 4), "little")
            _, status, usage = os.wait4(pid, 0)
            alive.discard(pid)
            if not confinement.seccomp:
                _end_orphans(alive)
            if message == b"W":
                cpu = usage.ru_utime + usage.ru_stime
                sock.sendall(ENDED.pack(os.waitstatus_to_exitcode(status), cpu))
        elif message == b"S":
            sock.sendall(b"S")
        else:
            return


def _prepare(load: list[str], modules: dict[str, str]) -> None:
    """Imports what programs import most, and the packages that this worker's programs import."""
    register, os.register_at_fork = os.register_at_fork, lambda **hooks: None
    import random  # without its hook on forks, which would seed each child anew

    random.seed(0)  # all children begin with the same seed
    os.register_at_fork = register
    for name in _PRELOADED.split():
        __import__(name)
    builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", ""), _sitebuiltins.Quitter("quit", "")
    sys.argv[:] = [""]
    _show_modules(modules)
    for name in load:
        with contextlib.suppress(Exception):  # programs that import it get the same error
            __import__(name)
    output.recorder.record()
    if sys.platform.startswith("linux"):
        _rehearse()
        random.seed(0)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
        del sys.modules[name]  # so that programs do not find the modules of the sandbox


def _rehearse() -> None:
    """
    Runs a program and its tests a few times, each side once here and once in another process.

    The interpreter specializes code that runs often. Doing so before forking saves each child from it, and from a copy of the
    memory that it changes.
    """
    for here, there in ((_serve_tests, _test), (_test, _serve_tests), (_serve_calls, _call)):
        pairs = [socket.socketpair() for _ in range(_ROUNDS)]
        pid = os.fork()
        for ours, theirs in pairs:
            (ours if pid == 0 else theirs).close()
        try:
            for ours, theirs in pairs:
                there(theirs) if pid == 0 else here(ours)
        finally:
            if pid == 0:
                os._exit(0)
        os.waitpid(pid, 0)
    handles.session = None
    for name in ("solution", "tests"):
        del sys.modules[name]


def _serve_tests(sock: socket.socket) -> None:
    reports, control = socket.socketpair()
    with reports, control:
        solution.serve_judge(control, _PROGRAM, sock.detach())


def _test(sock: socket.socket) -> None:
    codes = [base64.b64encode(marshal.dumps(compile(text, "<tests>", "exec"))).decode() for text in _TESTS]
    tests = {"format": "asserts", "codes": codes, "modules": [], "seeded": []}
    reports, control = socket.socketpair()
    with reports, control:
        judged = judge.Judge(control, {**_PROGRAM, **tests})
        judged.run(sock.detach())
        judged.session.sock.close()


def _serve_calls(sock: socket.socket) -> None:
    with sock:
        solution.serve_direct(sock, {**_PROGRAM, "call": ["f", [1], {}]})


def _call(sock: socket.socket) -> None:
    reader = wire.FrameReader(sock)
    with sock:
        for call in (["f", [2], {}], ["f", ["a"], {}]):
            while "load" in reader.receive(math.inf):
                pass
            wire.send(sock, call)
        reader.receive(math.inf)


# What programs see of the file system: modules that they may import, and files that they may read


class Finder:
    """
    Finds top-level modules in a fixed table, so that the folders that contain them need not be listed.

    Args:
        modules (`dict[str, str]`): Path by name: a file, or a package's folder.
    """

    def __init__(self, modules: dict[str, str]):
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        location = self.modules.get(name)
        if path is not None or location is None:
            return None
        if not os.path.isdir(location):
            return importlib.util.spec_from_file_location(name, location)
        first = os.path.join(location, "__init__.py")
        if os.path.isfile(first):
            return importlib.util.spec_from_file_location(name, first, submodule_search_locations=[location])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)  # a namespace
        spec.submodule_search_locations = [location]
        return spec


def _library_modules() -> dict[str, str]:
    """Paths of the modules and packages of the standard library that are written in Python, by name."""
    library = os.path.dirname(os.__file__)
    found = {}
    for entry in os.scandir(library):
        if entry.name.endswith(".py"):
            found[entry.name[:-3]] = entry.path
        elif os.path.exists(os.path.join(entry.path, "__init__.py")):
            found[entry.name] = entry.path
    return found


def _show_modules(modules: dict[str, str]) -> None:
    """Makes the standard library and the given modules importable, and nothing else that is installed."""
    library = os.path.dirname(os.__file__)
    sys.path[:] = [path for path in sys.path if path != library]
    sys.meta_path.append(Finder({**modules, **_library_modules()}))


def _look_by_opening() -> None:
    """
    Replaces `os.stat`, `os.lstat` and `os.access`: files that the program may not read do not exist for them.

    Confined processes cannot ask the kernel about files by name (`seccomp.py`), because it would tell them about any file. The
    new functions open the file, which Landlock controls, and ask about the open file.
    """
    real_stat, fstat, opened, close = posix.stat, posix.fstat, posix.open, posix.close
    looking = posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK

    def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return fstat(path)
        try:
            fd = opened(path, looking if follow_symlinks else looking | posix.O_NOFOLLOW, dir_fd=dir_fd)
        except PermissionError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        try:
            return fstat(fd)
        finally:
            close(fd)

    def lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def access(
        path: Any, mode: int, *, dir_fd: int | None = None, effective_ids: bool = False, follow_symlinks: bool = True
    ) -> bool:
        try:
            stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        except OSError:
            return False
        return not mode & (os.W_OK | os.X_OK)

    for function in (stat, lstat, access):
        for kinds in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if getattr(posix, function.__name__) in kinds:
                kinds.add(function)
        for module in (posix, os):
            setattr(module, function.__name__, function)
    assert os.stat is not real_stat


# The process


def _confine(confinement: Confinement, sock: socket.socket, driver: int) -> None:
    """Confines this process, and sends the driver the descriptors for counting threads and for the scratch folder. They are
    sent first, because a confined process cannot send descriptors."""
    given: dict[bytes, int] = {}
    if confinement.folder is not None:
        os.chdir(confinement.folder)
        given[b"F"] = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener = confinement.confine_process(driver)
        if listener is not None:
            given[b"L"] = listener
    finally:
        socket.send_fds(sock, [b"".join(given).ljust(2, b"-")], list(given.values()))
        for fd in given.values():
            os.close(fd)
    confinement.filter_calls()
    if confinement.seccomp and confinement.folder is None:
        _look_by_opening()


def _is_single() -> bool:
    """Whether this process has a single thread. Others would be missing in its forks."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return True  # without /proc; environment variables keep numpy and others from starting threads


def _end_orphans(alive: set[int]) -> None:
    """Kills the processes that a program has left behind, which are now children of this process."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                orphans = {int(pid) for pid in file.read().split()} - alive
        except OSError:
            return  # not Linux, or this file is missing: killing the session is all that can be done
        if not orphans:
            return
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_a_child(zygote: socket.socket, fd: int, streams: int, confinement: Confinement) -> None:
    """Reads a job, does it, and ends the process."""
    try:
        zygote.close()
        for stream in (0, 1, 2):
            os.dup2(streams, stream)
        os.close(streams)
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
        confinement.confine_child()  # most of the start-up time, spent before there is a job
        header, fds, _, _ = socket.recv_fds(control, 4, 2)
        if len(header) < 4:
            return
        payload = wire.parse(wire.read_exactly(control, int.from_bytes(header, "little")))
        limits.limit_job(payload["memory_mb"] << 20, payload["cpu_seconds"])
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
