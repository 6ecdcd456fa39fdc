"""Writes Python values as tagged JSON and builds them again, and keeps the containers that both sides share.

Only values of exact, known types are written. Reading builds such values and calls nothing that the sender could choose.
Anything else becomes a handle, which its owner keeps. Containers that can change are *nodes*: both sides keep them, and each
message carries what has changed in them since the last one. So a list that was passed to a function is still the same list
afterwards. Only the latest nodes are kept, `MOST_TRACKED` items in all: what was passed before costs nothing, and what is no
longer kept is as if it had been copied.
"""

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import importlib
import operator
import re
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .wire import LARGEST, BrokenChannel


DEEPEST = 200  # levels of nesting in a value
MOST_NODES = 1024  # shared containers in one message; further ones travel as copies
MOST_TRACKED = 1024  # items in all containers that are kept from one message to the next
MOST_FIELDS = 255  # of a named tuple: making its class is slow
_EXACT_INT = 1 << 2000  # larger ints are written in hexadecimal, because decimal conversion is limited and slow
_FRACTION_BITS = 1 << 16  # reducing larger fractions to lowest terms is slow
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSU]\d+|[mM]8(\[\w+\])?)")


class Uncrossable(Exception):
    """A value cannot be sent. The message describes the value."""


PLAIN = frozenset({int, float, str, bool, type(None)})
_CONTAINERS = {  # those that can change
    "l": list,
    "d": dict,
    "s": set,
    "y": bytearray,
    "q": collections.deque,
    "o": collections.OrderedDict,
    "dd": collections.defaultdict,
    "C": collections.Counter,
}
_SEQUENCES = {"t": tuple, "f": frozenset, "vk": type({}.keys()), "vv": type({}.values()), "vi": type({}.items())}
NODES: dict[Any, str] = {kind: tag for tag, kind in _CONTAINERS.items()}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}


def _bounds(value: Any) -> tuple:
    return value.start, value.stop, value.step


def _clock(value: Any) -> tuple:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _days(value: datetime.timedelta) -> tuple:
    return value.days, value.seconds, value.microseconds


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > _FRACTION_BITS:
        raise BrokenChannel("a fraction of very large numbers")
    return fractions.Fraction(numerator, denominator)


# tag of a type: the type, the parts of a value, and what makes a value of them
_VALUES: dict[str, tuple[Any, Callable[[Any], tuple], Callable]] = {
    "c": (complex, lambda value: (value.real, value.imag), complex),
    "r": (range, _bounds, range),
    "sl": (slice, _bounds, slice),
    "e": (type(...), lambda value: (), lambda: ...),
    "ni": (type(NotImplemented), lambda value: (), lambda: NotImplemented),
    "D": (decimal.Decimal, lambda value: (decimal.Decimal.__str__(value),), decimal.Decimal),
    "F": (fractions.Fraction, lambda value: (value.numerator, value.denominator), _fraction),
    "dt": (
        datetime.datetime,
        lambda value: (value.year, value.month, value.day, *_clock(value)),
        lambda *parts: datetime.datetime(*parts[:8], fold=parts[8]),
    ),
    "da": (datetime.date, lambda value: (value.year, value.month, value.day), datetime.date),
    "ti": (datetime.time, _clock, lambda *parts: datetime.time(*parts[:5], fold=parts[5])),
    "td": (datetime.timedelta, _days, datetime.timedelta),
    "tz": (
        datetime.timezone,
        lambda value: _days(value.utcoffset(None)),
        lambda *parts: datetime.timezone(datetime.timedelta(*parts)),
    ),
}
_VALUE_TAGS: dict[Any, str] = {kind: tag for tag, (kind, _, _) in _VALUES.items()}
# tag of a type whose module is only loaded if the program or its tests load it: the module, the name, the attribute to send
_RARE = {"U": ("uuid", "UUID", "hex"), "P": ("pathlib", "PosixPath", "__str__"), "zi": ("zoneinfo", "ZoneInfo", "key")}
# types that both sides name by their module and name
PLACES: dict[Any, tuple[str, str]] = {
    kind: (kind.__module__, kind.__name__)
    for kind in (*NODES, *_VALUE_TAGS, type(None), *vars(builtins).values())
    if isinstance(kind, type)
}
TYPES = {place: kind for kind, place in PLACES.items()}


