"""The special methods of stand-ins.

The tests can call, index and iterate over an object of the program, and read its attributes. The object is not shown what the
tests compare or combine it with, and its own answer to a comparison does not count. Where this leaves the result open, the
session records a doubt, and the test does not pass.

If the tests use a class by its name, the operators of its objects are under test. They are asked, with two limits: two objects
are equal only if they also hold the same attributes, and combining an object with a value of the tests must give an object of
the program.
"""

from collections.abc import Callable
from typing import Any

from . import flows, remote, special


_DATA = frozenset("builtins decimal fractions datetime collections uuid".split())


# Comparisons are decided in this process


def equal(self: Any, other: Any) -> Any:
    return _is_equal(self, other, "__eq__")


def unequal(self: Any, other: Any) -> Any:
    result = _is_equal(self, other, "__ne__")
    return result if result is NotImplemented else not result


def _is_equal(self: Any, other: Any, name: str) -> Any:
    if self is other:
        return True
    kind = remote.kind_of(self)
    if kind.base is None and remote.is_foreign(other):
        other_kind = remote.kind_of(other)
        if other_kind.base is None:
            custom = (kind.own | other_kind.own) & {"__eq__", "__ne__"}
            if not custom or remote.ask(self, "equal", other) is False:
                return False
            if remote.is_tested(kind, other_kind) and remote.ask(self, "equals", other) is True:
                if remote.ask(self, "state") == remote.ask(other, "state"):
                    return True
            remote.session.doubt(_no_answer(kind, "=="))
            return False
    if kind.base is not None:
        result = remote.plain(self) == remote.plain(other)
    elif remote.is_foreign(other):
        result = bool(self == remote.plain(other))
    elif type(other).__module__ in _DATA:
        result = False
    else:
        return NotImplemented  # the other object belongs to the tests, and decides
    if not result and (name in kind.own or (kind.base is None and "__eq__" in kind.own)):
        remote.session.doubt(_no_answer(kind, "=="))
    return result


def _no_answer(kind: remote.Kind, symbol: str) -> str:
    return f"objects of the program ({kind.name}) are not compared by {symbol}, because their answer would not count"


def _comparison(name: str, symbol: str) -> Callable:
    def method(self: Any, other: Any) -> Any:
        kind = remote.kind_of(self)
        if kind.base is None or f"__{name}__" in kind.own:
            if remote.is_foreign(other) and remote.is_tested(kind, remote.kind_of(other)):
                said, reverse = remote.ask(self, name, other), remote.ask(other, name, self)
                if said is not reverse or (said is False and symbol in "<>") or (said is True and self == other):
                    return said
            raise remote.session.doubt(_no_answer(kind, symbol))
        return getattr(kind.base, f"__{name}__")(remote.plain(self), remote.plain(other))

    return method


def _contains(self: Any, value: Any) -> bool:
    kind = remote.kind_of(self)
    if kind.base is not None:
        found = value in remote.plain(self)
    elif "__iter__" in kind.has or "__getitem__" in kind.has:
        found = any(item is value or item == value for item in self)
    else:
        found = False
    if "__contains__" not in kind.own:
        return found
    if remote.is_tested(kind):
        said = remote.ask(self, "contains", value)
        if said is found or remote.is_foreign(value) or remote.session.was_told(value):
            return said is True
    elif (found or remote.is_foreign(value) or remote.session.was_told(value)) and remote.ask(
        self, "contains", value
    ) is found:
        return found
    remote.session.doubt(
        f"{kind.name} of the program is not asked whether it contains a value, because its answer would not count"
    )
    return False


# Operators between objects of the program run there. Values of the tests are not shown to them.


