"""What travels between the processes: length-prefixed JSON frames, and a codec of Python values into tagged JSON.

Only values of exact, known types are written out; everything else becomes an opaque handle that its owner keeps. Decoding
builds such values and nothing more: it calls nothing that the sender could choose. Containers that can change are *nodes*:
both sides keep them, and each message carries what changed in them since the last, so that a list that was passed to a
function is still the same list afterwards.

Knows nothing about jobs, tests or processes.
"""

import base64
import collections
import datetime
import decimal
import fractions
import functools
import json
import re
import select
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any


HEADER = struct.Struct("<I")
LARGEST = 16 << 20  # bytes in a frame
LARGEST_ANSWER = 2 << 20  # bytes of a value that is compared with a literal
DEEPEST = 200  # levels of nesting in a value
MOST_NODES = 1024  # containers of one message that stay shared; those beyond travel as copies
MOST_FIELDS = 255  # of a named tuple: making its class takes long
_EXACT_INT = 1 << 2000  # larger ones are written in hexadecimal: decimal conversion is limited and slow
_FRACTION_BITS = 1 << 16  # reducing larger ones to lowest terms takes long

LONGEST_WAIT = 3600.0  # seconds that are waited at a time; the kernel takes no more than 2 million

TIMEOUT = object()


class BrokenChannel(Exception):
    """The peer sent what it never would if it were sound."""


class Uncrossable(Exception):
    """A value that cannot be written out, and why."""


# Frames


def send(sock: socket.socket, value: Any, largest: int = LARGEST) -> None:
    """Sends one frame; raises BrokenChannel if it would be larger than `largest` bytes."""
    body = json.dumps(value, separators=(",", ":")).encode()
    if len(body) > largest:
        raise BrokenChannel(f"a message of {len(body)} bytes is larger than {largest}")
    sock.sendall(HEADER.pack(len(body)) + body)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Reads `count` bytes; raises EOFError if the peer goes before."""
    data = sock.recv(count)
    if len(data) == count:
        return data
    pieces, missing = [data], count - len(data)
    while missing and pieces[-1]:
        pieces.append(sock.recv(min(missing, 1 << 20)))
        missing -= len(pieces[-1])
    if missing:
        raise EOFError("the peer closed the channel")
    return b"".join(pieces)


def receive(sock: socket.socket, largest: int = LARGEST) -> Any:
    """The next frame; raises EOFError when the peer is gone and BrokenChannel when it sent something else."""
    (size,) = HEADER.unpack(read_exactly(sock, HEADER.size))
    if size > largest:
        raise BrokenChannel(f"a message of {size} bytes is larger than {largest}")
    return parse(read_exactly(sock, size))


def parse(body: bytes) -> Any:
    """JSON into objects; raises BrokenChannel if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BrokenChannel(f"not a message: {type(error).__name__}") from None


