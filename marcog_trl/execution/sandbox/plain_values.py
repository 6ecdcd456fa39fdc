"""Classes that derive from a builtin value type, and the values that their instances hold."""

import collections
import datetime
import decimal
import fractions
from typing import Any


def _datetime(value: datetime.datetime) -> datetime.datetime:
    parts = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    return datetime.datetime(*parts, value.tzinfo, fold=value.fold)


def _dict(kind: type) -> Any:
    return lambda value: kind(dict(dict.items(value)))


# a class is looked up by its bases, nearest first
PLAIN_VALUE: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: lambda value: bytearray(memoryview(value)),
    dict: _dict(dict),
    collections.Counter: _dict(collections.Counter),
    collections.OrderedDict: lambda value: collections.OrderedDict(collections.OrderedDict.items(value)),
    collections.defaultdict: lambda value: collections.defaultdict(None, dict(dict.items(value))),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value), value.maxlen),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    datetime.datetime: _datetime,
    datetime.date: lambda value: datetime.date(value.year, value.month, value.day),
    datetime.timedelta: lambda value: datetime.timedelta(value.days, value.seconds, value.microseconds),
    decimal.Decimal: lambda value: decimal.Decimal(value),
    fractions.Fraction: lambda value: fractions.Fraction(value.numerator, value.denominator),
}
IMMUTABLE = {kind.__name__: kind for kind in (int, float, complex, str, bytes, tuple, frozenset)}
"""Types whose instances' values a handle can hold itself."""


def plain_base(kind: type) -> Any:
    """The builtin value type that a class derives from; `None` if there is none."""
    return next((base for base in kind.__mro__ if base in PLAIN_VALUE), None)


def plain(value: Any) -> Any:
    """The builtin value that an instance of a class derived from one holds."""
    return PLAIN_VALUE[plain_base(type(value))](value)
