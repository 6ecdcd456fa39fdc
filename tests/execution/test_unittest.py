"""Tests in the form of TestCase classes: the methods, order, fixtures and skips of `unittest`."""

import pytest
from honest import natively

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.jobs import plan


PROGRAM = "calls = []\ndef f(x):\n    calls.append(x)\n    return x\ndef seen():\n    return list(calls)\n"
HEAD = "import unittest\n"
# Tests, which are also run under unittest itself
CASES = {
    "inherited methods": (
        "class Base(unittest.TestCase):\n    n = 1\n    def test_value(self): self.assertEqual(f(self.n), self.n)\n"
        "    def test_one(self): self.assertEqual(f(self.n), 1)\n"
        "class Three(Base):\n    n = 3\n"
    ),
    "a mixin": (
        "class Mixin:\n    n = 1\n    def test_value(self): self.assertEqual(f(self.n), self.n)\n"
        "class A(Mixin, unittest.TestCase):\n    def test_more(self): self.assertEqual(f(2), 2)\n"
        "class B(A):\n    n = 5\n    test_more = None\n"
    ),
    "methods that the text does not show": (
        "class A(unittest.TestCase): pass\n"
        "for k in range(4):\n    setattr(A, f'test_{k}', lambda self, k=k: self.assertLess(f(k), 3))\n"
    ),
    "a base class that is computed": (
        "def base(n):\n    class Base(unittest.TestCase):\n        def test_n(self): self.assertEqual(f(n), 2)\n    return Base\n"
        "class A(base(2)): pass\nclass B(base(3)): pass\n"
    ),
    "load_tests": (
        "class A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
        "    def test_b(self): self.assertEqual(f(1), 2)\n"
        "def load_tests(loader, tests, pattern): return unittest.TestSuite([unittest.TestSuite([A('test_a')])])\n"
    ),
    "order": (
        "class Z(unittest.TestCase):\n    def test_last(self): self.assertEqual(seen(), [1, 2])\n"
        "class A(unittest.TestCase):\n    def test_b(self): self.assertEqual((seen(), f(2)), ([1], 2))\n"
        "    def test_a(self): self.assertEqual((seen(), f(1)), ([], 1))\n"
    ),
    "fixtures": (
        "log = []\ndef setUpModule(): log.append('module')\n"
        "class A(unittest.TestCase):\n"
        "    @classmethod\n    def setUpClass(cls):\n        cls.value = f(7)\n        log.append('class')\n"
        "        cls.addClassCleanup(log.append, 'class cleanup')\n"
        "    @classmethod\n    def tearDownClass(cls): log.append('class end')\n"
        "    def setUp(self):\n        log.append('test')\n        self.addCleanup(log.append, 'cleanup')\n"
        "    def tearDown(self): log.append('test end')\n"
        "    def test_a(self): self.assertEqual((self.value, seen(), log), (7, [7], ['module', 'class', 'test']))\n"
        "    def test_b(self): self.assertEqual(log[3:], ['test end', 'cleanup', 'test'])\n"
        "class B(unittest.TestCase):\n"
        "    def test_a(self): self.assertEqual(log[-2:], ['class end', 'class cleanup'])\n"
    ),
    "a class fixture that fails": (
        "class A(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): raise ValueError('not ready')\n"
        "    def test_a(self): self.assertEqual(f(1), 1)\n    def test_b(self): self.assertEqual(f(1), 1)\n"
        "class B(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
    ),
    "a module fixture that fails": (
        "def setUpModule(): raise ValueError('not ready')\n"
        "class A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
        "class B(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
    ),
    "a cleanup that fails": (
        "class A(unittest.TestCase):\n    def test_a(self): self.addCleanup(self.assertEqual, f(1), 2)\n"
        "    def test_b(self): self.addCleanup(self.assertEqual, f(1), 1)\n"
    ),
    "subtests": (
        "class A(unittest.TestCase):\n    def test_a(self):\n        for k in range(3):\n"
        "            with self.subTest(k=k): self.assertEqual(f(k), 1)\n"
        "    def test_b(self):\n        for k in range(3):\n            with self.subTest(k=k): self.assertEqual(f(k), k)\n"
    ),
    "expected failures": (
        "class A(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(1), 2)\n"
        "    @unittest.expectedFailure\n    def test_b(self): self.assertEqual(f(1), 1)\n"
    ),
    "asynchronous tests": (
        "class A(unittest.IsolatedAsyncioTestCase):\n    async def asyncSetUp(self): self.x = f(1)\n"
        "    async def test_a(self): self.assertEqual(self.x, 1)\n    async def test_b(self): self.assertEqual(self.x, 2)\n"
    ),
    "skips": (
        "@unittest.skip('all')\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
        "class B(unittest.TestCase):\n    @unittest.skipIf(True, 'one')\n    def test_a(self): self.assertEqual(f(1), 2)\n"
        "    def test_b(self): self.skipTest('two')\n    def test_c(self): self.assertEqual(f(1), 1)\n"
        "    def test_d(self): self.assertEqual(f(1), 2)\n"
        "class C(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): raise unittest.SkipTest('three')\n"
        "    def test_a(self): self.assertEqual(f(1), 1)\n    def test_b(self): self.assertEqual(f(1), 1)\n"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=5.0, isolation="best_effort") as executor:
        yield executor


@pytest.mark.parametrize("name", CASES)
def test_as_under_unittest(executor, name):
    job = Job(PROGRAM, HEAD + CASES[name], "unittest")
    verdict = executor.run([job])[0]
    expected = natively(PROGRAM, HEAD + CASES[name], "unittest", None)
    assert [test.status == "passed" for test in verdict.tests] == expected, verdict
    assert verdict.total == len(expected) and expected


def test_methods_are_named_in_the_order_in_which_they_run():
    tests = HEAD + CASES["a mixin"] + "class C(Unknown): \n    def test_z(self): pass\n"
    assert plan(Job(PROGRAM, tests, "unittest")).names == ("A.test_more", "A.test_value", "B.test_value")


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