class Reader:
    """Frames of at most `largest` bytes from a peer that may lie, stall or vanish."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST):
        self.sock = sock
        self.largest = largest
        self.buffer = bytearray()
        self.size = 0  # bytes of the last frame
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def receive(self, deadline: float) -> Any:
        """The next frame, or `TIMEOUT` if `deadline` (seconds on the monotonic clock) comes first; otherwise as the
        function `receive`."""
        while True:
            frame = self.take()
            if frame is not None:
                return frame
            left = deadline - time.monotonic()
            if left <= 0:
                return TIMEOUT
            if self.poll.poll(min(left, LONGEST_WAIT) * 1000):
                self.fill()

    def fill(self) -> None:
        """Reads what is there, without waiting for more; raises EOFError when the peer is gone."""
        try:
            data = self.sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:  # an urgent byte, which can be seen and not read
            time.sleep(0.001)
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the peer closed the channel")
        self.buffer += data

    def take(self) -> Any:
        """A frame that has arrived completely, or `None`."""
        if len(self.buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self.buffer)
        if size > self.largest:
            raise BrokenChannel(f"a message of {size} bytes is larger than {self.largest}")
        if len(self.buffer) < HEADER.size + size:
            return None
        self.size = size
        body = bytes(self.buffer[HEADER.size : HEADER.size + size])
        del self.buffer[: HEADER.size + size]
        frame = parse(body)
        if frame is None:
            raise BrokenChannel("an empty message")
        return frame


# Values

_PLAIN = frozenset({int, float, str, bool, type(None)})
_TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(
            int,
            float,
            str,
            bool,
            bytes,
            bytearray,
            complex,
            list,
            tuple,
            dict,
            set,
            frozenset,
            range,
            slice,
            type(None),
        ),
        *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
        *(decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
    )
}
TYPE_NAMES = {cls: name for name, cls in _TYPES.items()}
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSU]\d+|[mM]8(\[\w+\])?)")
_VIEWS = {type({}.keys()): "vk", type({}.values()): "vv", type({}.items()): "vi"}


class Codec:
    """
    Writes values out and builds them again, and keeps the nodes that both sides share.

    Args:
        side (`int`): 0 on one end of the channel, 1 on the other, so that their nodes have different numbers.
        foreign (`Callable`): Writes out a value of no known type, or raises Uncrossable.
        special (`Callable`): Builds the value of a tag that this module does not know, or raises BrokenChannel.
        shared (`bool`, *optional*, defaults to `True`): Whether to keep nodes; without, all containers are copies.
        twin (`Callable`, *optional*): Gives the name of a class that both sides define, or the class of such a name, or
            `None`. Instances of such classes are nodes; by default there are none.
    """

    def __init__(
        self,
        side: int,
        foreign: Callable[[Any], list],
        special: Callable[[list], Any],
        shared: bool = True,
        twin: Callable[[Any], Any] = lambda kind: None,
    ):
        self.foreign = foreign
        self.special = special
        self.shared = shared
        self.twin = twin
        self.side = side
        self.next_node = side
        self.nodes: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # id of a node -> its number
        self.snapshots: dict[int, Any] = {}
        self.budget = 0

    # Writing

    def encode(self, value: Any) -> Any:
        """Tagged JSON of a value; raises Uncrossable."""
        try:
            return self._encode(value, DEEPEST)
        except RecursionError:
            raise Uncrossable("nested too deeply") from None

    def _encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if kind is int and not -_EXACT_INT < value < _EXACT_INT:
                return ["i", format(value, "x")]
            if kind is str and not value.isascii():
                return _encode_text(value)
            return value
        if depth <= 0:
            raise Uncrossable(f"nested more than {DEEPEST} levels deep")
        depth -= 1
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
        write = _WRITERS.get(kind)
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
        if kind in _VIEWS:
            return [_VIEWS[kind], *[self._encode(item, depth) for item in value]]
        rare = _write_rare(kind, value)
        if rare is not None:
            return rare
        name = self.twin(kind)
        if name is not None:
            number = self.numbers.get(id(value))
            if number is not None and self.nodes.get(number) is value:
                return ["n", number]
            return ["O", self._register(value), name, *self._content(value, depth)]
        # the program's own named tuples have methods, which a copy would lack
        if tuple in kind.__mro__ and (self.side == 0 or not self.shared or kind.__module__ == __name__):
            fields = kind.__dict__.get("_fields")
            if type(fields) is tuple and kind.__bases__ == (tuple,) and all(type(name) is str for name in fields):
                return [
                    "N",
                    str(kind.__name__),
                    list(fields),
                    *[self._encode(x, depth) for x in tuple.__iter__(value)],
                ]
        return self.foreign(value)

    def _content(self, value: Any, depth: int) -> list:
        """What is in a container: its parameters, then its items."""
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
            # what makes the default may not cross, and a copy is only compared
            content.append(self._encode(value.default_factory, depth) if self.shared else None)
        for key, item in _items(value):
            content.append(self._encode(key, depth))
            content.append(self._encode(item, depth))
        return content

    def _encode_numpy(self, value: Any, is_array: bool, depth: int) -> list:
        dtype = value.dtype.str
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise Uncrossable(f"numpy data of type {value.dtype} cannot cross")
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
        read = _READERS.get(tag)
        if read is not None:
            return read(self, data)
        if tag == "O":
            kind = self.twin(data[2]) if type(data[2]) is str else None
            if kind is None:
                raise BrokenChannel("an instance of a class that is not shared")
            value = object.__new__(kind)
            self._adopt(data[1], value)
            self._fill(value, data[3:])
            return value
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
                _numpy(value.dtype.str).frombuffer(base64.b64decode(content[0]), value.dtype).reshape(value.shape)
            )
        elif kind is collections.deque:
            items = [self._decode(item) for item in content[1:]]
            value.clear()
            value.extend(items)
        elif kind not in _TAGS:
            found = _own_attributes(kind, _pairs([self._decode(item) for item in content]))
            vars(value).clear()
            vars(value).update(found)
        else:
            flat = [self._decode(item) for item in (content[1:] if kind is collections.defaultdict else content)]
            dict.clear(value)
            for k in range(0, len(flat), 2):
                dict.__setitem__(value, flat[k], flat[k + 1]) if kind is not collections.OrderedDict else (
                    value.__setitem__(flat[k], flat[k + 1])
                )

    # Nodes

    def begin(self) -> None:
        """Starts a message, and allows it its nodes."""
        self.budget = MOST_NODES
        self.fresh: list[int] = []

    def rollback(self, mark: int = 0) -> None:
        """Forgets the nodes of the message that was begun, but for the first `mark`: they will not be sent."""
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
        """Remembers what all nodes hold now."""
        self.snapshots = {number: _shallow(value) for number, value in self.nodes.items()}

    def changes(self) -> list:
        """What nodes hold now, for those that have changed since the last snapshot; raises Uncrossable."""
        changed = []
        for number, before in self.snapshots.items():
            value = self.nodes[number]
            if not _same(before, value):
                changed.append([number, *self._content(value, DEEPEST)])
        return changed

    def apply(self, changes: list) -> None:
        """Puts the peer's changes into our nodes; raises BrokenChannel if they are malformed."""
        try:
            for number, *content in changes:
                self._fill(self.nodes[number], content)
        except BrokenChannel:
            raise
        except Exception as error:
            raise BrokenChannel(f"malformed changes: {type(error).__name__}") from None

    def drop(self) -> None:
        """Forgets all nodes: both sides do so at the same time."""
        self.nodes.clear()
        self.numbers.clear()
        self.snapshots.clear()


