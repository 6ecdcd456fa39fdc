"""The program's exceptions, as the tests catch them."""

import sys
from collections.abc import Callable
from typing import Any


MOST_KEPT = 64  # exceptions of a program to remember
_MOST_NOTES = 32
_MOST_LINKS = 64  # of a chain of exceptions
# Modules whose exceptions control a test run. If a program raises one, it has failed and nothing else happens.
_CONTROLLING = frozenset(("unittest", "doctest", "bdb", "pdb"))


def is_standard(module: Any) -> bool:
    top = module.partition(".")[0] if type(module) is str else ""
    return top in sys.stdlib_module_names and top not in _CONTROLLING and module in sys.modules


def standard(module: Any, name: Any) -> type[BaseException] | None:
    """The exception class of that name, if it belongs to the standard library and its module is loaded here."""
    if not is_standard(module) or type(name) is not str:
        return None
    found = vars(sys.modules[module]).get(name)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def make(kind: Any, args: tuple) -> BaseException | None:
    """An exception of a class; never runs code of the program."""
    if type(kind) is type:
        try:
            return kind(*args)
        except Exception:
            pass  # its constructor takes other arguments than it keeps
    base = kind
    while type(base) is not type:
        base = base.__base__
    try:
        error = base.__new__(kind, *args)
        error.args = args
    except Exception:
        return None
    return error


def complete(error: BaseException, data: dict, decode: Callable[[Any], Any]) -> None:
    """Gives an exception its attributes, notes, cause and context."""
    for name, written in data["v"].items():
        value = decode(written[0])
        if name == "__notes__":
            for note in value[:_MOST_NOTES] if type(value) is list else ():
                error.add_note(str(note))
        elif type(type(error)) is type and name[:2] != "__":
            setattr(error, name, value)
    for key, attribute in (("c", "__cause__"), ("x", "__context__")):
        other = decode(data[key]) if key in data else None
        if isinstance(other, BaseException) and not _leads_to(other, error):
            setattr(error, attribute, other)
    error.__suppress_context__ = data["s"] is True


def _leads_to(start: BaseException, end: BaseException) -> bool:
    """Whether one exception is in the chain of another, or the chain is too long to tell."""
    seen, todo = 0, [start]
    while todo:
        error = todo.pop()
        seen += 1
        if error is end or seen > _MOST_LINKS:
            return True
        todo += [other for other in (error.__cause__, error.__context__) if other is not None]
    return False
