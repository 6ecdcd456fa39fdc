"""Checks that need no library."""

import pytest

from marcog_trl.checks import returns_value


def ends(x):
    yield x


def stops(x):
    for _ in range(3):
        if (yield x):
            return
    return None


def cleans_up(x):
    try:
        yield x
    finally:
        print(x)


def returns_a_name(x):
    reply = yield x
    return reply


def returns_a_literal(x):
    yield x
    return ""


def returns_or(x):
    return (yield x) or None


def returns_in_a_loop(x):
    while True:
        try:
            if (yield x):
                return x
        except ValueError:
            return None


def delegates(x):
    return (yield from ends(x))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        *((function, False) for function in (ends, stops, cleans_up)),
        *(
            (function, True)
            for function in (returns_a_name, returns_a_literal, returns_or, returns_in_a_loop, delegates)
        ),
    ],
)
def test_returns_value(function, expected):
    assert returns_value(function) is expected
