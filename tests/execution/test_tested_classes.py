"""Classes that the tests use by their names: their operators are asked, but they cannot lie."""

import pytest

from marcog_trl.execution import CodeExecutor, Job


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=5.0, isolation="best_effort") as executor:
        yield executor


HONEST = """
class P:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return isinstance(o, P) and self.x == o.x
    def __hash__(self): return hash(self.x)
    def __lt__(self, o): return self.x < o.x
    def __add__(self, o): return P(self.x + (o.x if isinstance(o, P) else o))
    def __mul__(self, k): return P(self.x * k)
    __rmul__ = __mul__
    def __contains__(self, k): return k == self.x
class Q(P): pass
def make(x): return P(x)
"""
LIES = {
    "equal to all": ("__eq__ = lambda s, o: True", "assert P(1) == P(2)"),
    "equal to all, negated": ("__eq__ = lambda s, o: True", "assert P(1) != P(2)"),
    "equal to all, as key": (
        "__eq__ = lambda s, o: True\n    __hash__ = lambda s: 1",
        "assert len({P(1), P(2)}) == 1",
    ),
    "equal to a number": ("__eq__ = lambda s, o: True", "assert make(1) == 41"),
    "unequal to none": ("__ne__ = lambda s, o: False", "assert P(1) == P(2)"),
    "less than all": ("__lt__ = lambda s, o: True", "assert P(2) < P(1)"),
    "less than all, sorted": ("__lt__ = lambda s, o: True", "assert [p.x for p in sorted([P(2), P(1)])] == [1, 2]"),
    "less than a number": ("__lt__ = lambda s, o: True", "assert make(1) < 41"),
    "as near as wanted": ("__sub__ = lambda s, o: 0", "assert abs(make(1) - 41) < 1e-6"),
    "as near as wanted, turned": ("__rsub__ = lambda s, o: 0", "assert abs(41 - make(1)) < 1e-6"),
    "any ratio": ("__truediv__ = lambda s, o: 1.0", "assert make(1) / 41 == 1"),
    "any sum": ("__add__ = lambda s, o: 42", "assert make(1) + 1 == 42"),
    "holds all": (
        "__contains__ = lambda s, k: True",
        "x = make(1)\ntry: 41 in x\nexcept TypeError: pass\nassert 41 in x",
    ),
}


def test_operators_of_a_class_under_test(executor):
    tests = [
        "assert P(1) == P(1) and P(1) != P(2) and not P(1) == P(2)",
        "assert P(1) + P(2) == P(3) and (P(1) + 2).x == 3",
        "assert (P(2) * 3).x == 6 and (3 * P(2)).x == 6",
        "assert [p.x for p in sorted([P(2), P(1)])] == [1, 2] and max(P(1), P(3)).x == 3",
        "assert len({P(1), P(1)}) == 1 and {P(1): 'a'}[P(1)] == 'a' and P(3) in [P(1), P(3)]",
        "assert [P(1), P(2)].index(P(2)) == 1 and make(4) == P(4) and Q(1) + Q(2) == P(3)",
        "assert 5 in P(5)",
    ]
    assert [test.message for test in executor.run([Job(HONEST, tests)])[0].tests] == [""] * 7


@pytest.mark.parametrize("name", LIES)
def test_lies_of_a_class_under_test(executor, name):
    lie, test = LIES[name]
    code = f"class P:\n    def __init__(self, x): self.x = x\n    {lie}\ndef make(x): return P(x)\n"
    verdict = executor.run([Job(code, ["assert P(1).x == 1", test])])[0]
    assert [result.status for result in verdict.tests] == ["passed", "failed"], verdict


def test_a_class_that_the_tests_do_not_name_has_no_word(executor):
    tests = ["assert make(1) + 2 is not None", "assert make(1) == make(1)", "assert make(1) < make(2)"]
    assert executor.run([Job(HONEST, tests, entry_point="make")])[0].passed == 0
