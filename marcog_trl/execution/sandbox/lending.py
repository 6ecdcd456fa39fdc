"""Lends objects of the tests to the program: how they are described to it, and what it may do with them."""

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import errors, special, wire


# Modules of the classes whose objects the program may use beyond calling them
_LENT_MODULES = frozenset(("tests", "_io", "unittest.mock"))
_LENT = frozenset(special.SPECIAL) - {"__eq__", "__ne__", "__hash__", "__class_getitem__", "__next__"}


def write(value: Any, number: int, encode: Callable[[Any], Any]) -> list:
    """Describes an object of the tests to the program; raises Uncrossable."""
    kind = type(value)
    if isinstance(value, type) and issubclass(value, BaseException):
        name = value.__name__
        if errors.standard(value.__module__, name) is value:
            return ["S", value.__module__, name]
        return ["ek", number, name, [encode(base) for base in value.__bases__]]
    if isinstance(value, BaseException):
        return ["er", number, encode(kind), encode(value.args), str(value)]
    if kind in (types.FunctionType, types.MethodType, types.BuiltinFunctionType) or isinstance(value, type):
        return ["cb", number, str(getattr(value, "__name__", "callback")), _parameters(value)]
    if kind is re.Pattern:
        return ["re", number, encode(value.pattern), value.flags]
    if is_lent(value):
        names = {name for each in kind.__mro__ if each is not object for name in vars(each)}
        return ["ob", number, kind.__name__, sorted(names & (_LENT | {"__next__"}))]
    if callable(value):
        return ["cb", number, kind.__name__, None]
    if isinstance(value, Iterator):
        return ["it", number]
    raise wire.Uncrossable(f"an object of type {kind.__name__}")


def is_lent(thing: Any) -> bool:
    """Whether the program may use an object of the tests beyond calling it."""
    kind = type(thing)
    if kind is object:
        return True
    cases = sys.modules.get("unittest.case")  # a program that gets a test case could skip its test
    return kind.__module__ in _LENT_MODULES and not (cases is not None and isinstance(thing, cases.TestCase))


def use(thing: Any, what: str, args: list, kwargs: dict) -> Any:
    """Does what the program asks of an object of the tests; raises BrokenChannel if it may not ask for it."""
    if what == "next":
        return next(thing)
    if what == "call":
        return thing(*args, **kwargs)
    if not is_lent(thing):
        raise wire.BrokenChannel("a request to an object that the program may only call")
    kind = type(thing)
    if what in ("getattr", "setattr"):
        name = args[0]
        if type(name) is not str or name[:1] == "_":
            raise wire.BrokenChannel("a request for a private attribute")
        of_class = name in dir(kind)
        if of_class and (kind.__module__ == "unittest.mock" or (what == "setattr" and callable(getattr(kind, name)))):
            # what the tests rely on, such as a mock's count of calls
            raise AttributeError(f"attribute {name!r} of {kind.__name__!r} objects is not available to the program")
        return getattr(thing, name) if what == "getattr" else setattr(thing, *args)
    if what in _LENT or what == "__next__":
        return getattr(kind, what)(thing, *args, **kwargs)
    raise wire.BrokenChannel("an unknown request")


def _parameters(function: Any) -> list | None:
    """Name and kind of each of a function's parameters, and whether it is optional."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    return [[each.name, int(each.kind), each.default is not each.empty] for each in found]
