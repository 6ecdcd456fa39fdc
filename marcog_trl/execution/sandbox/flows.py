"""Iterators, generators and coroutines of the program, as the tests use them."""

from collections.abc import Iterator
from typing import Any

from . import remote


_AT_ONCE = 256  # items to read ahead at most
_ONE_BY_ONE = 16  # items to read one by one before reading ahead
_MOST_SEEN = 256  # items of an object to remember, to compare with those of the next iteration
_COMPARED = frozenset((int, float, str, bytes, bool, type(None)))


class ItemReader:
    """
    Takes items out of an iterator of the program.

    Args:
        thing (`Any`): The iterator's stand-in.
        quick (`bool`): Whether to read ahead, which is possible if the program cannot see how far it has been read.
    """

    def __init__(self, thing: Any, quick: bool):
        self.thing = thing
        self.quick = quick
        self.taken = 0
        self.ahead: list[Any] = []  # in reverse
        self.end = "more"
        self.value: Any = None  # what the iterator returned

    def next(self) -> Any:
        if not self.ahead:
            self.read()
        return self.ahead.pop()

    def read(self) -> None:
        end, self.end = self.end, "more"
        if end == "later":
            remote.ask(self.thing, "pending")
        if end == "stop":
            raise StopIteration(self.value)
        count = 1 if self.taken < _ONE_BY_ONE or not self.quick else min(_AT_ONCE, self.taken)
        found = remote.exact(remote.ask(self.thing, "next", count), tuple)
        items, self.end, self.value = found
        self.taken += len(items)
        self.ahead = list(reversed(remote.exact(items, tuple)))
        if not self.ahead:
            self.read()


def look(thing: Any, items: Iterator[Any]) -> Iterator[Any]:
    """
    Iterates over an object of the program.

    Doubts the test if the object has other items in the next iteration although nothing was done in between: a test may
    iterate several times over what it takes for one value.
    """
    place, asked = remote.registry.place_of(thing), remote.session.changes
    seen: list[Any] = []
    for item in items:
        if len(seen) < _MOST_SEEN:
            seen.append(item)
        yield item
    before = place.seen if place.seen is not None and place.seen[0] == asked else None
    if before is not None and not _alike(before[1], seen):
        remote.session.doubt(f"{type(thing).__name__} of the program yields other items in each iteration")
    place.seen = asked, seen


def _alike(before: list, now: list) -> bool:
    pairs = list(zip(before, now, strict=False))
    plain = all(type(a) in _COMPARED and type(b) in _COMPARED for a, b in pairs)
    return len(before) == len(now) and (not plain or all(a is b or a == b or a != a for a, b in pairs))


def generator(thing: Any) -> Iterator[Any]:
    """A generator that passes what is sent or thrown into it, and its closing, on to a generator of the program."""
    reader = ItemReader(thing, True)

    def body() -> Any:
        what, value = "next", None
        while True:
            if what != "next" and reader.ahead:
                raise remote.session.doubt("a value was sent into a generator of the program that had been read ahead")
            try:
                item = reader.next() if what == "next" else remote.ask(thing, what, value)
            except StopIteration as stop:
                return stop.value
            try:
                value = yield item
                what = "next" if value is None else "send"
            except GeneratorExit:
                remote.session.close(thing)
                raise
            except BaseException as error:
                what, value = "throw", error

    return body()


def coroutine(thing: Any) -> Any:
    """A coroutine that awaits an awaitable of the program. The loop in the program's process runs when this one does."""

    async def body() -> Any:
        import asyncio  # large, and loaded by tests that await

        task = remote.ask(thing, "start")
        try:
            while True:
                done, value = remote.exact(remote.ask(task, "step"), tuple)
                if done is True:
                    return value
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            remote.ask(task, "cancel")
            raise

    return body()