def _binary(special_name: str, name: str, reflected: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        kind = remote.kind_of(self)
        if kind.base is not None and special_name not in kind.own:
            function = getattr(kind.base, special_name)
            return function(remote.plain(self), remote.plain(other))
        if not remote.is_foreign(other):  # it may be an expected value, which the program must not see
            if remote.is_tested(kind) and name != "sub":  # tests subtract expected values to see how near they are
                result = remote.ask(other, name, self) if reflected else remote.ask(self, name, other)
                if remote.is_foreign(result):
                    return result
            raise remote.session.doubt(
                f"{kind.name} of the program cannot be combined with {type(other).__name__} of the tests"
            )
        return remote.ask(other, name, self) if reflected else remote.ask(self, name, other)

    return method


def _in_place(special_name: str, name: str) -> Callable:
    binary = _binary(special_name, name, False)

    def method(self: Any, other: Any) -> Any:
        kind = remote.kind_of(self)
        if kind.base is not None and special_name not in kind.own:
            return remote.ask(self, name, other)
        return binary(self, other)

    return method


def forward(name: str) -> Callable:
    return lambda self, /, *args: remote.ask(self, name, *args)


def _typed(name: str, kind: type) -> Callable:
    return lambda self, /, *args: remote.exact(remote.ask(self, name, *args), kind)


def _number(name: str, kind: type) -> Callable:
    def method(self: Any) -> Any:
        value = remote.plain(self)
        return kind(value) if value is not self else remote.exact(remote.ask(self, name), kind)

    return method


# Sequences: an object of a class that derives from a builtin one has the items that it holds


def _length(self: Any) -> int:
    kind = remote.kind_of(self)
    if kind.base is None:
        return remote.exact(remote.ask(self, "len"), int)
    length = len(remote.plain(self))
    if "__len__" in kind.own and remote.ask(self, "len") != length:
        remote.session.doubt(f"{kind.name} of the program reports a length that is not its number of items")
    return length


def _iterate(self: Any) -> Any:
    kind = remote.kind_of(self)
    if kind.base is None:
        if kind.quick and "__next__" in kind.has:
            return self
        found = remote.ask(self, "iter")
        found = found if remote.is_foreign(found) else iter(found)
        return found if "__next__" in kind.has else flows.look(self, found)
    held = list(remote.plain(self))
    if "__iter__" in kind.own:
        found = [item for item, _ in zip(remote.ask(self, "iter"), range(len(held) + 1), strict=False)]
        if len(found) != len(held) or any(a is not b and a != b for a, b in zip(found, held, strict=True)):
            remote.session.doubt(f"{kind.name} of the program yields other items than it contains")
    return iter(held)


def _next(self: Any) -> Any:
    place = remote.registry.place_of(self)
    if place.reader is None:
        place.reader = flows.ItemReader(self, remote.kind_of(self).quick)
    return place.reader.next()


def _bool(self: Any) -> bool:
    return remote.ask(self, "bool") is True


def _call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return remote.ask(self, "call", *args, **kwargs)


def _exit(self: Any, kind: Any, value: Any, trace: Any) -> bool:
    if kind is None or issubclass(kind, AssertionError):  # the program must not suppress a failed assertion
        remote.ask(self, "exit", None)
        return False
    return remote.ask(self, "exit", value) is True


def _async_exit(self: Any, kind: Any, value: Any, trace: Any) -> Any:
    async def leave() -> bool:
        hidden = kind is None or issubclass(kind, AssertionError)
        done = await remote.ask(self, "aexit", None if hidden else value)
        return not hidden and done is True

    return leave()


def _await(self: Any) -> Any:
    return flows.coroutine(self).__await__()


@classmethod  # type: ignore[misc]
def _class_getitem(cls: Any, key: Any) -> Any:
    return remote.ask(cls, "class_getitem", key)


SPECIAL_METHODS: dict[str, Any] = {
    "__contains__": _contains,
    "__len__": _length,
    "__iter__": _iterate,
    "__next__": _next,
    "__bool__": _bool,
    "__call__": _call,
    "__exit__": _exit,
    "__aexit__": _async_exit,
    "__await__": _await,
    "__class_getitem__": _class_getitem,
    "__bytes__": _typed("bytes", bytes),
    "__fspath__": _typed("fspath", str),
    **{f"__{name}__": _number(name, int if name == "index" else kind) for name, kind in special.NUMBERS.items()},
    **{
        f"__{name}__": _comparison(name, symbol)
        for name, symbol in zip(special.ORDER, ("<", "<=", ">", ">="), strict=True)
    },
    **{f"__{name}__": _binary(f"__{name}__", name, False) for name in special.BINARY},
    **{f"__r{name}__": _binary(f"__r{name}__", name, True) for name in special.BINARY},
    **{f"__{name}__": _in_place(f"__{name}__", name) for name in special.IN_PLACE},
}
for _name in (*special.UNARY, *"reversed getitem setitem delitem round enter aiter anext aenter".split()):
    SPECIAL_METHODS[f"__{_name}__"] = forward(_name)
TEXT_METHODS: dict[str, Any] = {
    "__str__": _typed("str", str),
    "__repr__": _typed("repr", str),
    "__format__": _typed("format", str),
}
