"""What a stand-in stands for, and how it reaches it. One session at a time is judged."""

from dataclasses import dataclass
from typing import Any

from .plain_values import IMMUTABLE, PLAIN_VALUE


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


def is_tested(*kinds: Kind) -> bool:
    """Whether classes are under test: tests that use a class by its name mean its own operators and comparisons."""
    return all(not session.tested.isdisjoint(type.mro(kind.public)) for kind in kinds)


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
