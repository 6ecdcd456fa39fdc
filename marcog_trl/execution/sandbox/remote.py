"""How a stand-in reaches the object that it is for. One program at a time is judged."""

from dataclasses import dataclass
from typing import Any

from .plain_values import IMMUTABLE, PLAIN_VALUE


session: Any = None  # the session of the program that is judged
registry: Any = None  # its stand-ins


def ask(thing: Any, what: str, /, *args: Any, **kwargs: Any) -> Any:
    """Has the program's process do something with an object; returns its answer, or raises what it raised."""
    return session.ask(what, thing, *args, **kwargs)


@dataclass(frozen=True)
class Kind:
    """What the judge knows about a class of the program. All of it is what the program says."""

    name: str
    has: frozenset[str]  # special methods, inherited ones included
    own: frozenset[str]  # special methods that do not come from the builtin value type below
    base: type | None  # builtin value type that the class derives from
    public: type  # what the tests see as the class of its objects
    fields: dict[str, int]  # positions of the fields of a named tuple
    local: frozenset[str]  # attributes of exceptions that are kept in this process
    quick: bool  # whether it is an iterator that may be read ahead
    checks: bool  # whether it decides by itself what its instances are


def kind_of(thing: Any) -> Kind:
    return registry.kinds[type(thing)]


def is_foreign(thing: Any) -> bool:
    """Whether something is a stand-in for an object of the program."""
    return registry.place_of(thing) is not None


def is_tested(*kinds: Kind) -> bool:
    """Whether the tests use all of these classes by their names, and so test their operators and comparisons."""
    return all(not session.tested.isdisjoint(type.mro(kind.public)) for kind in kinds)


def plain(thing: Any) -> Any:
    """The builtin value that an object of the program derives from; anything else as it is."""
    kind = registry.kinds.get(type(thing))
    if kind is None or kind.base is None or registry.place_of(thing) is None:
        return thing
    if kind.base in IMMUTABLE:
        return PLAIN_VALUE[kind.base](thing)
    value = ask(thing, "base")
    return exact(value, kind.base)


def exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise session.doubt(f"an object of the program returned {type(value).__name__} instead of {kind.__name__}")
    return value