# Classes that derive from a builtin value type. Looked up by their bases, nearest first

_PLAIN_VALUE: dict[type, Callable] = {
    **{kind: make for kind, _, make in _VALUES.values()},
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: lambda value: bytearray(memoryview(value)),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value), value.maxlen),
    collections.defaultdict: lambda value: collections.defaultdict(None, dict(dict.items(value))),
    collections.OrderedDict: lambda value: collections.OrderedDict(collections.OrderedDict.items(value)),
    **{kind: lambda value, kind=kind: kind(dict(dict.items(value))) for kind in (dict, collections.Counter)},
    **{kind: lambda value, kind=kind: kind(kind.__iter__(value)) for kind in (list, tuple, set, frozenset)},
}
IMMUTABLE = {kind.__name__: kind for kind in (int, float, complex, str, bytes, tuple, frozenset)}
"""Types whose instances' values a handle can hold itself."""


def plain_base(kind: type) -> Any:
    """The builtin value type that a class derives from; `None` if there is none."""
    return next((base for base in kind.__mro__ if base in _PLAIN_VALUE), None)


def plain(value: Any) -> Any:
    """The builtin value that an instance of a class derived from one holds."""
    base = plain_base(type(value))
    tag = _VALUE_TAGS.get(base)
    return _PLAIN_VALUE[base](value) if tag is None else _PLAIN_VALUE[base](*_VALUES[tag][1](value))


def _refuse(value: Any) -> list:
    raise Uncrossable(f"an object of type {type(value).__name__}")


def _refuse_tag(data: list) -> Any:
    raise BrokenChannel(f"unknown tag {data[0]!r}")


