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
        ("assert 'ab' != f()", "assert 'ab' != f()"),
        ("assert f(None) is None", "assert f(None) is None"),
        ("assert not f(0)", "assert not f(0)"),
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
        "assert f(1) == 2 and aux(1)",  # another function of the program
        "import random\nassert f(1) == random.random()",
        "assert f(1) == __import__('os').getpid()",
        "assert f(open('x')) == 2",
        "assert f(lambda: 1) == 2",
        "assert f(x for x in [1]) == 2",
        "assert f(y := 1) == 2",
        "assert f(f'{1}') == 2",
        "assert f(1) == 2, print(1)",
        "assert f(1).real == 1",
        "assert f(f(1)) == 2",
        "assert abs(f(2) - 1.414) < 1e-3",
    ],
)
def test_asserts_that_may_look_at_anything_else(reply):
    assert assert_in(reply, "f") is None


def test_deep_nesting_is_no_error():
    assert assert_in(f"assert f(1) == {'-' * 50_000}1", "f") is None
    assert assert_in("assert f(1) == " + "(" * 500 + ")" * 500, "f") is None
