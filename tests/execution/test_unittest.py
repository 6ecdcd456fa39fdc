"""
Tests in the form of TestCase classes that depend on what the program does.

`honest/cases.txt` has those that run as under `unittest`: methods, order, fixtures, subtests and skips.
"""

from marcog_trl.execution import Job


PROGRAM = "calls = []\ndef f(x):\n    calls.append(x)\n    return x\ndef seen():\n    return list(calls)\n"
HEAD = "import unittest\n"


def test_a_skip_after_the_program_was_asked_does_not_excuse_it(executor):
    tests = HEAD + (
        "class A(unittest.TestCase):\n"
        "    def test_a(self):\n        if f(1) != 1: self.skipTest('not ready')\n"
        "    def test_b(self): self.assertEqual(2, 2)\n"
    )
    verdict = executor.run([Job("def f(x): return 0", tests, "unittest")])[0]
    assert (verdict.passed, verdict.total) == (1, 2) and "skipped: not ready" in verdict.message


def test_tests_that_are_all_skipped_pass_nobody(executor):
    tests = HEAD + "class A(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self): f(1)\n"
    verdict = executor.run([Job(PROGRAM, tests, "unittest")])[0]
    assert (verdict.status, verdict.passed, verdict.total) == ("failed", 0, 1) and "skipped" in verdict.message


def test_fixtures_run_again_for_the_process_that_follows_a_death(executor):
    program = "import os\nclass P:\n    def value(self, x):\n        if x == 2: os._exit(0)\n        return x\n"
    tests = HEAD + (
        "class A(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.p = P()\n"
        "    def test_a(self): self.assertEqual(self.p.value(1), 1)\n"
        "    def test_b(self): self.assertEqual(self.p.value(2), 2)\n"
        "    def test_c(self): self.assertEqual(self.p.value(3), 3)\n"
    )
    verdict = executor.run([Job(program, tests, "unittest")])[0]
    assert [test.status for test in verdict.tests] == ["passed", "error", "passed"]
    in_fixture = tests.replace("P()", "P().value(2)")
    assert executor.run([Job(program, in_fixture, "unittest")])[0].passed == 0


def test_a_class_fixture_that_fails_at_the_end_fails_the_last_test(executor):
    tests = HEAD + (
        "class A(unittest.TestCase):\n    @classmethod\n    def tearDownClass(cls): f(None).missing\n"
        "    def test_a(self): self.assertEqual(f(1), 1)\n    def test_b(self): self.assertEqual(f(1), 1)\n"
    )
    later = "class B(unittest.TestCase):\n    def test_c(self): self.assertEqual(f(1), 1)\n"
    for more, expected in (("", ["passed", "failed"]), (later, ["passed", "failed", "passed"])):
        verdict = executor.run([Job(PROGRAM, tests + more, "unittest")])[0]
        assert [test.status for test in verdict.tests] == expected
