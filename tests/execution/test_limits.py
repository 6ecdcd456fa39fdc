"""Time that programs may take: CPU time decides, and wall-clock time ends those that wait."""

import pytest

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.sandbox import limits


class Clock:
    """A machine on which a program gets a share of the CPU."""

    def __init__(self, monkeypatch):
        self.now, self.spent = 1000.0, 3.0
        monkeypatch.setattr(limits.time, "monotonic", lambda: self.now)

    def run(self, allowance, share, until=1e9):
        """Seconds until time is up, of a program that has this share of the CPU."""
        begin = self.now
        while self.now - begin < until:
            wait = max(0.0, allowance.look - self.now)
            self.now, self.spent = self.now + wait, self.spent + share * wait
            if allowance.is_used_up():
                break
        return self.now - begin


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 4.0), (0.5, 8.0), (0.2, 20.0), (0.05, 40.0), (0.0, 4.0)])
def test_cpu_time_decides(monkeypatch, share, seconds):
    clock = Clock(monkeypatch)
    allowance = limits.Allowance(4.0, lambda: clock.spent)
    assert clock.run(allowance, share) == pytest.approx(seconds, abs=0.02)


def test_a_program_that_begins_to_wait(monkeypatch):
    clock = Clock(monkeypatch)
    allowance = limits.Allowance(4.0, lambda: clock.spent)
    busy = clock.run(allowance, 0.25, until=9.0)
    assert not allowance.is_used_up()
    assert clock.run(allowance, 0.0) == pytest.approx(2.0, abs=0.02), busy


def test_a_test_ends_with_its_job(monkeypatch):
    clock = Clock(monkeypatch)
    job = limits.Allowance(4.0, lambda: clock.spent)
    assert clock.run(limits.Allowance(1.0, lambda: clock.spent, job), 0.5) == pytest.approx(2.0, abs=0.02)
    assert not job.is_used_up()
    assert clock.run(limits.Allowance(60.0, lambda: clock.spent, job), 0.5) == pytest.approx(6.0, abs=0.02)
    assert job.is_used_up() and job.left == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("setup", ["", "judged = True"])
def test_a_job_may_take_longer_than_its_cpu_time(setup):
    """A program with little of the CPU passes; one that computes, sleeps or starts over and over does not."""
    slow = "import time\ndef f(x):\n    for _ in range(15):\n        time.sleep(0.1)\n        sum(range(1_000_000))\n    return x + 1"
    loops = "def f(x):\n    while True: pass"
    sleeps = "import time\ndef f(x): time.sleep(600)"
    tests = ["assert f(1) == 2"]
    with CodeExecutor(num_workers=1, timeout=1.0, isolation="best_effort") as executor:
        jobs = [Job(code, tests, setup=setup) for code in (slow, loops, sleeps)]
        assert [verdict.status for verdict in executor.run(jobs)] == ["passed", "timeout", "timeout"]
        (verdict,) = executor.run([Job(loops, tests * 9, setup=setup)])
        assert [test.status for test in verdict.tests] == ["timeout"] + ["skipped"] * 8


def test_scripts_of_a_job_share_its_cpu_time():
    code = (
        "end = __import__('time').process_time() + 0.4\nwhile __import__('time').process_time() < end: pass\nprint(1)"
    )
    with CodeExecutor(num_workers=1, timeout=1.0, isolation="best_effort") as executor:
        (verdict,) = executor.run([Job(code, [("", "1")] * 9, "stdio")])
    assert [test.status for test in verdict.tests] == ["passed"] * 2 + ["timeout"] + ["skipped"] * 6
