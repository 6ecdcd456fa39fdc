"""Programs learn nothing about other processes and files, and use little of what all processes share."""

import os
import time
from pathlib import Path

import pytest
from watching import run_in_time

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.isolation import probe


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")

PRELUDE = """
import ctypes, fcntl, os, socket, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(action, *args, **kwargs):
    try: return ['not refused', action(*args, **kwargs)]
    except OSError: return []
"""
REFUSED = {
    "session of another": "refused(os.getsid, os.getppid())",
    "group of another": "refused(os.getpgid, os.getppid())",
    "cores of another": "refused(os.sched_getaffinity, os.getppid())",
    "CPU clock of another": "refused(time.clock_gettime, (~os.getppid() << 3) | 2)",
    "CPU clock of another, slept on": "refused(time.clock_getres, (~os.getppid() << 3) | 2)",
    "process by stat": "refused(os.stat, f'/proc/{os.getppid()}')",
    "process by link": "refused(os.readlink, f'/proc/{os.getppid()}/exe')",
    "process by access": "[] if not os.access(f'/proc/{os.getppid()}', os.F_OK) else ['seen']",
    "process by folder": "[] if [os.chdir(path) or os.getcwd() for path in (f'/proc/{os.getppid()}', '/none')] == ['/'] * 2 "
    "else ['gone there']",
    "size of a file": "refused(os.stat, '/etc/passwd')",
    "size of a file by the C library": "[] if libc.stat(b'/etc/passwd', ctypes.create_string_buffer(512)) == -1 else ['seen']",
    "path descriptor": "refused(os.open, '/etc/passwd', os.O_PATH)",
    "file system": "refused(os.statvfs, '/')",
    "installed packages": "sum([refused(os.listdir, path) for path in "
    "(os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), 'site-packages'))], [])",
    "lock on a shared file": "sum([refused(fcntl.lockf, os.open(os.devnull, os.O_RDWR), how) for how in (1, 2)], [])",
    "lock asked for": "refused(fcntl.fcntl, 0, fcntl.F_GETLK, struct.pack('hhqqi', 1, 0, 0, 0, 0))",
    "page cache": "refused(os.posix_fadvise, os.open(os.__file__, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)",
    "urgent byte": "refused(socket.socketpair()[0].send, b'x', socket.MSG_OOB)",
    "buffers": "refused(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 28)",
    "who is at the other end": "refused(socket.socketpair()[0].getsockopt, socket.SOL_SOCKET, 17, 12)",
    "locked memory": "refused(__import__('mmap').mmap, -1, 1 << 20, flags=0x2022)",
}


@pytest.fixture(scope="module", params=["strict", "best_effort"])
def executor(request):
    with CodeExecutor(num_workers=1, timeout=4.0, isolation=request.param) as executor:
        yield executor


@pytest.mark.parametrize("name", REFUSED)
def test_refused(executor, name):
    job = Job(f"{PRELUDE}\ndef f(x): return {REFUSED[name]}", ["assert f(1) == []"])
    assert executor.run([job])[0].message == ""


def test_the_standard_library_is_looked_at_as_ever(executor):
    """Imports, and code that inspects modules, need the names, sizes and times of readable files."""
    code = """
import inspect, os, pathlib, linecache, importlib
def f(x):
    import calendar, mailbox, xml.dom.minidom, zoneinfo, sqlite3, concurrent.futures, asyncio
    importlib.invalidate_caches()
    import wave, email.mime.text
    path = pathlib.Path(os.__file__)
    return (path.exists() and path.is_file() and path.parent.joinpath('json').is_dir() and os.path.getsize(path) > 1000
            and os.access(path, os.R_OK) and inspect.getsource(calendar).startswith('\"\"\"')
            and str(zoneinfo.ZoneInfo('Europe/Paris')) == 'Europe/Paris')
def g(x):
    return [pathlib.Path(path).exists() for path in ('/etc/passwd', '/nowhere', os.devnull)]
"""
    tests = ["assert f(1) == True", "assert g(1) == [False, False, True]"]
    assert executor.run([Job(code, tests)])[0].message == ""


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to mount, and to set the access time of a file")
def test_reading_does_not_change_when_a_file_was_last_read():
    file = Path(os.__file__).with_name("antigravity.py")
    long_ago = time.time_ns() - 10**9 * 3600 * 48

    def age():
        os.utime(file, ns=(long_ago, file.stat().st_mtime_ns))

    age()
    if file.read_bytes() and file.stat().st_atime_ns == long_ago:
        pytest.skip("this file system keeps no access times")
    age()
    with CodeExecutor(num_workers=1) as executor:
        code = f"def f(x): return open({str(file)!r}).read() != '' and x"
        assert executor.run([Job(code, ["assert f(1) == 1"])])[0].message == ""
    assert file.stat().st_atime_ns == long_ago


