"""Stand-ins for the program's objects on the judge's side: one class for each of its classes.

A stand-in's class has the special methods that the program's class has, and no others, so what Python says of an object
(whether it is iterable, can be hashed, is of the type of another) is what it says of the program's. Which object of the
program a stand-in is for is kept in the session, not on the stand-in.

An object of the program can be called, indexed, iterated and asked for attributes. It is never shown what it is compared or
combined with, and its word on a comparison is not taken. Where that leaves a question open, the session records it, and the
test does not pass.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import flows, special
from .server import IMMUTABLE, PLAIN_VALUE


session: Any = None  # the session of the program that is judged


def ask(thing: Any, what: str, /, *args: Any, **kwargs: Any) -> Any:
    """What the program's process answers, or raises what it raises."""
    return session.ask(what, thing, *args, **kwargs)


@dataclass(frozen=True)
class Kind:
    """What the judge knows of a class of the program; all of it on the program's word."""

    name: str
    has: frozenset[str]  # special methods of the class and those that it derives from
    own: frozenset[str]  # those that are not of the builtin value type that it derives from
    base: type | None  # that builtin value type
    public: type  # what the tests see as the object's class
    fields: dict[str, int]  # of a named tuple
    local: frozenset[str]  # attributes of exceptions that are kept here
    quick: bool  # an iterator that may be read ahead
    checks: bool  # decides by itself what its instances are


def kind_of(thing: Any) -> Kind:
    return session.kinds[type(thing)]


def is_foreign(thing: Any) -> bool:
    """Whether something stands for an object of the program."""
    return session.place_of(thing) is not None


def plain(thing: Any) -> Any:
    """The builtin value that an object of the program derives from; anything else as it is."""
    kind = session.kinds.get(type(thing))
    if kind is None or kind.base is None or session.place_of(thing) is None:
        return thing
    if kind.base in IMMUTABLE:
        return PLAIN_VALUE[kind.base](thing)
    value = ask(thing, "base")
    return exact(value, kind.base)


def exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise session.doubt(f"the program's object gave {type(value).__name__}, not {kind.__name__}")
    return value


_DATA = frozenset("builtins decimal fractions datetime collections uuid".split())


# Comparisons: decided here


def _equal(self: Any, other: Any) -> Any:
    if self is other:
        return True
    kind = kind_of(self)
    custom = bool(kind.own & {"__eq__", "__ne__"})
    if kind.base is not None:
        result = plain(self) == plain(other)
    elif is_foreign(other):
        other_kind = kind_of(other)
        if other_kind.base is not None:
            result = bool(self == plain(other))
        else:
            if (custom or other_kind.own & {"__eq__", "__ne__"}) and ask(self, "equal", other) is not False:
                session.doubt(_no_word(kind, "=="))
            return False
    elif type(other).__module__ in _DATA:
        result = False
    else:
        return NotImplemented  # an object of the tests decides
    if custom and not result:
        session.doubt(_no_word(kind, "=="))
    return result


def _unequal(self: Any, other: Any) -> Any:
    result = _equal(self, other)
    return result if result is NotImplemented else not result


def _no_word(kind: Kind, symbol: str) -> str:
    return f"objects of the program ({kind.name}) are not compared by {symbol}: their word is not taken"


def _comparison(name: str, symbol: str) -> Callable:
    def method(self: Any, other: Any) -> Any:
        kind = kind_of(self)
        if kind.base is None or f"__{name}__" in kind.own:
            raise session.doubt(_no_word(kind, symbol))
        return getattr(kind.base, f"__{name}__")(plain(self), plain(other))

    return method


def _contains(self: Any, value: Any) -> bool:
    kind = kind_of(self)
    if kind.base is not None:
        found = value in plain(self)
    elif "__iter__" in kind.has or "__getitem__" in kind.has:
        found = any(item is value or item == value for item in self)
    else:
        found = False
    if "__contains__" not in kind.own:
        return found
    if (found or is_foreign(value) or session.was_told(value)) and ask(self, "contains", value) is found:
        return found
    session.doubt(f"{kind.name} of the program is not asked whether it contains a value: its word is not taken")
    return False


# Operators: between objects of the program they are its business, and what a test combines with them is not