def _shallow(value: Any) -> Any:
    if type(value) in (list, collections.deque):
        return list(value)
    if type(value) is set:
        return set(value)
    if type(value) is bytearray:
        return bytes(value)
    if _is_array(value):
        return value.tobytes()
    return list(_items(value))


def _items(value: Any) -> Any:
    """Keys and values of a dict, or attributes of an object."""
    return dict.items(value) if isinstance(value, dict) else _own_attributes(type(value), vars(value)).items()


def _own_attributes(kind: type, found: dict) -> dict:
    """Attributes of an object of a class that both sides define: data, none of which hides a method of the class."""
    for name in found:
        if type(name) is not str or name[:2] == "__":
            raise Uncrossable("an object with attributes that begin with two underscores")
        other = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        if callable(other) or hasattr(type(other), "__get__"):
            raise Uncrossable(f"an object whose attribute {name} hides a method of its class")
    return found


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _same(before: Any, value: Any) -> bool:
    if _is_array(value):
        return before == value.tobytes()
    if type(value) not in _TAGS:
        now = vars(value)
        return len(before) == len(now) and all(
            a is c and b is d for (a, b), (c, d) in zip(before, now.items(), strict=True)
        )
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
    """A set, not built in one call: signals are seen between items."""
    found = set()
    for item in items:
        found.add(item)
    return found


def _encode_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # surrogates, which JSON would join into pairs
        return ["u", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]
    return value


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


def _write_timezone(codec: Codec, value: datetime.timezone, depth: int) -> list:
    return ["tz", *_timedelta(value.utcoffset(None))]


def _write_rare(kind: type, value: Any) -> list | None:
    """Tagged JSON of a value of a module that is not loaded unless the program or its tests loaded it."""
    if kind is getattr(sys.modules.get("uuid"), "UUID", None):
        return ["U", value.hex]
    if kind is not getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None):
        return None
    if value.key is None:
        raise Uncrossable("a time zone without a key cannot cross")
    return ["zi", value.key]


def _attributes(found: dict) -> dict:
    """Attributes of a namespace, without hooks such as `__array_interface__`, on whose word numpy reads memory."""
    if any(type(name) is not str or name[:2] == "__" for name in found):
        raise Uncrossable("a namespace with attributes that begin with two underscores")
    return dict(found)


def _write_fraction(codec: Codec, value: fractions.Fraction, depth: int) -> list:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _FRACTION_BITS:
        raise Uncrossable("a fraction of very large numbers")
    return ["F", codec._encode(value.numerator, depth), codec._encode(value.denominator, depth)]


def _read_fraction(codec: Codec, data: list) -> fractions.Fraction:
    numerator, denominator = codec._decode(data[1]), codec._decode(data[2])
    if max(numerator.bit_length(), denominator.bit_length()) > _FRACTION_BITS:
        raise BrokenChannel("a fraction of very large numbers")
    return fractions.Fraction(numerator, denominator)