def test_flags_of_the_streams_do_not_stay(executor):
    code = """
import fcntl, os
seen = [fcntl.fcntl(k, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK) for k in (0, 1, 2)]
for k in (0, 1, 2): fcntl.fcntl(k, fcntl.F_SETFL, fcntl.fcntl(k, fcntl.F_GETFL) | os.O_APPEND | os.O_NONBLOCK)
def f(x): return seen
"""
    verdicts = executor.run([Job(code, ["assert f(1) == [0, 0, 0]"])] * 4)
    assert [verdict.message for verdict in verdicts] == [""] * 4


def test_threads_are_bounded(executor):
    """Threads with small stacks count too, and so do those of root."""
    code = """
import ctypes
libc = ctypes.CDLL(None)
def f(most):
    attributes, thread, count = ctypes.create_string_buffer(256), ctypes.c_ulong(), 0
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
    while count < most and libc.pthread_create(ctypes.byref(thread), attributes, libc.pause, None) == 0: count += 1
    return count
"""
    assert executor.run([Job(code, ["assert f(2000) == 255"])])[0].message == ""


def test_threads_of_python_have_room(executor):
    code = """
import threading
def f(count):
    barrier = threading.Barrier(count + 1)
    threads = [threading.Thread(target=barrier.wait) for _ in range(count)]
    for thread in threads: thread.start()
    barrier.wait()
    for thread in threads: thread.join()
    return count
def g(count):
    for _ in range(count): f(2)
    return count
"""
    jobs = [Job(code, ["assert f(50) == 50"], memory_mb=512), Job(code, ["assert g(300) == 300"])]
    assert [verdict.message for verdict in executor.run(jobs)] == ["", ""]


def test_queued_signals_are_bounded(executor):
    code = """
import os, signal
def f(most):
    number = signal.SIGRTMIN + 1
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    for _ in range(most): os.kill(os.getpid(), number)
    count = 0
    while signal.sigtimedwait([number], 0) is not None: count += 1
    return count
"""
    (verdict,) = executor.run([Job(code, ["assert f(5000) <= 65"])])
    assert verdict.message == ""


@pytest.mark.filterwarnings("ignore:programs run with incomplete confinement")
@pytest.mark.parametrize("setup", ["", "def same(a, b): return a == b"])
@pytest.mark.parametrize("place", ["    ", ""])
@pytest.mark.parametrize("landlock", [True, False])
def test_an_urgent_byte_does_not_hold_up_the_worker(monkeypatch, setup, place, landlock):
    """Without a filter of system calls, a program can send one. It must not block the reader of the channel."""
    if not landlock:
        monkeypatch.setattr("marcog_trl.execution.isolation.probe", lambda: (probe()[0], False))
    send = "for fd in range(3, 30):\n    try: socket.socket(fileno=os.dup(fd)).send(b'x', socket.MSG_OOB)\n    except OSError: pass\n"
    send = "".join(f"{place}{line}\n" for line in [*send.splitlines(), "time.sleep(30)"])
    code = f"import os, socket, time\ndef f(x):\n    pass\n{send}"
    with CodeExecutor(num_workers=1, timeout=1.0, isolation="best_effort") as executor:
        good = Job("def f(x): return 2", ["assert f(1) == 2"])
        executor.run([good])
        worker = executor._pool.workers[0].process.pid
        assert run_in_time(executor, Job(code, ["assert f(1) == 2"], setup=setup), 2.5).status == "timeout"
        assert executor.run([good])[0].status == "passed"
        assert executor._pool.workers[0].process.pid == worker


def test_zygotes_have_no_descriptors_of_the_worker(executor):
    executor.run([Job("def f(): return 1", ["assert f() == 1"])])
    code = "import os\ndef f(x): return sum(refused(os.fstat, k) == [] for k in range(3, 200))"
    (verdict,) = executor.run([Job(PRELUDE + code, ["assert f(1) == 196"])])  # the channel is open, and nothing else
    assert verdict.message == ""
