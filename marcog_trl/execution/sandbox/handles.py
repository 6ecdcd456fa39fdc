"""Handles: what the tests hold in place of the program's objects.

Calling, reading, indexing or iterating over a handle asks the program's process. Anything but a plain value that it answers is
a handle again. Where the program's own answer would decide a test that expects a value, it is not asked: a handle equals
itself only, is ordered and combined with nothing, and the test fails with a message that says so. The exception are classes
that the tests use by name, because their operators are what is tested.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .values import IMMUTABLE


session: Any = None  # the channel to the program that is judged
hashes: dict[int, int | None] = {}  # id of a handle -> the hash of its object
_TEXTS = ("__doc__", "__name__", "__qualname__", "__module__")
texts: dict[int, str] = {}  # id of an exception whose class says by itself what its text is -> that text
_READABLE = ("__members__", "__match_args__")  # special attributes of classes that the program is asked for
# special attributes that are the handle's own
_OF_OBJECTS = frozenset("__class__ __copy__ __deepcopy__ __reduce_ex__ __dir__ __init__ __ne__".split())
_OF_CLASSES = _OF_OBJECTS | frozenset(
    (
        *_TEXTS,
        *"__dict__ __base__ __new__ __instancecheck__ __subclasscheck__ __subclasses__ __subclasshook__ __flags__".split(),
    )
)
_DATA = frozenset("builtins decimal fractions datetime collections uuid numpy".split())  # modules of plain values
# Between objects of the program
_OPERATORS = "add sub mul truediv floordiv mod matmul and or xor lshift rshift".split()
_BINARY = (*_OPERATORS, *(f"i{name}" for name in _OPERATORS if "shift" not in name), "pow", "ipow", "divmod")
_UNARY = "neg pos abs invert round int float index complex bytes fspath reversed".split()
ORDER = ("lt", "le", "gt", "ge")
_OTHERS = "eq hash bool len iter next contains getitem setitem delitem call str repr format enter exit".split()
_ASYNC = "await aiter anext aenter aexit".split()
SPECIAL = frozenset(
    f"__{name}__" for name in (*_BINARY, *(f"r{name}" for name in _OPERATORS), *_UNARY, *ORDER, *_OTHERS, *_ASYNC)
)
"""Names of the special methods that handles have if the program's objects have them."""


@dataclass(frozen=True)
class Facts:
    """Facts about a class of the program, as the program gives them."""

    name: str
    has: frozenset[str]  # special methods, inherited ones included
    own: frozenset[str]  # special methods that do not come from a builtin type
    base: str | None  # name of the builtin value type that the class derives from
    value_type: type | None  # that type, if handles hold the value themselves
    methods: frozenset[str]  # functions that are called without being read first
    is_exception: bool


class Method:
    """A method of an object of the program."""

    __slots__ = ("name", "thing")

    def __init__(self, thing: Any, name: str):
        self.thing, self.name = thing, name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return session.ask("method", self.thing, self.name, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" and name not in _TEXTS:
            raise AttributeError(f"'method' object has no attribute {name!r}")
        return getattr(session.ask("getattr", self.thing, self.name), name)

    def __eq__(self, other: Any) -> bool:
        return type(other) is Method and self.thing is other.thing and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.thing), self.name))


