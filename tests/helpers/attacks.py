"""Runs the attacks of `attacks_2.json` and says which of them succeed. It needs no test framework, so that it also runs as
another user: `python attacks.py ISOLATION [NAME ...]` prints what was wrong, by name, as JSON.

An attack has `expect`: `none` (no more than `max_passed` tests may pass), `refused` (the tests pass, because what the
program tries was refused), `sibling` (the program `sibling` gets the verdict after it that it gets alone).
"""

import json
import os
import sys
from pathlib import Path

from watching import children, is_idle, run_in_time

from marcog_trl.execution import CodeExecutor, Job


FILE = Path(__file__).parents[1] / "execution" / "attacks_2.json"
ATTACKS = {case["name"]: case for case in json.loads(FILE.read_text())}
LIMIT = 2.0  # seconds, where an attack has no limit of its own
GOOD = Job(
    "def f(x): return x + 1", ["assert f(1) == 2", "assert same(f(2), 3)"], setup="def same(a, b): return a == b"
)


def job(case, code=None):
    options = {key: case[key] for key in ("setup", "entry_point", "memory_mb") if key in case}
    tests = [tuple(test) if isinstance(test, list) else test for test in case["tests"]]
    tests = case["tests"] if isinstance(case["tests"], str) else tests
    return Job(code or case["code"], tests, case["test_format"], timeout=case.get("timeout", LIMIT), **options)


class Attacked:
    """An executor with one worker, on which attacks are tried one after another."""

    def __init__(self, isolation):
        self.executor = CodeExecutor(num_workers=1, timeout=LIMIT, isolation=isolation)
        (good,) = self.executor.run([GOOD])
        assert good.status == "passed", good
        self.worker = self.executor._pool.workers[0].process.pid
        self.descriptors = len(os.listdir(f"/proc/{self.worker}/fd"))

    def run(self, job):
        verdict = run_in_time(self.executor, job, job.timeout + 1.0)
        if verdict.status == "infrastructure":
            self.wrong.append("the program has itself excused")
        return verdict

    def attack(self, case):
        """What an attack achieved; empty if nothing."""
        self.wrong = []
        try:
            self.attempt(case)
        except AssertionError as error:  # a verdict that took too long
            self.wrong.append(str(error))
        self.leaves_nothing()
        return "; ".join(self.wrong)

    def attempt(self, case):
        if case["expect"] == "sibling":
            self.executor.run([GOOD])  # other tests end the judge of the last attack
            alone = self.run(job(case, case["sibling"]))
            self.executor.run([GOOD])
            self.run(job(case))
            after = self.run(job(case, case["sibling"]))
            if [test.status for test in after.tests] != [test.status for test in alone.tests]:
                self.wrong.append(f"the sibling's verdict changed from {alone} to {after}")
        else:
            for _ in range(case.get("repeat", 1)):
                verdict = self.run(job(case))
                if case["expect"] == "refused" and verdict.status != "passed":
                    self.wrong.append(f"it was not refused: {verdict}")
                if case["expect"] == "none" and verdict.passed > case.get("max_passed", 0):
                    self.wrong.append(f"passed wrongly: {verdict}")

    def leaves_nothing(self):
        (good,) = self.executor.run([GOOD])
        if good.status != "passed":
            self.wrong.append(f"a good program does not pass afterwards: {good}")
        worker = self.executor._pool.workers[0].process.pid
        if worker != self.worker:
            self.worker = worker
            self.wrong.append("the worker was lost")
            self.executor.run([GOOD])
        if not is_idle(worker):
            self.wrong.append("processes are left")
        if len(os.listdir(f"/proc/{worker}/fd")) > self.descriptors + 2 + 6 * (len(children(worker)) - 1):
            self.wrong.append("descriptors are left in the worker")

    def close(self):
        self.executor.close()


def main(isolation, names):
    attacked = Attacked(isolation)
    found = {name: attacked.attack(ATTACKS[name]) for name in names or ATTACKS}
    attacked.close()
    print(json.dumps({name: wrong for name, wrong in found.items() if wrong}, indent=1))


if __name__ == "__main__":
    if os.environ.get("ATTACK_AS_NOBODY"):
        os.setgid(65534)
        os.setuid(65534)
    main(sys.argv[1], sys.argv[2:])