def _binary(special_name: str, name: str, reflected: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        kind = kind_of(self)
        if kind.base is not None and special_name not in kind.own:
            function = getattr(kind.base, special_name)
            return function(plain(self), plain(other))
        if not is_foreign(other):  # it may be what is expected: that is not the program's business
            raise session.doubt(
                f"{kind.name} of the program cannot be combined with {type(other).__name__} of the tests"
            )
        return ask(other, name, self) if reflected else ask(self, name, other)

    return method


def _in_place(special_name: str, name: str) -> Callable:
    binary = _binary(special_name, name, False)

    def method(self: Any, other: Any) -> Any:
        kind = kind_of(self)
        if kind.base is not None and special_name not in kind.own:
            return ask(self, name, other)
        return binary(self, other)

    return method


def _forward(name: str) -> Callable:
    return lambda self, /, *args: ask(self, name, *args)


def _typed(name: str, kind: type) -> Callable:
    return lambda self, /, *args: exact(ask(self, name, *args), kind)


def _number(name: str, kind: type) -> Callable:
    def method(self: Any) -> Any:
        value = plain(self)
        return kind(value) if value is not self else exact(ask(self, name), kind)

    return method


# Sequences: what derives from a builtin one has the items that it holds


def _length(self: Any) -> int:
    kind = kind_of(self)
    if kind.base is None:
        return exact(ask(self, "len"), int)
    length = len(plain(self))
    if "__len__" in kind.own and ask(self, "len") != length:
        session.doubt(f"{kind.name} of the program gives another length than that of what it holds")
    return length


def _iterate(self: Any) -> Any:
    kind = kind_of(self)
    if kind.base is None:
        if kind.quick and "__next__" in kind.has:
            return self
        found = ask(self, "iter")
        return found if is_foreign(found) else iter(found)
    held = list(plain(self))
    if "__iter__" in kind.own:
        found = [item for item, _ in zip(ask(self, "iter"), range(len(held) + 1), strict=False)]
        if len(found) != len(held) or any(a is not b and a != b for a, b in zip(found, held, strict=True)):
            session.doubt(f"{kind.name} of the program iterates over other items than it holds")
    return iter(held)


def _next(self: Any) -> Any:
    place = session.place_of(self)
    if place.reader is None:
        place.reader = flows.Reader(self, kind_of(self).quick)
    return place.reader.next()


def _bool(self: Any) -> bool:
    return ask(self, "bool") is True


def _call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return ask(self, "call", *args, **kwargs)


def _exit(self: Any, kind: Any, value: Any, trace: Any) -> bool:
    if kind is None or issubclass(kind, AssertionError):  # a test that fails is not the program's to excuse
        ask(self, "exit", None)
        return False
    return ask(self, "exit", value) is True


def _async_exit(self: Any, kind: Any, value: Any, trace: Any) -> Any:
    async def leave() -> bool:
        hidden = kind is None or issubclass(kind, AssertionError)
        done = await ask(self, "aexit", None if hidden else value)
        return not hidden and done is True

    return leave()


def _await(self: Any) -> Any:
    return flows.coroutine(self).__await__()


@classmethod  # type: ignore[misc]
def _class_getitem(cls: Any, key: Any) -> Any:
    return ask(cls, "class_getitem", key)


_METHODS: dict[str, Any] = {
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
    _METHODS[f"__{_name}__"] = _forward(_name)
_OBJECT: dict[str, Any] = {
    "__str__": _typed("str", str),
    "__repr__": _typed("repr", str),
    "__format__": _typed("format", str),
}


# Attributes

_KEPT = frozenset(("__class__", "__doc__", "__module__", "__eq__", "__ne__", "__hash__", "__reduce_ex__", "__dir__"))


def _is_special(name: str) -> bool:
    return name[:2] == "__" and name[-2:] == "__"


def _remote_attribute(thing: Any, name: str) -> Any:
    if name in special.HOOKS:
        if ask(thing, "has", name) is not False:
            session.doubt(f"{name} of the program's objects is out of reach")
        raise AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}")
    return ask(thing, "getattr", name)


def _get(self: Any, name: str) -> Any:
    kind = kind_of(self)
    if name == "__class__":
        return kind.public
    if name in special.SPECIAL or name in _KEPT or name in kind.local:
        return object.__getattribute__(self, name)
    if name in kind.fields:
        return tuple.__getitem__(self, kind.fields[name])
    if session.place_of(self) is None:  # made here, out of a class of the program
        return object.__getattribute__(self, name)
    return _remote_attribute(self, name)


def _set(self: Any, name: str, value: Any) -> None:
    if name in kind_of(self).local:
        object.__setattr__(self, name, value)
    else:
        ask(self, "setattr", name, value)


def _delete(self: Any, name: str) -> None:
    ask(self, "delattr", name)


class _Copied:
    """What `copy` makes a copy of: which of its two functions is at work shows when they come to copy this."""

    def __init__(self, thing: Any, deep: bool):
        self.thing = thing
        self.deep = deep

    def __deepcopy__(self, memo: Any) -> "_Copied":
        return _Copied(self.thing, True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise session.doubt("objects of the program are not pickled")


def _copy(copied: _Copied) -> Any:
    return ask(copied.thing, "deepcopy" if copied.deep else "copy")


def _reduce(self: Any, protocol: Any) -> Any:
    return _copy, (_Copied(self, False),)


def _directory(self: Any) -> list[str]:
    return exact(ask(self, "dir"), list)


def _text_of_error(self: Any) -> str:
    place = session.place_of(self)
    return BaseException.__str__(self) if place is None else place.message


# Classes

_LOCAL_OF_TYPES = frozenset(
    "__class__ __name__ __qualname__ __module__ __mro__ __bases__ __base__ __dict__ __flags__ __basicsize__ __itemsize__ "
    "__dictoffset__ __weakrefoffset__ __subclasses__ __instancecheck__ __subclasscheck__ __subclasshook__ __eq__ __ne__ "
    "__hash__ __text_signature__ __prepare__ __reduce_ex__ __abstractmethods__".split()
)


class ForeignType(type):
    """The class of stand-ins for classes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise session.doubt("the tests derive a class from a class of the program, which would run it")

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return ask(cls, "call", *args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        if name in _LOCAL_OF_TYPES or name in special.SPECIAL:
            return type.__getattribute__(cls, name)
        if name == "mro":
            return type.__getattribute__(cls, name)
        return _remote_attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__abstractmethods__":
            type.__setattr__(cls, name, value)
        else:
            ask(cls, "setattr", name, value)

    def __delattr__(cls, name: str) -> None:
        ask(cls, "delattr", name)

    def __dir__(cls) -> list[str]:
        return exact(ask(cls, "dir"), list)

    def __instancecheck__(cls, thing: Any) -> bool:
        if type.__instancecheck__(cls, thing):
            return True
        if is_foreign(thing):
            return ask(thing, "isinstance", cls) is True
        return _no_member(cls)

    def __subclasscheck__(cls, kind: Any) -> bool:
        if type.__subclasscheck__(cls, kind):
            return True
        if is_foreign(kind):
            return ask(kind, "issubclass", cls) is True
        return _no_member(cls)


def _no_member(cls: Any) -> bool:
    kind = session.kinds.get(cls)
    if kind is not None and kind.checks:
        raise session.doubt(
            f"{cls.__name__} of the program is not asked what its instances are: its word is not taken"
        )
    return False


_META = frozenset(
    "__len__ __iter__ __getitem__ __contains__ __bool__ __reversed__ __repr__ __str__ __or__ __ror__".split()
)
_VALUES: dict[str, type] = {kind.__name__: kind for kind in PLAIN_VALUE}
_Doc = property(lambda self: ask(self, "getattr", "__doc__"))
_NOTHING: frozenset[str] = frozenset()


def make_kind(facts: dict, bases: list[Any]) -> tuple[type, type]:
    """
    The class that stands for a class of the program.

    Args:
        facts (`dict`): What the program says of it, as `Server.hand_out_kind` writes it.
        bases (`list`): What stands for the classes that it derives from.

    Returns:
        `tuple[type, type]`: What tests see as the class, and the class of the stand-ins of its instances: mostly the same.
    """
    name, has, own = facts["name"], frozenset(facts["has"]), frozenset(facts["own"])
    value = _VALUES.get(facts["base"])
    meta = _meta_of(frozenset(facts["meta"]) & _META, bases)
    error = next((base for base in bases if isinstance(base, type) and issubclass(base, BaseException)), None)
    if value is None or value in IMMUTABLE or error is not None:
        space = _space(facts, own if value is not None else has, error)
        space["__slots__"] = ("__weakref__",) if facts["weak"] and value is None and not _weak(bases) else ()
        if value is not None:
            for each in ("__int__", "__float__", "__complex__", "__index__", "__hash__"):
                space.pop(each, None)
            if "__eq__" in space:
                space["__hash__"] = None if facts["unhashable"] else value.__hash__
        made = _of(name, tuple(bases), space, meta)
        return made, _register(made, facts, made)
    public = _of(name, tuple(bases), {"__module__": facts["module"], "__slots__": ()}, meta)
    session.kinds[public] = _describe(facts, public)
    space = {**_space(facts, has), "__slots__": ("__weakref__",)}
    return public, _register(_of(name, (), space), facts, public)


def _of(name: str, bases: tuple, space: dict, meta: type = ForeignType) -> Any:
    try:
        made = type.__new__(meta, name, bases, space)
    except TypeError:  # bases that do not go together here: their word is not needed
        errors = tuple(base for base in bases if issubclass(base, BaseException))
        made = type.__new__(meta, name, errors[:1], {**space, "__slots__": ()})
    if "__slots__" in space:
        type.__delattr__(made, "__slots__")
    return made


def _register(made: Any, facts: dict, public: type) -> type:
    session.kinds[made] = _describe(facts, public)
    return made


def _describe(facts: dict, public: type) -> Kind:
    errors = [base for base in public.__mro__ if issubclass(base, BaseException) and type(base) is type]
    return Kind(
        name=facts["name"],
        has=frozenset(facts["has"]),
        own=frozenset(facts["own"]),
        base=_VALUES.get(facts["base"]),
        public=public,
        fields={field: k for k, field in enumerate(facts["fields"] or ()) if type(field) is str},
        local=(frozenset(dir(errors[0])) | {"__notes__"}) - {"__dict__"} if errors else _NOTHING,
        quick=facts["quick"] is True,
        checks=facts["checks"] is True,
    )


def _weak(bases: list) -> bool:
    return any(type(base) is not type and base.__weakrefoffset__ for base in bases)


def _space(facts: dict, names: frozenset[str], error: Any = None) -> dict[str, Any]:
    """The attributes of a stand-in's class."""
    space = {name: _METHODS[name] for name in names if name in _METHODS}
    space.update(
        {
            "__module__": facts["module"],
            "__getattribute__": _get,
            "__setattr__": _set,
            "__delattr__": _delete,
            "__eq__": _equal,
            "__ne__": _unequal,
            "__hash__": _hash_of(facts),
            "__doc__": _Doc,
            "__reduce_ex__": _reduce,
            "__dir__": _directory,
        }
    )
    immutable = _VALUES.get(facts["base"]) in IMMUTABLE
    if error is not None or immutable:  # made of what it was made of there, and shown alike
        space.update({name: method for name, method in _OBJECT.items() if name in facts["own"]})
    else:
        space.update(_OBJECT)
    if error is not None and "__str__" in facts["own"]:
        space["__str__"] = _text_of_error
    if immutable and not names & {"__eq__", "__ne__"}:
        for each in ("__eq__", "__ne__", "__hash__"):
            del space[each]
    return space


def _hash_of(facts: dict) -> Any:
    if facts["unhashable"]:
        return None
    return _forward("hash") if "__hash__" in facts["has"] else object.__hash__


def _meta_of(names: frozenset[str], bases: list) -> Any:
    """The class of a class, which may be one that has a length, items and members."""
    above = tuple(dict.fromkeys(type(base) for base in bases if issubclass(type(base), ForeignType)))
    if not names:
        return above[0] if above else ForeignType
    key = names, above
    if key not in session.metas:
        space = {name: _OBJECT.get(name, _METHODS.get(name)) for name in names}
        made = type.__new__(type, "type", above or (ForeignType,), space)
        session.metas[key] = made
        session.kinds[made] = Kind("type", names, names, None, made, {}, _NOTHING, False, False)
    return session.metas[key]


def _common(public: type, has: frozenset[str]) -> tuple[type, Kind]:
    """The class of stand-ins for objects of a class that the tests have too, but can make no objects of."""
    facts = {"name": public.__name__, "module": "builtins", "has": has, "own": has, "base": None, "unhashable": False}
    made = _of(public.__name__, (), {**_space(facts, has), "__slots__": ("__weakref__",)})
    return made, Kind(public.__name__, has, has, None, public, {}, _NOTHING, False, False)


_CALLABLE = frozenset(("__call__",))
COMMON: dict[str, tuple[type, Kind]] = {
    public.__name__: _common(public, _NOTHING if public is types.ModuleType else _CALLABLE)
    for public in (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
}
