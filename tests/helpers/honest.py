"""Honest programs and their tests, from `tests/execution/honest/`. As a script, it prints their results in plain Python.

A program begins with `=== name`, followed by ` : format entry_point` if its tests are not asserts. Below `---` are the tests.
For `stdio`, each test is a line `stdin -> stdout` of two literals.
"""

import ast
import io
import json
import os
import subprocess
import sys
import types
import unittest
import warnings
from pathlib import Path


FOLDER = Path(__file__).parents[1] / "execution" / "honest"
LIMIT = 10  # seconds for a program


def programs():
    """All programs: name, code, format, entry point and tests."""
    found = {}
    for path in sorted(FOLDER.glob("*.txt")):
        for block in ("\n" + path.read_text()).split("\n=== ")[1:]:
            title, _, rest = block.partition("\n")
            name, _, options = title.partition(" : ")
            test_format, entry_point = [*options.split(), None, None][:2]
            code, _, tests = rest.partition("\n---\n")
            assert name not in found and tests.strip(), name
            found[name] = (code, split(tests, test_format or "asserts"), test_format or "asserts", entry_point)
    for case in json.loads((FOLDER / "more.json").read_text(encoding="utf-8")):
        tests = case["tests"] if isinstance(case["tests"], str) else [_test(test) for test in case["tests"]]
        assert case["name"] not in found
        found[case["name"]] = (case["code"], tests, case["test_format"], case.get("entry_point"))
    return found


def _test(test):
    return tuple(test) if isinstance(test, list) else test


def split(tests, test_format):
    if test_format in ("check", "unittest"):
        return tests
    if test_format == "stdio":
        return [tuple(map(ast.literal_eval, line.split(" -> "))) for line in tests.strip().splitlines()]
    lines, cut, start = tests.splitlines(), [], 0
    for node in ast.parse(tests).body:
        if isinstance(node, ast.Assert):
            cut.append("\n".join(lines[start : node.end_lineno]))
            start = node.end_lineno
    return cut


def natively(code, tests, test_format, entry_point):
    """Whether each test passes; one answer for a whole `check`."""
    if test_format == "stdio":
        command = [sys.executable, "-c", code]
        done = [subprocess.run(command, input=a, capture_output=True, text=True, check=False) for a, _ in tests]
        return [d.returncode == 0 and d.stdout.split() == b.split() for d, (_, b) in zip(done, tests, strict=True)]
    module = sys.modules["tests"] = types.ModuleType("tests")
    exec(compile(code, "<program>", "exec"), vars(module))
    if test_format == "unittest":
        return run_cases(module, tests)
    results = []
    if test_format == "check":
        exec(tests, vars(module))
        tests = [f"check({entry_point})"]
    for test in tests:
        try:
            exec(compile(test, "<tests>", "exec"), vars(module))
            results.append(True)
        except BaseException:
            results.append(False)
    return results


def run_cases(module, tests):
    """Whether each test succeeds, in the order in which it ran; those that were skipped are left out."""
    exec(compile(tests, "<tests>", "exec"), vars(module))
    suite = unittest.TestLoader().loadTestsFromModule(module)
    order = [case.id().removeprefix("tests.") for group in suite for case in group]
    result = unittest.TextTestRunner(stream=io.StringIO(), warnings="ignore").run(suite)
    wrong = {case.id() for case, _ in [*result.failures, *result.errors]} | {
        c.id() for c in result.unexpectedSuccesses
    }
    skipped = {case.id() for case, _ in result.skipped}

    def ended(name, ids):
        """Whether a test, one of its subtests, or the fixture of its class or module, is among those."""
        fixture = f"(tests.{name.partition('.')[0]})"
        return any(i.startswith(f"tests.{name}") or i.endswith(fixture) or i == "setUpModule (tests)" for i in ids)

    return [not ended(name, wrong) for name in order if not ended(name, skipped)]


def main():
    warnings.simplefilter("default")
    found = {}
    for name, program in programs().items():
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")
            try:
                answer = natively(*program)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            found[name] = json.loads(pipe.read() or '"died"')
        os.waitpid(pid, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
