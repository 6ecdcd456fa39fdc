"""
Programs learn nothing about other processes and files, and use little of what all processes share.

`cases/hostile.json` has the calls that are refused, and the programs that start threads, queue signals or look at files.
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
