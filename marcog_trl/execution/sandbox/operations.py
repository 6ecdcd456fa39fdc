"""What a judge may ask for. Each operation takes the server and objects of the program."""

import copy
import math
import operator
import sys
import time
from typing import Any

from . import special
from .plain_values import plain


def _exit(thing: Any, name: str, error: BaseException | None) -> Any:
    """Calls `__exit__` or `__aexit__` with an exception, or with none."""
    leave = getattr(type(thing), name)
    if error is None:
        return leave(thing, None, None, None)
    return leave(thing, type(error), error, error.__traceback__)


def _call_exit(server: Any, thing: Any, error: BaseException | None) -> bool:
    try:
        return bool(_exit(thing, "__exit__", error))
    except BaseException as raised:
        if raised is error:
            return False
        raise


def _said_equal(server: Any, a: Any, b: Any) -> bool:
    return bool(a == b) or not a != b


def _state(server: Any, thing: Any) -> dict:
    """The attributes of an object by name, those in slots included."""
    slots = [name for kind in type(thing).__mro__ for name in _listed(kind.__dict__.get("__slots__", ()))]
    held = {
        name: getattr(thing, name)
        for name in slots
        if name not in ("__dict__", "__weakref__") and hasattr(thing, name)
    }
    return {**held, **getattr(thing, "__dict__", {})}


def _listed(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _next(server: Any, iterator: Any, count: int) -> tuple:
    """Up to `count` items, fewer if they take their time; then `"more"`, `"stop"` with the iterator's return value, or
    `"later"` if it raised an exception, which `_pending` raises."""
    items: list[Any] = []
    start = time.perf_counter()
    while len(items) < count and (not items or time.perf_counter() - start < 0.005):
        try:
            items.append(next(iterator))
        except StopIteration as stop:
            return tuple(items), "stop", stop.value
        except BaseException:
            if not items:
                raise
            server.pending = sys.exc_info()[1]
            return tuple(items), "later", None
    return tuple(items), "more", None


def _pending(server: Any) -> None:
    error, server.pending = server.pending, None
    if error is not None:
        raise error


# Coroutines run on a loop of this process, in slices, so that several that the tests await run side by side


def _start(server: Any, thing: Any) -> Any:
    import asyncio  # large, and rarely needed

    async def awaited() -> Any:
        return await thing

    if server.loop is None:
        server.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(server.loop)
    return server.loop.create_task(awaited())


def _step(server: Any, task: Any) -> tuple:
    """Runs the loop for a moment, or until the task is done; returns whether it is done, and its result."""
    import asyncio

    if not task.done():
        server.loop.run_until_complete(asyncio.wait({task}, timeout=0.002))
    return (True, task.result()) if task.done() else (False, None)


def _cancel(server: Any, task: Any) -> None:
    import asyncio

    task.cancel()
    server.loop.run_until_complete(asyncio.wait({task}, timeout=0.002))


def _binary(function: Any) -> Any:
    return lambda server, a, b: function(a, b)


def _unary(function: Any) -> Any:
    return lambda server, thing: function(thing)


_NAMES = {"and": "and_", "or": "or_"}
OPERATIONS: dict[str, Any] = {
    "call": lambda server, function, /, *args, **kwargs: function(*args, **kwargs),
    "getattr": lambda server, thing, name: getattr(thing, name),
    "setattr": lambda server, thing, name, value: setattr(thing, name, value),
    "delattr": lambda server, thing, name: delattr(thing, name),
    "has": lambda server, thing, name: hasattr(thing, name),
    "getitem": lambda server, thing, key: thing[key],
    "class_getitem": lambda server, thing, key: thing[key],
    "setitem": lambda server, thing, key, value: operator.setitem(thing, key, value),
    "delitem": lambda server, thing, key: operator.delitem(thing, key),
    "contains": lambda server, thing, value: bool(value in thing),
    "equal": _said_equal,
    "equals": lambda server, a, b: bool(a == b) and not a != b,
    "state": _state,
    **{name: lambda server, a, b, name=name: bool(getattr(operator, name)(a, b)) for name in special.ORDER},
    "hash": _unary(hash),
    "len": _unary(len),
    "iter": _unary(iter),
    "reversed": _unary(reversed),
    "next": _next,
    "pending": _pending,
    "send": lambda server, thing, value: thing.send(value),
    "throw": lambda server, thing, error: thing.throw(error),
    "close": lambda server, thing: thing.close(),
    "bool": _unary(bool),
    "str": lambda server, thing: str.__str__(str(thing)),
    "repr": lambda server, thing: str.__str__(repr(thing)),
    "format": lambda server, thing, spec: str.__str__(format(thing, spec)),
    "bytes": lambda server, thing: bytes(thing),
    "fspath": lambda server, thing: type(thing).__fspath__(thing),
    "round": lambda server, thing, *digits: round(thing, *digits),
    "enter": lambda server, thing: type(thing).__enter__(thing),
    "exit": _call_exit,
    "aiter": lambda server, thing: type(thing).__aiter__(thing),
    "anext": lambda server, thing: type(thing).__anext__(thing),
    "aenter": lambda server, thing: type(thing).__aenter__(thing),
    "aexit": lambda server, thing, error: _exit(thing, "__aexit__", error),
    "start": _start,
    "step": _step,
    "cancel": _cancel,
    "isinstance": lambda server, thing, kind: bool(isinstance(thing, kind)),
    "issubclass": lambda server, thing, kind: bool(issubclass(thing, kind)),
    "copy": lambda server, thing: copy.copy(thing),
    "deepcopy": lambda server, thing: copy.deepcopy(thing),
    "dir": lambda server, thing: dir(thing),
    "base": lambda server, thing: plain(thing),
    "trunc": _unary(math.trunc),
    "floor": _unary(math.floor),
    "ceil": _unary(math.ceil),
    "divmod": _binary(divmod),
    **{name: _unary(kind) for name, kind in special.NUMBERS.items()},
    "index": _unary(operator.index),
    **{name: _unary(getattr(operator, name)) for name in ("neg", "pos", "abs", "invert")},
    **{
        name: _binary(getattr(operator, _NAMES.get(name, name)))
        for name in (*special.BINARY, *special.IN_PLACE)
        if name != "divmod"
    },
}