def _timedelta(value: datetime.timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


_WRITERS: dict[type, Callable[[Codec, Any, int], list]] = {
    bytes: lambda codec, v, depth: ["b", base64.b64encode(v).decode()],
    complex: lambda codec, v, depth: ["c", v.real, v.imag],
    range: lambda codec, v, depth: ["r", *[codec._encode(x, depth) for x in (v.start, v.stop, v.step)]],
    slice: lambda codec, v, depth: ["sl", *[codec._encode(x, depth) for x in (v.start, v.stop, v.step)]],
    type(Ellipsis): lambda codec, v, depth: ["e"],
    type(NotImplemented): lambda codec, v, depth: ["ni"],
    decimal.Decimal: lambda codec, v, depth: ["D", str(v)],
    fractions.Fraction: _write_fraction,
    datetime.date: lambda codec, v, depth: ["da", v.year, v.month, v.day],
    datetime.time: lambda codec, v, depth: [
        "ti",
        *(v.hour, v.minute, v.second, v.microsecond, codec._encode(v.tzinfo, depth), v.fold),
    ],
    datetime.datetime: lambda codec, v, depth: [
        "dt",
        *(v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, codec._encode(v.tzinfo, depth), v.fold),
    ],
    datetime.timedelta: lambda codec, v, depth: ["td", *_timedelta(v)],
    datetime.timezone: _write_timezone,
    types.SimpleNamespace: lambda codec, v, depth: ["sn", *codec._content(_attributes(v.__dict__), depth)],
}


def _read_zone(codec: Codec, data: list) -> Any:
    import zoneinfo

    return zoneinfo.ZoneInfo(data[1])


def _read_uuid(codec: Codec, data: list) -> Any:
    import uuid

    return uuid.UUID(hex=data[1])


def _read_namedtuple(codec: Codec, data: list) -> Any:
    name, fields, items = data[1], data[2], [codec._decode(item) for item in data[3:]]
    if not codec.shared:
        return tuple(items)  # equal to the same literals
    return _namedtuple(name, tuple(fields))._make(items)


@functools.lru_cache(maxsize=64)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    if len(fields) > MOST_FIELDS:
        raise BrokenChannel(f"a named tuple of {len(fields)} fields")
    return collections.namedtuple(name, fields)  # validates that these are plain names


def _read_array(codec: Codec, data: list) -> Any:
    if not codec.shared:
        return codec.special(data)
    numpy = _numpy(data[1])
    value = numpy.frombuffer(base64.b64decode(data[3]), dtype=data[1]).reshape(tuple(data[2])).copy()
    codec._adopt(data[4], value)
    return value


def _read_scalar(codec: Codec, data: list) -> Any:
    if "numpy" not in sys.modules and not codec.shared:
        return codec._decode(data[3])
    return _numpy(data[1]).frombuffer(base64.b64decode(data[2]), dtype=data[1])[0]


def _numpy(dtype: str) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise BrokenChannel(f"numpy data of type {dtype[:40]!r}")
    import numpy  # only where the program has it too

    return numpy


def _pairs(flat: list) -> dict:
    return {flat[k]: flat[k + 1] for k in range(0, len(flat), 2)}


def _all(codec: Codec, items: list) -> list:
    return [codec._decode(item) for item in items]


_READERS: dict[str, Callable[[Codec, list], Any]] = {
    "i": lambda codec, d: int(d[1], 16),
    "u": lambda codec, d: base64.b64decode(d[1]).decode("utf-8", "surrogatepass"),
    "b": lambda codec, d: base64.b64decode(d[1]),
    "c": lambda codec, d: complex(d[1], d[2]),
    "r": lambda codec, d: range(*_all(codec, d[1:4])),
    "sl": lambda codec, d: slice(*_all(codec, d[1:4])),
    "e": lambda codec, d: ...,
    "ni": lambda codec, d: NotImplemented,
    "D": lambda codec, d: decimal.Decimal(d[1]),
    "F": _read_fraction,
    "da": lambda codec, d: datetime.date(*d[1:4]),
    "ti": lambda codec, d: datetime.time(d[1], d[2], d[3], d[4], codec._decode(d[5]), fold=d[6]),
    "dt": lambda codec, d: datetime.datetime(*d[1:8]).replace(tzinfo=codec._decode(d[8]), fold=d[9]),
    "td": lambda codec, d: datetime.timedelta(*d[1:4]),
    "tz": lambda codec, d: datetime.timezone(datetime.timedelta(*d[1:4])),
    "zi": _read_zone,
    "U": _read_uuid,
    "sn": lambda codec, d: types.SimpleNamespace(**_attributes(_pairs(_all(codec, d[1:])))),
    "T": lambda codec, d: _TYPES[d[1]],
    "vk": lambda codec, d: {key: None for key in _all(codec, d[1:])}.keys(),  # noqa: C420 - not in one call
    "vv": lambda codec, d: dict(enumerate(_all(codec, d[1:]))).values(),
    "vi": lambda codec, d: {key: value for key, value in _all(codec, d[1:])}.items(),  # noqa: C416 - likewise
    "N": _read_namedtuple,
    "A": _read_array,
    "a": _read_scalar,
}
