"""Writes Python values as tagged JSON and builds them again, and keeps the containers that both sides share.

Anything but a value of a known type becomes a handle, which its owner keeps. Containers that can change are *nodes*: both
sides keep them, and each message carries what has changed in them since the last one. So a list that was passed to a function
is still the same list afterwards. Only the latest nodes are kept, `MOST_TRACKED` items in all: what was passed before costs
nothing, and what is no longer kept is as if it had been copied.
"""

import base64
import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .frames import LARGEST, BrokenChannel
from .values import (
    EXACT_INT,
    NUMPY_DTYPE,
    PLAIN,
    READERS,
    TYPE_NAMES,
    VIEWS,
    WRITERS,
    Uncrossable,
    encode_text,
    numpy_for,
    write_rare,
)


DEEPEST = 200  # levels of nesting in a value
MOST_NODES = 1024  # shared containers in one message; further ones travel as copies
MOST_TRACKED = 1024  # items in all containers that are kept from one message to the next


class Codec:
    """
    Writes values and builds them again, and keeps the nodes that both sides share.

    Args:
        side (`int`): 0 at one end of the channel, 1 at the other, so that their nodes have different numbers.
        foreign (`Callable`): Writes a value of no known type, or raises Uncrossable.
        special (`Callable`): Builds the value of a tag that this module does not know, or raises BrokenChannel.
        shared (`bool`, *optional*, defaults to `True`): Whether to keep nodes. If `False`, all containers are copied.
    """

    def __init__(
        self,
        side: int,
        foreign: Callable[[Any], list],
        special: Callable[[list], Any],
        shared: bool = True,
    ):
        self.foreign = foreign
        self.special = special
        self.shared = shared
        self.next_node = side
        self.nodes: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # id of a node -> its number
        self.snapshots: dict[int, Any] = {}
        self.budget = 0
        self.fresh: list[int] = []

    # Writing

    def encode(self, value: Any, largest: int = LARGEST) -> Any:
        """Tagged JSON of a value; raises Uncrossable, at the latest when it has written `largest` bytes."""
        self.room = largest
        try:
            return self._encode(value, DEEPEST)
        except RecursionError:
            raise Uncrossable("a value nested too deeply") from None

    def _encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self.room -= 1
        if kind in PLAIN:
            if kind is int and not -EXACT_INT < value < EXACT_INT:
                self._spend(value.bit_length() // 4)
                return ["i", format(value, "x")]
            if kind is str:
                self._spend(len(value))
                return value if value.isascii() else encode_text(value)
            return value
        if depth <= 0:
            raise Uncrossable(f"a value nested more than {DEEPEST} levels deep")
        depth -= 1
        self._spend(0)
        if kind in _CONTAINERS:
            number = self.numbers.get(id(value))
            if number is not None and self.nodes.get(number) is value:
                return ["n", number]
            if kind is tuple:
                return ["t", *[self._encode(item, depth) for item in value]]
            if kind is frozenset:
                return ["f", *[self._encode(item, depth) for item in value]]
            number = self._register(value)
            return [_TAGS[kind], number, *self._content(value, depth)]
        write = WRITERS.get(kind)
        if write is not None:
            return write(self, value, depth)
        if kind is type and value in TYPE_NAMES:
            return ["T", TYPE_NAMES[value]]
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
            number = self.numbers.get(id(value))
            if number is not None and self.nodes.get(number) is value:
                return ["n", number]
            return self._encode_numpy(value, kind is numpy.ndarray, depth)
        if kind in VIEWS:
            return [VIEWS[kind], *[self._encode(item, depth) for item in value]]
        rare = write_rare(kind, value)
        if rare is not None:
            return rare
        if tuple in kind.__mro__ and not self.keeps_class(kind):
            fields = getattr(kind, "_fields", None)
            if type(fields) is tuple and len(fields) == tuple.__len__(value) and {*map(type, fields)} <= {str}:
                items = [self._encode(item, depth) for item in tuple.__iter__(value)]
                return ["N", str(kind.__name__), list(fields), *items]
        return self.foreign(value)

    def keeps_class(self, kind: type) -> bool:
        """Whether instances of a class of tuples are handles."""
        return False

    def _spend(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise Uncrossable("a value that is too large to send")

    def _content(self, value: Any, depth: int) -> list:
        """The content of a container: its parameters, then its items."""
        kind = type(value)
        if kind is list or kind is set:
            return [self._encode(item, depth) for item in value]
        if kind is bytearray or _is_array(value):
            return [base64.b64encode(bytes(value) if kind is bytearray else value.tobytes()).decode()]
        content: list = []
        if kind is collections.deque:
            content.append(value.maxlen)
            content += [self._encode(item, depth) for item in value]
            return content
        if kind is collections.defaultdict:
            # the default factory may be uncrossable, and a copy is only compared
            content.append(self._encode(value.default_factory, depth) if self.shared else None)
        for key, item in dict.items(value):
            content.append(self._encode(key, depth))
            content.append(self._encode(item, depth))
        return content

    def _encode_numpy(self, value: Any, is_array: bool, depth: int) -> list:
        dtype = value.dtype.str
        self._spend(value.nbytes)
        if not NUMPY_DTYPE.fullmatch(dtype):
            raise Uncrossable(f"numpy data of type {value.dtype}")
        data = base64.b64encode(value.tobytes()).decode()
        if is_array and not self.shared:
            raise Uncrossable("a numpy array, which equals no literal")
        if is_array:
            return ["A", dtype, list(value.shape), data, self._register(value)]
        return ["a", dtype, data, self._encode(value.item(), depth)]

    # Reading

    def decode(self, data: Any) -> Any:
        """The value of tagged JSON; raises BrokenChannel if it is malformed."""
        try:
            return self._decode(data)
        except BrokenChannel:
            raise
        except Exception as error:
            raise BrokenChannel(f"a malformed value: {type(error).__name__}: {str(error)[:200]}") from None

    def _decode(self, data: Any) -> Any:
        if type(data) is not list:
            if type(data) is dict:
                raise BrokenChannel("a malformed value")
            return data
        tag = data[0]
        if tag == "n":
            return self.nodes[data[1]]
        if tag == "t":
            return tuple([self._decode(item) for item in data[1:]])
        if tag == "f":
            return frozenset(_gradually(self._decode(item) for item in data[1:]))
        make = _MAKERS.get(tag)
        if make is not None:
            value = make()
            if type(value) is collections.deque:
                value = collections.deque(maxlen=data[2])
            elif type(value) is collections.defaultdict:
                value.default_factory = self._decode(data[2])
            self._adopt(data[1], value)
            self._fill(value, data[2:])
            return value
        read = READERS.get(tag)
        if read is not None:
            return read(self, data)
        return self.special(data)

    def _fill(self, value: Any, content: list) -> None:
        """Gives a container its content, in place of what it has."""
        kind = type(value)
        if kind is list:
            value[:] = [self._decode(item) for item in content]
        elif kind is set:
            members = _gradually(self._decode(item) for item in content)
            value.clear()
            value.update(members)
        elif kind is bytearray:
            value[:] = base64.b64decode(content[0])
        elif _is_array(value):
            value[...] = (
                numpy_for(value.dtype.str).frombuffer(base64.b64decode(content[0]), value.dtype).reshape(value.shape)
            )
        elif kind is collections.deque:
            items = [self._decode(item) for item in content[1:]]
            value.clear()
            value.extend(items)
        else:
            flat = [self._decode(item) for item in (content[1:] if kind is collections.defaultdict else content)]
            dict.clear(value)
            for k in range(0, len(flat), 2):
                dict.__setitem__(value, flat[k], flat[k + 1]) if kind is not collections.OrderedDict else (
                    value.__setitem__(flat[k], flat[k + 1])
                )

    # Nodes

    def begin(self) -> None:
        """Begins a message, with a new allowance of nodes."""
        self.budget = MOST_NODES
        self.fresh = []

    def rollback(self, mark: int = 0) -> None:
        """Forgets the nodes of the present message, all but the first `mark`, because they will not be sent."""
        for number in self.fresh[mark:]:
            value = self.nodes.pop(number)
            del self.numbers[id(value)]
        del self.fresh[mark:]

    def _register(self, value: Any) -> int:
        if not self.shared or self.budget <= 0:
            return -1
        self.budget -= 1
        number = self.next_node
        self.next_node += 2
        self.fresh.append(number)
        self._keep(number, value)
        return number

    def _adopt(self, number: int, value: Any) -> None:
        if number >= 0 and self.shared:
            self._keep(number, value)

    def _keep(self, number: int, value: Any) -> None:
        self.nodes[number] = value
        self.numbers[id(value)] = number

    def snapshot(self) -> None:
        """Remembers the present content of all nodes."""
        self.snapshots = {number: _shallow(value) for number, value in self.nodes.items()}

    def changes(self) -> list:
        """The content of the nodes that have changed since the last snapshot; raises Uncrossable."""
        changed = []
        for number, before in self.snapshots.items():
            value = self.nodes[number]
            if not _same(before, value):
                changed.append([number, *self._content(value, DEEPEST)])
        return changed

    def apply(self, changes: list) -> None:
        """Applies the peer's changes to the nodes of this side; raises BrokenChannel if they are malformed."""
        try:
            for number, *content in changes:
                self._fill(self.nodes[number], content)
        except BrokenChannel:
            raise
        except Exception as error:
            raise BrokenChannel(f"malformed changes: {type(error).__name__}") from None

    def oldest(self) -> list[int]:
        """The oldest nodes, without which no more than `MOST_TRACKED` items are kept."""
        size, kept = 0, 0
        for value in reversed(self.nodes.values()):
            size += 1 + (value.size if _is_array(value) else len(value))
            if size > MOST_TRACKED:
                break
            kept += 1
        return list(self.nodes)[: len(self.nodes) - kept]

    def drop(self, numbers: list[int]) -> None:
        """Forgets nodes. Both sides do so at the same time."""
        for number in numbers:
            value = self.nodes.pop(number)
            if self.numbers.get(id(value)) == number:
                del self.numbers[id(value)]
            self.snapshots.pop(number, None)


def _shallow(value: Any) -> Any:
    if type(value) in (list, collections.deque):
        return list(value)
    if type(value) is set:
        return set(value)
    if type(value) is bytearray:
        return bytes(value)
    if _is_array(value):
        return value.tobytes()
    return list(dict.items(value))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _same(before: Any, value: Any) -> bool:
    if _is_array(value):
        return before == value.tobytes()
    if len(before) != len(value):
        return False
    if type(value) in (list, collections.deque):
        return all(a is b for a, b in zip(before, value, strict=True))
    if type(value) is set:
        return {id(item) for item in before} == {id(item) for item in value}
    if type(value) is bytearray:
        return before == value
    return all(a is c and b is d for (a, b), (c, d) in zip(before, dict.items(value), strict=True))


def _gradually(items: Iterable) -> set:
    """A set, built item by item, so that signal handlers can run in between."""
    found = set()
    for item in items:
        found.add(item)
    return found


_TAGS: dict[type, str] = {
    list: "l",
    dict: "d",
    set: "s",
    bytearray: "y",
    collections.deque: "q",
    collections.OrderedDict: "o",
    collections.defaultdict: "dd",
    collections.Counter: "C",
}
NODES = frozenset(_TAGS)  # types of containers that can change
_CONTAINERS = NODES | {tuple, frozenset}
_MAKERS: dict[str, Callable[[], Any]] = {tag: kind for kind, tag in _TAGS.items()}
