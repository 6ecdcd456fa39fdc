"""What the executor promises to its callers: order, limits, errors before anything runs, a clean end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watching import below, gone, naps, run_in_time, shows_naps, wait_until

from marcog_trl.execution import CodeExecutor, Job, shared_executor
from marcog_trl.execution.sandbox import wire


ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-5, 5) == 0"]


def test_order_and_counts(executor):
    programs = [ADD, ADD.replace("+", "-"), "def add(a, b):\n    return 3\n", "def add(a, b)\n", "x = 1\n"] * 3
    verdicts = executor.run([Job(code=code, tests=TESTS) for code in programs])
    assert [v.status for v in verdicts] == ["passed", "failed", "failed", "error", "error"] * 3
    assert [v.passed for v in verdicts[:5]] == [2, 0, 1, 0, 0]
    assert all(v.total == len(v.tests) == 2 for v in verdicts)
    assert "SyntaxError" in verdicts[3].message and "add" in verdicts[4].message


def test_wall_clock(executor):
    job = Job(code="def add(a, b):\n    while True: pass\n", tests=TESTS, timeout=0.5)
    assert run_in_time(executor, job, 1.5).status == "timeout"


def test_memory(executor):
    code = "import mmap\ndef add(a, b):\n    return mmap.mmap(-1, 400 << 20)[0]\n"
    job = Job(code=code, tests=["assert add(1, 2) == 0"])
    assert executor.run([job])[0].status == "passed"
    small = Job(code=job.code, tests=job.tests, memory_mb=200)
    assert executor.run([small])[0].status == "failed"


def test_numpy_starts_no_threads():
    """One thread per core would leave no address space for the program on a machine with many cores."""
    pytest.importorskip("numpy")
    variables = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    code = "import os, numpy\ndef threads(): return len(os.listdir('/proc/self/task'))\n"
    code += f"def variables(): return [os.environ.get(name) for name in {variables}]"
    tests = ["assert threads() == 1", "assert variables() == ['1', '1', '1']"]
    with CodeExecutor(num_workers=1, isolation="none") as executor:  # confined programs do not see /proc
        assert executor.run([Job(code=code, tests=tests)])[0].message == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": "assert add(1, 2) == 3"}, "must be a list"),
        ({"tests": [3]}, "must be text"),
        ({"tests": [("1", "2", "3")], "test_format": "stdio"}, "pair"),
        ({"test_format": "doctest"}, "test_format='doctest'"),
        ({"tests": "def check(c): pass", "test_format": "check"}, "entry_point"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"test_timeout": 0}, "test_timeout=0"),
        ({"memory_mb": -1}, "memory_mb=-1"),
        ({"memory_mb": 512.0}, "memory_mb=512.0"),
        ({"memory_mb": 63}, "at least 64"),
        ({"entry_point": "a b"}, "entry_point"),
    ],
)
def test_bad_jobs_are_named_before_anything_runs(executor, change, message):
    good = {"code": ADD, "tests": TESTS}
    with pytest.raises(ValueError, match=r"^jobs\[1\]: ") as error:
        executor.submit([Job(**good), Job(**{**good, **change})])
    assert message in str(error.value)


UNUSABLE = {
    "none": ({"tests": []}, "no tests"),
    "open": ({"tests": ["assert add(1, 2 == 3"]}, "tests[0]='assert add(1, 2 == 3' does not parse"),
    "of several": ({"tests": [*TESTS, "assert add(1, 2) = 1"]}, "does not parse"),
    "empty": ({"tests": [""]}, "no statement"),
    "outside a function": ({"tests": ["return add(1, 2) == 3"]}, "does not parse"),
    "outside a loop": ({"tests": ["assert add(1, 2) == 3", "break"]}, "tests[1]='break' does not parse"),
    "global after use": ({"tests": ["x = add(1, 2)\nglobal x"]}, "does not parse"),
    "nonlocal": ({"tests": ["nonlocal x"]}, "does not parse"),
    "deep": ({"tests": [f"assert add(1, 2) == {'(' * 300}3{')' * 300}"]}, "does not parse"),
    "deeper": ({"tests": [f"assert add(1, 2) == {'-' * 20_000}3"]}, ""),
    "many operands": ({"tests": [f"assert add(1, 2) == {'+'.join('1' * 20_000)}"]}, ""),
    "long": ({"tests": [f"assert add(1, 2) == {'1' * 5000}"]}, "does not parse"),
    "null byte": ({"tests": ["assert add(1, 2) == 3\0"]}, "does not parse"),
    "surrogate": ({"tests": ["assert add(1, 2) == '\ud800'"]}, "does not parse"),
    "surrogate in a script's input": ({"tests": [("\ud800", "1")], "test_format": "stdio"}, "lone surrogate"),
    "no check": ({"tests": "x = 1", "test_format": "check", "entry_point": "add"}, "check(candidate)"),
    "no method": ({"tests": "x = 1", "test_format": "unittest"}, "test method"),
    "setup": ({"setup": "import"}, "setup='import' does not parse"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_tests_that_a_model_wrote_and_that_cannot_be_run_are_an_error_and_no_exception(executor, name):
    change, reason = UNUSABLE[name]
    good = {"code": ADD, "tests": TESTS}
    before, verdict, after = executor.run([Job(**good), Job(**{**good, **change}), Job(**good)])
    assert before.status == after.status == "passed"
    assert verdict.status == "error" and reason in verdict.message
    assert verdict.total == len(verdict.tests) >= 1 and verdict.passed == 0
    assert {result.status for result in verdict.tests} == {"error"}
    assert executor.run([Job(**{**good, **change})]) == [verdict]  # alone, nothing is left to run


@pytest.mark.parametrize("field", ["code", "setup"])
def test_code_that_is_not_text_is_refused_at_once(field):
    with pytest.raises(ValueError, match=f"{field} must be text, got int"):
        Job(**{"code": ADD, "tests": TESTS, field: 5})


def test_a_single_job_is_refused(executor):
    with pytest.raises(TypeError, match=r"Pass \[job\]"):
        executor.run(Job(code=ADD, tests=TESTS))


@pytest.mark.parametrize("argument", ["num_workers", "timeout", "test_timeout", "max_timeouts", "memory_mb"])
def test_bad_limits(argument):
    with pytest.raises(ValueError, match=f"{argument}=0"):
        CodeExecutor(**{argument: 0})


def test_jobs_compare_by_value():
    assert Job(code=ADD, tests=TESTS) == Job(code=ADD, tests=tuple(TESTS))
    assert len({Job(code=ADD, tests=TESTS), Job(code=ADD, tests=list(TESTS))}) == 1


def test_large_jobs(executor):
    text = "x" * (17 << 20)
    stdio = Job(code="import sys\nprint(len(sys.stdin.read()))", tests=[(text, str(len(text)))], test_format="stdio")
    code = ADD + "# " + "x" * (1 << 20)
    assert [v.status for v in executor.run([stdio, Job(code=code, tests=TESTS, memory_mb=64)])] == ["passed", "passed"]


def test_nothing_to_run(executor):
    assert executor.run([]) == []


def test_a_slow_job_delays_no_other():
    with CodeExecutor(num_workers=2, isolation="best_effort", timeout=60) as executor:
        slow = executor.submit([Job(code="import time\ndef add(a, b):\n    time.sleep(60)\n", tests=TESTS)])
        assert executor.run([Job(code=ADD, tests=TESTS)] * 10)[0].status == "passed"
        assert not slow.done()


def worker_with_a_job(executor, killed=None):
    """Process id of the worker that runs a job which sleeps, once one does. The one that was killed may seem to, too."""
    found = []

    def has_one():
        pids = {worker.process.pid for worker in executor._pool.workers if worker.task is not None and worker.sock}
        found[:] = [pid for pid in pids - {killed} if any(map(naps, below(pid)))]
        return found

    if shows_naps():
        assert wait_until(has_one)
        return found[0]
    time.sleep(1)
    return executor._pool.workers[0].process.pid


def test_a_dead_worker_is_replaced_and_its_job_retried():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        executor.run([Job(code=ADD, tests=TESTS)])
        job = Job(code="import time\ndef add(a, b): return time.sleep(1) or a + b\n", tests=TESTS)
        future = executor.submit([job])
        os.kill(worker_with_a_job(executor), signal.SIGKILL)
        assert future.result()[0].status == "passed"


def test_infrastructure_when_workers_keep_dying():
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        executor.run([Job(code=ADD, tests=TESTS)])
        future = executor.submit([Job(code="import time\ndef add(a, b):\n    time.sleep(9)\n", tests=TESTS)])
        worker = None
        for _ in range(2):
            worker = worker_with_a_job(executor, killed=worker)
            os.kill(worker, signal.SIGKILL)
            assert gone([worker])
        verdict = future.result()[0]
        assert (verdict.status, verdict.passed, verdict.total) == ("infrastructure", 0, 2)


def test_a_job_that_no_worker_receives_has_a_verdict(monkeypatch):
    """As one that is too large for the memory that a worker may have."""
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        monkeypatch.setattr(wire, "send", fails_with_jobs)
        assert executor.run([Job(code=ADD, tests=TESTS)])[0].status == "infrastructure"


def fails_with_jobs(sock, frame, *largest, send=wire.send):
    if "total" in frame:
        raise BrokenPipeError
    send(sock, frame, *largest)


def test_close_ends_everything_and_is_final():
    executor = CodeExecutor(num_workers=2, isolation="best_effort")
    executor.run([Job(code=ADD, tests=TESTS)] * 4)
    pids = [worker.process.pid for worker in executor._pool.workers]
    pending = executor.submit([Job(code="while True: pass", tests=TESTS)])
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        pending.result()
    with pytest.raises(RuntimeError, match="closed"):
        executor.run([Job(code=ADD, tests=TESTS)])
    assert gone(pids)


def test_an_unreadable_answer_fails_whoever_waits(monkeypatch, caplog):
    def unreadable(*fields):
        raise TypeError("no such field")

    monkeypatch.setattr("marcog_trl.execution.pool.TestResult", unreadable)
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        future = executor.submit([Job("def f(): return 1", ["assert f() == 1"])])
        with pytest.raises(RuntimeError, match="the executor failed: no such field"):
            future.result(timeout=30)


def test_shared_executor_is_one():
    first = shared_executor(isolation="best_effort")
    assert shared_executor() is first and shared_executor(isolation="best_effort") is first
    with pytest.raises(ValueError, match="timeout"):
        shared_executor(timeout=first.timeout + 1)


def test_an_executor_that_is_dropped_ends_its_workers():
    executor = CodeExecutor(num_workers=1, isolation="best_effort")
    executor.run([Job(code=ADD, tests=TESTS)])
    pid = executor._pool.workers[0].process.pid
    del executor
    assert gone([pid])


def test_many_jobs_leave_nothing_behind(executor):
    programs = [ADD, "def add(a, b): return [a]", "def add(a, b)", "import os\ndef add(a, b): os._exit(1)"]
    jobs = [Job(code=code, tests=tests) for code in programs for tests in (TESTS, ["assert abs(add(1, 2)) == 3"])]

    def state():
        pids = [worker.process.pid for worker in executor._pool.workers]
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *pids)]
        memory = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids]
        return files, memory

    executor.run(jobs * 4)
    files, memory = state()
    executor.run(jobs * 40)
    later_files, later_memory = state()
    assert all(b <= a + 4 for a, b in zip(files, later_files, strict=True))
    assert all(b < a + (4 << 20) for a, b in zip(memory, later_memory, strict=True))


def test_workers_share_the_node(monkeypatch):
    monkeypatch.setattr("marcog_trl.execution.executor.available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert CodeExecutor(isolation="best_effort").num_workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert CodeExecutor(isolation="best_effort").num_workers == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "2")  # DeepSpeed's launcher
    assert CodeExecutor(isolation="best_effort").num_workers == 4


def test_command_line(tmp_path):
    (tmp_path / "add.py").write_text(ADD)
    (tmp_path / "tests.py").write_text("import math\nassert add(1, 2) == 3\nx = add(1, 1)\nassert x == 3\n")
    command = [sys.executable, "-m", "marcog_trl.execution", "add.py", "--isolation", "best_effort", "--tests"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "tests.py"], **options)
    assert done.returncode == 1 and "failed: 1 of 2 tests passed" in done.stdout and "2 == 3" in done.stdout
    (tmp_path / "empty.py").write_text("")
    done = subprocess.run([*command, "empty.py"], **options)
    assert done.returncode == 2 and "no tests" in done.stderr
