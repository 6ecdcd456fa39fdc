"""Classes that derive from a builtin value type, and the values that their instances hold."""

import types
from typing import Any


PLAIN_VALUE: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: lambda value: bytearray(memoryview(value)),
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
IMMUTABLE = frozenset((int, float, complex, str, bytes, tuple, frozenset))
# Types that the tests have too, without a way to make the program's instances of them
COMMON_TYPES: tuple[type, ...] = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def plain_base(kind: type) -> Any:
    """The builtin value type that a class derives from; `None` if there is none."""
    return next((base for base in kind.__mro__ if base in PLAIN_VALUE), None)


def plain(value: Any) -> Any:
    """The builtin value that an instance of a class derived from one holds."""
    base = plain_base(type(value))
    if base is None:
        raise TypeError(f"{type(value).__name__} has no plain value")
    return PLAIN_VALUE[base](value)