class Codec:
    """
    Writes values and builds them again, and keeps the nodes that both sides share.

    Args:
        side (`int`): 0 at one end of the channel, 1 at the other, so that their nodes have different numbers.
        foreign (`Callable`): Writes a value of no known type, or raises Uncrossable.
        special (`Callable`): Builds the value of a tag that this module does not know, or raises BrokenChannel.
        keeps_class (`Callable`, *optional*): Whether instances of a class of tuples are handles. By default, none are.
        shared (`bool`, *optional*, defaults to `True`): Whether to keep nodes. If `False`, all containers are copied.
    """

    def __init__(
        self,
        side: int = 0,
        foreign: Callable[[Any], list] = _refuse,
        special: Callable[[list], Any] = _refuse_tag,
        keeps_class: Callable[[type], bool] = lambda kind: False,
        shared: bool = True,
    ):
        self.foreign = foreign
        self.special = special
        self.keeps_class = keeps_class
        self.shared = shared
        self.next_node = side
        self.nodes: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # id of a node -> its number
        self.snapshots: dict[int, list] = {}
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
            if kind is int and not -_EXACT_INT < value < _EXACT_INT:
                self._spend(value.bit_length() // 4)
                return ["i", format(value, "x")]
            if kind is str:
                self._spend(len(value))
                return value if value.isascii() else _encode_text(value)
            return value
        if depth <= 0:
            raise Uncrossable(f"a value nested more than {DEEPEST} levels deep")
        depth -= 1
        self._spend(0)
        if kind in _SEQUENCE_TAGS:
            return [_SEQUENCE_TAGS[kind], *[self._encode(item, depth) for item in value]]
        is_array = _is_array(value)
        if kind in NODES or is_array:
            number = self.numbers.get(id(value))
            if number is not None and self.nodes.get(number) is value:
                return ["n", number]
            if is_array:
                return self._encode_array(value)
            number = self._register(value)
            return [NODES[kind], number, *self._content(value, depth)]
        if kind in _VALUE_TAGS:
            return self._encode_parts(_VALUE_TAGS[kind], _VALUES[_VALUE_TAGS[kind]][1](value), depth)
        if kind is bytes:
            self._spend(len(value))
            return ["b", base64.b64encode(value).decode()]
        if _is_scalar(value):
            dtype, item = self._dtype(value), value.item()
            if type(item) is kind:  # longdouble, which no builtin type holds
                raise Uncrossable(f"numpy data of type {value.dtype}")
            return ["a", dtype, base64.b64encode(value.tobytes()).decode(), self._encode(item, depth)]
        for tag, (module, name, attribute) in _RARE.items():
            if kind is getattr(sys.modules.get(module), name, None):
                part = getattr(value, attribute)
                return [tag, part() if callable(part) else part]
        if tuple in kind.__mro__ and not self.keeps_class(kind):
            fields = getattr(kind, "_fields", None)
            if type(fields) is tuple and len(fields) == tuple.__len__(value) and {*map(type, fields)} <= {str}:
                items = [self._encode(item, depth) for item in tuple.__iter__(value)]
                return ["N", str(kind.__name__), list(fields), *items]
        return self.foreign(value)

    def _spend(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise Uncrossable("a value that is too large to send")

    def _encode_parts(self, tag: str, parts: tuple, depth: int) -> list:
        if tag == "F" and max(part.bit_length() for part in parts) > _FRACTION_BITS:
            raise Uncrossable("a fraction of very large numbers")
        if not all(map(_is_part, parts)):
            raise Uncrossable(f"a {_VALUES[tag][0].__name__} that holds an object")
        return [tag, *[self._encode(part, depth) for part in parts]]

    def _content(self, value: Any, depth: int) -> list:
        """The content of a container: its parameters, then its items."""
        content: list = []
        if type(value) is collections.deque:
            content.append(value.maxlen)
        elif type(value) is collections.defaultdict:
            # the default factory may be uncrossable, and a copy is only compared
            content.append(self._encode(value.default_factory, depth) if self.shared else None)
        return content + [self._encode(item, depth) for item in _items(value)]

    def _dtype(self, value: Any) -> str:
        self._spend(value.nbytes)
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise Uncrossable(f"numpy data of type {value.dtype}")
        return value.dtype.str

    def _encode_array(self, value: Any) -> list:
        dtype = self._dtype(value)
        if not self.shared:
            raise Uncrossable("a numpy array, which equals no literal")
        return ["A", self._register(value), dtype, list(value.shape), base64.b64encode(value.tobytes()).decode()]

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
        if tag in _SEQUENCES:
            return _sequence(tag, [self._decode(item) for item in data[1:]])
        if tag in _CONTAINERS:
            kind, rest = _CONTAINERS[tag], data[2:]
            if kind is collections.deque:
                value: Any = collections.deque(maxlen=rest[0])
            elif kind is collections.defaultdict:
                value = collections.defaultdict(self._decode(rest[0]))
            else:
                value = kind()
            self._adopt(data[1], value)
            self._fill(value, rest)
            return value
        if tag in _VALUES:
            return _VALUES[tag][2](*map(_part, map(self._decode, data[1:])))
        if tag == "i":
            return int(data[1], 16)
        if tag == "u":
            return base64.b64decode(data[1]).decode("utf-8", "surrogatepass")
        if tag == "b":
            return base64.b64decode(data[1])
        if tag == "N":
            items = [self._decode(item) for item in data[3:]]
            # without nodes, it is compared with literals, which are equal to a tuple
            return _namedtuple(data[1], tuple(data[2]))._make(items) if self.shared else tuple(items)
        if tag == "a":
            if not self.shared:
                return Scalar(data[1], self._decode(data[3]))
            return _numpy_for(data[1]).frombuffer(base64.b64decode(data[2]), dtype=data[1])[0]
        if tag == "A" and self.shared:
            items = _numpy_for(data[2]).frombuffer(base64.b64decode(data[4]), dtype=data[2])
            value = items.reshape(tuple(data[3])).copy()
            self._adopt(data[1], value)
            return value
        if tag in _RARE:
            module, name, _ = _RARE[tag]
            return getattr(importlib.import_module(module), name)(_part(data[1]))
        return self.special(data)

    def _fill(self, value: Any, content: list) -> None:
        """Gives a container its content, in place of what it has."""
        kind = type(value)
        parameters = 1 if kind is collections.deque or kind is collections.defaultdict else 0
        items = [self._decode(item) for item in content[parameters:]]
        if kind is list:
            value[:] = items
        elif kind is bytearray:
            value[:] = items[0]
        elif kind is set:
            members = _gradually(items)
            value.clear()
            value.update(members)
        elif kind is collections.deque:
            value.clear()
            value.extend(items)
        elif _is_array(value):
            value[...] = _numpy_for(value.dtype.str).frombuffer(items[0], value.dtype).reshape(value.shape)
        else:
            put = collections.OrderedDict.__setitem__ if kind is collections.OrderedDict else dict.__setitem__
            value.clear()
            for k in range(0, len(items), 2):
                put(value, items[k], items[k + 1])

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
        self._adopt(number, value)
        return number

    def _adopt(self, number: int, value: Any) -> None:
        if number >= 0 and self.shared:
            self.nodes[number] = value
            self.numbers[id(value)] = number

    def snapshot(self) -> None:
        """Remembers the present content of all nodes."""
        self.snapshots = {number: _items(value) for number, value in self.nodes.items()}

    def changes(self) -> list:
        """The content of the nodes that have changed since the last snapshot; raises Uncrossable."""
        changed = []
        for number, before in self.snapshots.items():
            value = self.nodes[number]
            items = _items(value)
            same = len(before) == len(items) and all(map(operator.is_, before, items))
            if not same and not (_is_binary(value) and before == items):
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


def _items(value: Any) -> list:
    """The content of a container: its items, keys and values by turns, or bytes as one item."""
    kind = type(value)
    if kind is list or kind is set or kind is collections.deque:
        return list(value)
    if _is_binary(value):
        return [bytes(value) if kind is bytearray else value.tobytes()]
    return [part for pair in dict.items(value) for part in pair]


def _is_binary(value: Any) -> bool:
    return type(value) is bytearray or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.generic)


def _encode_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # surrogates, which JSON would join into pairs
        return ["u", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]
    return value


def _part(value: Any) -> Any:
    """A part of a value, which must not run code when it is put together."""
    if not _is_part(value):
        raise BrokenChannel("a value of strange parts")
    return value


def _is_part(value: Any) -> bool:
    kind = type(value)
    return kind in PLAIN or kind is datetime.timezone or kind is getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None)


