"""
Programs learn nothing about other processes and files, and use little of what all processes share.

`cases/hostile.json` has the calls that are refused.
"""

import os
import time
from pathlib import Path

import pytest
from watching import run_in_time

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.isolation import probe


pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")


@pytest.fixture(scope="module", params=["strict", "best_effort"])
def executor(request):
    with CodeExecutor(num_workers=1, timeout=4.0, isolation=request.param) as executor:
        yield executor


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
    code = """
import os
def is_open(k):
    try: return bool(os.fstat(k))
    except OSError: return False
def f(x): return sum(map(is_open, range(3, 200)))
"""
    assert executor.run([Job(code, ["assert f(1) == 1"])])[0].message == ""  # the channel
