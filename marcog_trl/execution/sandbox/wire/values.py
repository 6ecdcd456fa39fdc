"""Writes single values as tagged JSON and builds them again: numbers, text, dates, arrays, named tuples and the like.

Only values of exact, known types are written. Reading builds such values and calls nothing that the sender could choose.
"""

import base64
import collections
import datetime
import decimal
import fractions
import functools
import re
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .frames import BrokenChannel


if TYPE_CHECKING:
    from .codec import Codec

MOST_FIELDS = 255  # of a named tuple: making its class is slow
EXACT_INT = 1 << 2000  # larger ints are written in hexadecimal, because decimal conversion is limited and slow
_FRACTION_BITS = 1 << 16  # reducing larger fractions to lowest terms is slow


class Uncrossable(Exception):
    """A value cannot be sent. The message describes the value."""


PLAIN = frozenset({int, float, str, bool, type(None)})
TYPES: dict[str, type] = {
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
TYPE_NAMES = {cls: name for name, cls in TYPES.items()}
NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSU]\d+|[mM]8(\[\w+\])?)")
VIEWS = {type({}.keys()): "vk", type({}.values()): "vv", type({}.items()): "vi"}


def encode_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # surrogates, which JSON would join into pairs
        return ["u", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]
    return value


def _write_bytes(codec: "Codec", value: bytes, depth: int) -> list:
    codec._spend(len(value))
    return ["b", base64.b64encode(value).decode()]


def _write_timezone(codec: "Codec", value: datetime.timezone, depth: int) -> list:
    return ["tz", *_timedelta(value.utcoffset(None))]


def write_rare(kind: type, value: Any) -> list | None:
    """Tagged JSON of a value whose module is only loaded if the program or its tests loaded it."""
    if kind is getattr(sys.modules.get("uuid"), "UUID", None):
        return ["U", value.hex]
    if kind is getattr(sys.modules.get("pathlib"), "PosixPath", None):
        return ["P", str(value)]
    if kind is not getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None):
        return None
    if value.key is None:
        raise Uncrossable("a time zone without a key")
    return ["zi", value.key]


def _write_fraction(codec: "Codec", value: fractions.Fraction, depth: int) -> list:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _FRACTION_BITS:
        raise Uncrossable("a fraction of very large numbers")
    return ["F", codec._encode(value.numerator, depth), codec._encode(value.denominator, depth)]


def _read_fraction(codec: "Codec", data: list) -> fractions.Fraction:
    numerator, denominator = codec._decode(data[1]), codec._decode(data[2])
    if max(numerator.bit_length(), denominator.bit_length()) > _FRACTION_BITS:
        raise BrokenChannel("a fraction of very large numbers")
    return fractions.Fraction(numerator, denominator)


def _timedelta(value: datetime.timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


WRITERS: dict[type, Callable[["Codec", Any, int], list]] = {
    bytes: _write_bytes,
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
}


def _read_zone(codec: "Codec", data: list) -> Any:
    import zoneinfo

    return zoneinfo.ZoneInfo(data[1])


def _read_uuid(codec: "Codec", data: list) -> Any:
    import uuid

    return uuid.UUID(hex=data[1])


def _read_path(codec: "Codec", data: list) -> Any:
    import pathlib

    return pathlib.PosixPath(data[1])


def _read_namedtuple(codec: "Codec", data: list) -> Any:
    name, fields, items = data[1], data[2], [codec._decode(item) for item in data[3:]]
    if not codec.shared:
        return tuple(items)  # equal to the same literals
    return _namedtuple(name, tuple(fields))._make(items)


@functools.lru_cache(maxsize=64)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    if len(fields) > MOST_FIELDS:
        raise BrokenChannel(f"a named tuple of {len(fields)} fields")
    return collections.namedtuple(name, fields)  # validates that these are plain names


def _read_array(codec: "Codec", data: list) -> Any:
    if not codec.shared:
        return codec.special(data)
    numpy = numpy_for(data[1])
    value = numpy.frombuffer(base64.b64decode(data[3]), dtype=data[1]).reshape(tuple(data[2])).copy()
    codec._adopt(data[4], value)
    return value


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


def _read_scalar(codec: "Codec", data: list) -> Any:
    if not codec.shared:
        return Scalar(data[1], codec._decode(data[3]))
    return numpy_for(data[1]).frombuffer(base64.b64decode(data[2]), dtype=data[1])[0]


def numpy_for(dtype: str) -> Any:
    if not NUMPY_DTYPE.fullmatch(dtype):
        raise BrokenChannel(f"numpy data of type {dtype[:40]!r}")
    import numpy  # only if the program has numpy too

    return numpy


def _all(codec: "Codec", items: list) -> list:
    return [codec._decode(item) for item in items]


READERS: dict[str, Callable[["Codec", list], Any]] = {
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
    "P": _read_path,
    "T": lambda codec, d: TYPES[d[1]],
    "vk": lambda codec, d: {key: None for key in _all(codec, d[1:])}.keys(),  # noqa: C420 - not in one call
    "vv": lambda codec, d: dict(enumerate(_all(codec, d[1:]))).values(),
    "vi": lambda codec, d: {key: value for key, value in _all(codec, d[1:])}.items(),  # noqa: C416 - likewise
    "N": _read_namedtuple,
    "A": _read_array,
    "a": _read_scalar,
}
