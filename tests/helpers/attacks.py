"""Runs the programs of `tests/execution/cases/*.json` and says which of them achieve what they must not. It needs no test
framework, so that it also runs as another user: `python attacks.py FILE ISOLATION [NAME ...]` prints what was wrong as JSON.

A case has `code` (a text, or pieces with the number of their repetitions), `tests`, `test_format`, options of a job, and
`expect`: `none` (no more than `max_passed` tests may pass), `refused` (the tests pass, because what the program tries was
refused), `sibling` (the program `sibling` gets the verdict after it that it gets alone), or a list of statuses, one of which
the job must have. With `ways`, each test also runs alone, and all of them under a judge.
"""

import json
import os
import sys
from pathlib import Path

from watching import children, is_idle, run_in_time

from marcog_trl.execution import CodeExecutor, Job


FOLDER = Path(__file__).parents[1] / "execution" / "cases"
LIMIT = 2.0  # seconds, where a case has no limit of its own
JUDGED = "def same(a, b): return a == b"  # a set-up that does something: the tests need a judge
GOOD = Job("def f(x): return x + 1", ["assert f(1) == 2", "assert same(f(2), 3)"], setup=JUDGED)
OPTIONS = ("setup", "entry_point", "memory_mb", "files")


def load(file):
    """The cases of a file, by name."""
    return {case["name"]: case for case in json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))}


def jobs_of(case, code=None):
    """The jobs that a case stands for."""
    code = case["code"] if code is None else code
    code = code if isinstance(code, str) else "".join(piece * count for piece, count in code)
    options = {key: case[key] for key in OPTIONS if key in case}
    options |= {"test_format": case["test_format"], "timeout": case.get("timeout", LIMIT)}
    tests = case["tests"] if isinstance(case["tests"], str) else [_test(test) for test in case["tests"]]
    found = [Job(code, tests, **options)] * case.get("repeat", 1)
    if case.get("ways"):
        options.pop("setup", None)
        found += [Job(code, tests, setup=JUDGED, **options)]
        if len(tests) > 1:
            found += [Job(code, [test], setup=setup, **options) for test in tests for setup in ("", JUDGED)]
    return found


def _test(test):
    return tuple(test) if isinstance(test, list) else test


class Attacked:
    """An executor with one worker, on which cases are tried one after another."""

    def __init__(self, isolation):
        os.environ["MARCOG_CANARY_TOKEN"] = "canary"
        self.executor = CodeExecutor(num_workers=1, timeout=LIMIT, isolation=isolation)
        del os.environ["MARCOG_CANARY_TOKEN"]
        (good,) = self.executor.run([GOOD])
        assert good.status == "passed", good
        self.worker = self.pid()
        self.descriptors = len(os.listdir(f"/proc/{self.worker}/fd"))

    def pid(self):
        return self.executor._pool.workers[0].process.pid

    def run(self, job):
        verdict = run_in_time(self.executor, job, job.timeout + 1.0)
        if verdict.status == "infrastructure":
            self.wrong.append("the program has itself excused")
        return verdict

    def attack(self, case):
        """What a case achieved; empty if nothing."""
        self.wrong = []
        try:
            self.attempt(case)
        except AssertionError as error:  # a verdict that took too long
            self.wrong.append(str(error))
        self.leaves_nothing()
        return "; ".join(self.wrong)

    def attempt(self, case):
        if case["expect"] == "sibling":
            sibling = jobs_of(case, case["sibling"])[0]
            alone = self.run(sibling)
            for job in jobs_of(case):
                self.run(job)
            after = self.run(sibling)
            if [test.status for test in after.tests] != [test.status for test in alone.tests]:
                self.wrong.append(f"the sibling's verdict changed from {alone} to {after}")
            return
        for job in jobs_of(case):
            verdict = self.run(job)
            if case["expect"] == "refused" and verdict.status != "passed":
                self.wrong.append(f"it was not refused: {verdict}")
            if case["expect"] == "none" and verdict.passed > case.get("max_passed", 0):
                self.wrong.append(f"passed wrongly: {verdict} {job.tests}")
        if isinstance(case["expect"], list) and verdict.status not in case["expect"]:
            self.wrong.append(f"expected {case['expect']}: {verdict}")

    def leaves_nothing(self):
        (good,) = self.executor.run([GOOD])
        if good.status != "passed":
            self.wrong.append(f"a good program does not pass afterwards: {good}")
        worker = self.pid()
        if worker != self.worker:
            self.worker = worker
            self.wrong.append("the worker was lost")
            self.executor.run([GOOD])
        if not is_idle(worker):
            self.wrong.append("processes are left")
        if len(os.listdir(f"/proc/{worker}/fd")) > self.descriptors + 2 + 6 * (len(children(worker)) - 1):
            self.wrong.append("descriptors are left in the worker")
        self.wrong += left_behind()

    def close(self):
        self.executor.close()


def left_behind():
    """Files of the programs, and System V objects under their key."""
    folders = [Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") if Path(folder).is_dir()]
    found = [str(path) for folder in folders for path in folder.glob("*marcog_c[ah][ne][ae]*")]
    for kind in ("shm", "sem", "msg"):
        table = Path(f"/proc/sysvipc/{kind}")
        if table.exists():
            found += [line for line in table.read_text().splitlines()[1:] if int(line.split()[0]) == 0x6D617263]
    return found


def main(file, isolation, names):
    attacked = Attacked(isolation)
    cases = load(file)
    found = {name: attacked.attack(cases[name]) for name in names or cases}
    attacked.close()
    print(json.dumps({name: wrong for name, wrong in found.items() if wrong}, indent=1))


if __name__ == "__main__":
    if os.environ.get("ATTACK_AS_NOBODY"):
        os.setgid(65534)
        os.setuid(65534)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
