"""Reading the one assert that a tester writes."""

import pytest

from marcog_trl.parsing.asserts import assert_in


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("assert f(1) == 2", "assert f(1) == 2"),
        ("Here it is:\n\n```python\nassert f([1], k=2) == {'a': (1, -2.5)}\n```\nDone.", "assert f([1], k=2) == {'a': (1, -2.5)}"),
        ("assert f(1) == 2\nassert f(2) == 3", "assert f(1) == 2"),
        ("x = 1\nassert (\n    f(1)\n    == 2\n), 'two'", "assert (\n    f(1)\n    == 2\n), 'two'"),
        ("assert abs(f(2) - 1.414) < 1e-3", "assert abs(f(2) - 1.414) < 1e-3"),
        ("assert all(f(x) == y for x, y in [(1, 2), (2, 3)])", "assert all(f(x) == y for x, y in [(1, 2), (2, 3)])"),
        ("assert [f(x)[0] for x in range(3)] == [0, 1, 2]", "assert [f(x)[0] for x in range(3)] == [0, 1, 2]"),
        (
            "assert f('ab') == '-'.join(map(str, [i for i, c in enumerate('ab'.upper())]))",
            "assert f('ab') == '-'.join(map(str, [i for i, c in enumerate('ab'.upper())]))",
        ),
        ("assert isinstance(f(1), int) and not f(0)", "assert isinstance(f(1), int) and not f(0)"),
        ("assert sorted(f('ab'), key=len, reverse=True) == ['ab']", "assert sorted(f('ab'), key=len, reverse=True) == ['ab']"),
    ],
)  # fmt: skip
def test_asserts_about_what_a_function_returns(reply, found):
    assert assert_in(reply, "f") == found


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot.",
        "assert f(1) ==",
        "assert False",
        "assert 1 == 2",
        "assert g(1) == 2",
        "def f(x):\n    assert f(1) == 2",
        "if True:\n    assert f(1) == 2",
    ],
)
def test_replies_without_an_assert_about_the_function(reply):
    assert assert_in(reply, "f") is None


@pytest.mark.parametrize(
    "reply",
    [
        "assert f.__code__.co_consts == (None, 2) or f(1) == 2",  # the source in place of the result
        "assert f(1) == 2 and 'max' in f.__code__.co_names",
        "assert f(1) == 2 and aux(1)",  # another function of the program
        "assert f(1) == 2 and len(str(f)) > 3",  # an address
        "assert f(1) == 2 and sorted([1], key=f)",
        "import random\nassert f(1) == random.random()",
        "assert f(1) == 2 and random.random() < 0.5",
        "assert f(1) == __import__('os').getpid()",
        "assert f(1) == 2 and id(f) % 32",
        "assert f(1) == 2 and open('x')",
        "assert f(1) == 2 and hash(object()) % 32",
        "assert f(lambda: 1) == 2",
        "assert f(1) == 2 and '%s' % (x for x in [])",  # the address of a generator
        "assert f(x for x in [1]) == 2",
        "assert f(1) == 2 and str(map(str, [])) > ''",
        "assert f(zip([1])) == 2",
        "assert f(1) == 2 and '{0}'.format(zip())",
        "assert f(1) == 2 and [x.upper for x in 'a']",
        "assert f.count(1) == f(1)",
        "assert sum(*(x for x in [[1]])) == f(1)",
        "assert f(1) == 2 and [id for id in [1]] and sorted([f(1)], key=id)",
        "assert f(1) == 2 and [aux for aux in [1]] and str(aux)",
        "assert f(1) == 2 and [f for f in [1]]",
        "assert f(1) == 2 and [len for len in [1]]",
        "assert f(y := 1) == 2",
        "assert f(f'{1}') == 2",
        "assert f(1) == 2, print(1)",
        "assert ().__class__.__base__.__subclasses__() and f(1) == 2",
        "assert f(1).real == 1",
    ],
)  # fmt: skip
def test_asserts_that_may_look_at_anything_else(reply):
    assert assert_in(reply, "f") is None


def test_deep_nesting_is_no_error():
    assert assert_in(f"assert f(1) == {'-' * 50_000}1", "f") is None
    assert assert_in("assert f(1) == " + "(" * 500 + ")" * 500, "f") is None