class HandleType(type):
    """The class of the handles for classes."""

    facts: Facts

    def __new__(cls, name: str, bases: tuple, space: dict, **options: Any) -> Any:
        raise session.doubt("tests cannot derive from a class of the program: its code would run among them")

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return session.ask("call", cls, *args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        if name == "facts" or name in _OF_CLASSES or name in SPECIAL:
            return type.__getattribute__(cls, name)
        if name == "__mro__" or name == "__bases__":
            return tuple(each for each in type.__getattribute__(cls, name) if each is not Handle) or (object,)
        if _is_special(name) and name not in _READABLE:
            raise _unreadable(cls, name)
        return session.ask("getattr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        session.ask("setattr", cls, _plain_name(name), value)

    def __delattr__(cls, name: str) -> None:
        session.ask("delattr", cls, _plain_name(name))

    def __iter__(cls) -> Any:
        return iter(session.ask("iter", cls))

    def __len__(cls) -> int:
        return session.ask("len", cls)

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, value: Any) -> bool:
        return type(value) is cls

    def __getitem__(cls, key: Any) -> Any:
        return session.ask("getitem", cls, key)


def _facts(thing: Any) -> Facts:
    return type(thing).facts


def _is_special(name: str) -> bool:
    return name[:2] == "__" and name[-2:] == "__"


def _unreadable(thing: Any, name: str) -> AttributeError:
    """An error for a special attribute that tests cannot read, for example because a library would run what is in it."""
    if session.ask("hasattr", thing, name) is True:
        session.doubt(f"tests cannot read {name} of an object of the program")
    return AttributeError(f"an object of the program has no attribute {name!r}")


def _plain_name(name: str) -> str:
    if _is_special(name):
        raise session.doubt(f"tests cannot set or delete {name} of an object of the program")
    return name


class Handle:
    """Base of the handles for objects that are not classes."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        kind: Any = type(self)
        if not _is_special(name):
            if name in kind.facts.methods:
                return Method(self, name)
            return session.ask("getattr", self, name)
        if name == "__dict__":
            return session.ask("state", self)
        if name in _TEXTS:
            value = session.ask("getattr", self, name)
            return value if type(value) is str else None
        if name in _OF_OBJECTS or name in SPECIAL:
            return object.__getattribute__(self, name)
        raise _unreadable(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        session.ask("setattr", self, _plain_name(name), value)

    def __delattr__(self, name: str) -> None:
        session.ask("delattr", self, _plain_name(name))

    def __dir__(self) -> list[str]:
        return session.ask("dir", self)

    def __copy__(self) -> Any:
        return session.ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return session.ask("deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise session.doubt("an object of the program cannot be pickled by the tests")

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        if not session.is_handle(other):
            own = "__eq__" in _facts(self).own and not session.is_named(self)
            if own and other is not None and type(other).__module__ in _DATA:
                session.doubt(_unnamed(self, "=="))
            return NotImplemented
        if not (session.is_named(self) and session.is_named(other)):
            if "__eq__" in _facts(self).own:
                session.doubt(_unnamed(self, "=="))
            return False
        if "__eq__" not in _facts(self).own and _facts(self).base is None:
            return False
        if session.ask("eq", self, other) is not True:
            return False
        if not session.alike(self, other, set()):
            session.doubt(f"objects of {type(self).__name__} are said to be equal and have other attributes")
            return False
        return True

    def __hash__(self) -> int:
        found = hashes.get(id(self))
        return id(self) >> 4 if found is None else found

    def __str__(self) -> str:
        return exact(session.ask("str", self), str)

    def __repr__(self) -> str:
        return exact(session.ask("repr", self), str)

    def __format__(self, spec: str) -> str:
        return exact(session.ask("format", self, spec), str)

    def __bool__(self) -> bool:
        return session.ask("bool", self) is True


def is_object(value: Any) -> bool:
    """Whether something is a handle that holds no value itself."""
    return (
        type(type(value)) is HandleType and type(value).facts.value_type is None and not type(value).facts.is_exception
    )


def exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise session.doubt(f"an object of the program returned {type(value).__name__} instead of {kind.__name__}")
    return value


def _unnamed(thing: Any, symbol: str) -> str:
    return (
        f"an object of the program ({type(thing).__name__}) is not asked about {symbol}: it equals only itself, because the "
        "tests do not use its class by name"
    )


def _plain_equal(self: Any, other: Any) -> Any:
    """Equality of an object that derives from a list, a dict or the like: what it holds counts."""
    if self is other or session.is_handle(other):
        return Handle.__eq__(self, other)
    return bool(session.ask("plain", self) == other)


def _order(name: str) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if not session.is_handle(other):
            if f"__{name}__" in type(self).facts.own:
                session.doubt(
                    f"an object of the program is not ordered relative to {type(other).__name__} of the tests"
                )
            return NotImplemented
        if not (session.is_named(self) and session.is_named(other)):
            raise session.doubt(_unnamed(self, "<"))
        said, reverse = session.ask(name, self, other) is True, session.ask(name, other, self) is True
        if said and reverse if name in ("lt", "gt") else not (said or reverse):
            session.doubt(f"two objects of {type(self).__name__} are each said to come before the other")
        return said

    return method


def _binary(name: str, reflected: bool) -> Callable:
    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if not session.is_named(self):
            raise session.doubt(_unnamed(self, name))
        if not session.is_handle(other) and name.removeprefix("i") == "sub":
            raise session.doubt(
                "tests subtract to see how near a result is, so an object of the program has no difference to a value"
            )
        if session.is_handle(other) and not session.is_named(other):
            raise session.doubt(_unnamed(other, name))
        found = session.ask(name, other, self, *modulus) if reflected else session.ask(name, self, other, *modulus)
        if not session.is_handle(other) and not session.is_handle(found) and type(found) is not tuple:
            raise session.doubt(
                "an object of the program combined with a value of the tests must give an object of the program"
            )
        return found

    return method


def _unary(name: str) -> Callable:
    kind = {"int": int, "index": int, "float": float, "complex": complex, "bytes": bytes, "fspath": str}.get(name)

    def method(self: Any, *args: Any) -> Any:
        if kind is None and not session.is_named(self):
            raise session.doubt(_unnamed(self, name))
        found = session.ask("special", self, f"__{name}__", *args)
        return found if kind is None else exact(found, kind)

    return method


def _contains(self: Any, value: Any) -> bool:
    if "__contains__" not in type(self).facts.own:
        return any(item is value or item == value for item in self)
    if session.is_named(self) and (session.is_handle(value) or session.was_told(value)):
        return session.ask("contains", self, value) is True
    found = {"__iter__", "__getitem__"} & type(self).facts.has and any(item is value or item == value for item in self)
    if not session.is_named(self) or session.ask("contains", self, value) is not bool(found):
        session.doubt(
            f"an object of the program ({type(self).__name__}) is not asked whether it contains a value that it was not given"
        )
    return bool(found)


class _Seen:
    """The items of one object of the program, which are the same each time until something has been called."""

    def __init__(self, iterator: Any):
        self.changes = session.changes
        self.items: list[Any] = []
        self.rest = iter(iterator)

    def __iter__(self) -> Iterator:
        k = 0
        while True:
            if k == len(self.items):
                try:
                    self.items.append(next(self.rest))
                except StopIteration:
                    return
            yield self.items[k]
            k += 1


_seen: dict[int, tuple[Any, _Seen]] = {}  # id of a handle -> it, and its items


def _iterate(self: Any) -> Any:
    if "__next__" in type(self).facts.has:
        if "__iter__" not in type(self).facts.own:
            return self
        found = session.ask("iter", self)
        return found if session.is_handle(found) else iter(found)
    found = _seen.get(id(self))
    if found is None or found[1].changes != session.changes:
        found = _seen[id(self)] = self, _Seen(session.ask("iter", self))
    return iter(found[1])


def _next(self: Any) -> Any:
    found = session.ask("next", self)
    if not found:
        raise StopIteration
    return found[0]


def _exit(self: Any, kind: Any, value: Any, trace: Any) -> bool:
    hidden = kind is None or issubclass(kind, AssertionError)  # the program must not see a failed assertion
    return _swallows(session.ask("exit", self, "__exit__", None if hidden else value))


def _swallows(said: Any) -> bool:
    if said:
        session.doubt("a `with` of the program swallows an exception, which may be why the test fails")
    return False


def _async_exit(self: Any, kind: Any, value: Any, trace: Any) -> Any:
    async def leave() -> bool:
        hidden = kind is None or issubclass(kind, AssertionError)
        said = await session.ask("exit", self, "__aexit__", None if hidden else value)
        return False if hidden else _swallows(said)

    return leave()


def _await(self: Any) -> Any:
    return coroutine(session.numbers[id(self)]).__await__()


def _special(name: str) -> Callable:
    return lambda self, /, *args: session.ask("special", self, f"__{name}__", *args)


def _ask(name: str) -> Callable:
    return lambda self, /, *args, **kwargs: session.ask(name, self, *args, **kwargs)


SPECIAL_METHODS: dict[str, Callable] = {
    **{f"__{name}__": _binary(name, False) for name in _BINARY},
    **{f"__r{name}__": _binary(name, True) for name in ("add", "mul", "sub", "matmul", "and", "or", "xor")},
    **{f"__{name}__": _unary(name) for name in _UNARY},
    **{f"__{name}__": _order(name) for name in ORDER},
    **{f"__{name}__": _special(name) for name in ("enter", "aenter", "aiter", "anext")},
    **{f"__{name}__": _ask(name) for name in ("call", "getitem", "setitem", "delitem")},
    "__len__": lambda self: exact(session.ask("len", self), int),
    "__iter__": _iterate,
    "__next__": _next,
    "__contains__": _contains,
    "__exit__": _exit,
    "__aexit__": _async_exit,
    "__await__": _await,
}
# Methods that handles which hold a value have beside those of its type
_OF_VALUES = ("__enter__", "__exit__", "__call__")


def make_class(facts: dict, bases: list) -> Any:
    """The handle for a class of the program, which is also the class of the handles for its instances."""
    is_exception = any(issubclass(base, BaseException) for base in bases if isinstance(base, type))
    has = frozenset(facts["has"])
    value_type = None if is_exception else IMMUTABLE.get(facts["base"])
    own = frozenset(facts["own"])
    known = Facts(str(facts["name"]), has, own, facts["base"], value_type, frozenset(facts["methods"]), is_exception)
    if is_exception:
        above: list[Any] = [base for base in bases if isinstance(base, type) and issubclass(base, BaseException)]
        space: dict[str, Any] = {"__str__": _error_text}
    else:
        above = [base for base in bases if type(base) is HandleType and base.facts.value_type in (None, value_type)]
        if value_type is not None and not any(issubclass(base, value_type) for base in above):
            above = [value_type, *above]
        above += [] if any(issubclass(base, Handle) for base in above) else [Handle]
        space = {name: method for name, method in SPECIAL_METHODS.items() if name in has}
        if value_type is not None:
            space = {name: method for name, method in space.items() if name in own and name in _OF_VALUES}
            space |= {
                name: vars(Handle)[name] for name in ("__getattribute__", "__setattr__", "__delattr__", "__copy__")
            }
            space |= {"__deepcopy__": Handle.__deepcopy__, "__reduce_ex__": Handle.__reduce_ex__}
            texts = ("__str__", "__repr__", "__format__")
            space |= {name: vars(Handle)[name] for name in texts if not own.isdisjoint(texts)}
        elif facts["base"] is not None:
            space["__eq__"] = _plain_equal
            space["__hash__"] = Handle.__hash__
        if facts["weak"] is not True and value_type is None:
            space["__slots__"] = ()
        if facts["unhashable"] is True:
            space["__hash__"] = None
    space["facts"] = known
    for bases_tried in (tuple(above), tuple(above[:1]), (Exception,) if is_exception else (Handle,)):
        try:
            return type.__new__(
                HandleType, known.name, bases_tried, {**space, "__module__": "solution", "__doc__": None}
            )
        except TypeError:
            continue  # the bases have no common order here
    raise TypeError("a class that cannot be made")


def _error_text(self: Any) -> str:
    found = texts.get(id(self))
    return BaseException.__str__(self) if found is None else found


def make_exception(kind: Any, args: tuple) -> BaseException:
    """An exception of a class; runs no code of the program."""
    if type(kind) is type:
        try:
            return kind(*args)
        except Exception:
            pass  # its constructor takes other arguments than it keeps
    base: Any = next(each for each in kind.__mro__ if type(each) is type)
    try:
        error: BaseException = base.__new__(kind, *args)
    except TypeError:
        error = base.__new__(kind)
    error.args = args
    return error


def generator(number: int) -> Any:
    """A generator in place of the program's."""
    thing, sent, error = session.handles[number], None, None
    while True:
        ended, value = session.ask("resume", thing, sent, error)
        if ended:
            return value
        sent = error = None
        try:
            sent = yield value
        except GeneratorExit:
            session.close(number)
            raise
        except Exception as raised:
            error = raised


def coroutine(number: int) -> Any:
    """A coroutine in place of the program's."""

    async def run() -> Any:
        return session.ask("await", session.handles[number])

    return run()