def _sequence(tag: str, items: list) -> Any:
    if tag == "t":
        return tuple(items)
    if tag == "f":
        return frozenset(_gradually(items))
    if tag == "vk":
        return {key: None for key in items}.keys()  # noqa: C420 - not in one call
    return dict(enumerate(items)).values() if tag == "vv" else {key: value for key, value in items}.items()  # noqa: C416


def _gradually(items: Iterable) -> set:
    """A set, built item by item, so that signal handlers can run in between."""
    found = set()
    for item in items:
        found.add(item)
    return found


@functools.lru_cache(maxsize=64)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    if len(fields) > MOST_FIELDS:
        raise BrokenChannel(f"a named tuple of {len(fields)} fields")
    return collections.namedtuple(name, fields)  # validates that these are plain names


class Scalar:
    """A scalar of numpy, in a process without numpy: equal to what numpy says that it equals, and identical to nothing."""

    def __init__(self, dtype: str, value: Any):
        self.dtype = dtype[1:]
        self.value = value

    def __eq__(self, other: Any) -> bool:
        if type(other) is float and self.dtype in ("f2", "f4"):  # numpy rounds what it compares with
            form = "e" if self.dtype == "f2" else "f"
            try:
                other = struct.unpack(form, struct.pack(form, other))[0]
            except OverflowError:
                return False
        return bool(self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def _numpy_for(dtype: str) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise BrokenChannel(f"numpy data of type {dtype[:40]!r}")
    import numpy  # only if the program has numpy too

    return numpy
