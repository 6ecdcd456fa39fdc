"""Checks of numbers and choices in settings."""

from __future__ import annotations

import difflib
import dis
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """
    A range of numbers.

    Args:
        low, high (`float`, *optional*): Bounds, both inclusive. Without them, the range has every finite number.
        above (`bool`, *optional*, defaults to `False`): Whether to exclude `low`.
        below (`bool`, *optional*, defaults to `False`): Whether to exclude `high`.
        infinite (`bool`, *optional*, defaults to `False`): Whether to include infinity.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return self.infinite and value == math.inf
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        low = "" if self.low == -math.inf else f"{'greater than' if self.above else 'at least'} {self.low}"
        high = "" if self.high == math.inf else f"{'less than' if self.below else 'at most'} {self.high}"
        return " and ".join(filter(None, (low, high)))


ANY = Range()
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
UNIT = Range(0, 1)


def check_numbers(settings: Any, ranges: Mapping[str, Range]) -> None:
    """
    Checks all fields of a dataclass with the type number, optional number or list of numbers.

    Args:
        settings: An instance of the dataclass.
        ranges (`Mapping[str, Range]`): Range of each field. Fields without a range may have any finite number.

    Raises:
        ValueError: If a value has the wrong type or is out of range.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        kinds = kinds if get_origin(hints[field.name]) is not list else (list[kinds[0]],)  # type: ignore[valid-type]
        kind = next((kind for kind in kinds if kind in (int, float, list[int], list[float])), None)
        if kind is None or len({*kinds} - {NoneType}) > 1 or (value is None and NoneType in kinds):
            continue
        allowed = ranges.get(field.name, ANY)
        if kind in (int, float):
            default = None if field.default is MISSING else field.default
            check_number(field.name, value, allowed, whole=kind is int, default=default)
        elif not isinstance(value, list | tuple):
            raise ValueError(f"{field.name}={value!r} must be a list of numbers.")
        for number in value if isinstance(value, list | tuple) else ():
            if wrong := _wrong(number, allowed, whole=kind == list[int]):
                raise ValueError(f"{field.name}={value!r}: every entry {wrong}.")


def check_number(name: str, value: Any, allowed: Range, whole: bool = False, default: float | None = None) -> None:
    """
    Checks one number.

    Args:
        name (`str`): Name of the field in errors.
        value (`Any`): Value to check.
        allowed ([`Range`]): Allowed range.
        whole (`bool`, *optional*, defaults to `False`): Whether the value must be an `int`.
        default (`float`, *optional*): Value that errors suggest.

    Raises:
        ValueError: If the value has the wrong type or is out of range.
    """
    if wrong := _wrong(value, allowed, whole):
        raise ValueError(f"{name}={value!r} {wrong}." + ("" if default is None else f" Set {name}={default}."))


def _wrong(value: Any, allowed: Range, whole: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return f"must be a {'whole ' if whole else ''}number"
    number = float(value)
    if number in allowed:
        return ""
    return f"must be {allowed}" if math.isfinite(number) else "must be a finite number"


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises a `ValueError` if the field `name` has another value than the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(map(repr, allowed))}.")


def returns_value(function: Callable) -> bool:
    """Whether a Python function has a `return` with another value than a literal `None`. Reads its bytecode."""
    for before, this in pairwise(dis.get_instructions(function)):
        if this.opname == "RETURN_CONST" and this.argval is not None:
            return True
        literal = (before.opname, before.argval) == ("LOAD_CONST", None) and not this.is_jump_target
        if this.opname == "RETURN_VALUE" and not literal:
            return True
    return False


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name closest to an unknown one, or `""` if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return close[0] if close else ""


def instead_of(name: str, known: Iterable[str]) -> str:
    """Returns what to use instead of an unknown name: the closest known one, or all of them."""
    known = list(known)
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else f"Use one of {', '.join(known)}."
