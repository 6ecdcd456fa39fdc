"""Checks and help of settings."""

from __future__ import annotations

import difflib
import dis
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints


OLD_NAMES = r"`(is_)?gradient_checkpointing\w*` is deprecated"
"""Warnings of old names of transformers that TRL sets and calls, and PEFT reads from every model: users can do nothing about them."""


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


T = TypeVar("T")

ANY = Range()
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
UNIT = Range(0, 1)
# Types of fields with a range
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Unit = Annotated[float, UNIT]
Count = Annotated[int, COUNT]
NaturalNumber = Annotated[int, NOT_NEGATIVE]


def check_fields(settings: Any, ranges: Mapping[str, Range] | None = None) -> None:
    """
    Checks the fields of a dataclass that are numbers, lists of numbers, or choices (`Literal`), or `None`.

    Args:
        settings: An instance of the dataclass. The type of a number may say its range, such as [`Unit`].
        ranges (`Mapping[str, Range]`, *optional*): Ranges of other fields. Fields without one may have any finite number.

    Raises:
        ValueError: If a value has the wrong type, is out of range, or is unknown.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        hint, value = hints[field.name], getattr(settings, field.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind, *others = (kind for kind in kinds if kind is not NoneType)
        if others or (value is None and NoneType in kinds):
            continue
        is_list = get_origin(kind) is list
        kind = get_args(kind)[0] if is_list else kind
        allowed = (ranges or {}).get(field.name, ANY)
        if get_origin(kind) is Annotated:
            kind, allowed = get_args(kind)
        if get_origin(kind) is Literal:
            check_choice(field.name, value, get_args(kind))
        elif kind in (int, float) and not is_list:
            default = None if field.default is MISSING else field.default
            check_number(field.name, value, allowed, whole=kind is int, default=default)
        elif kind in (int, float):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{field.name}={value!r} must be a list of numbers.")
            for number in value:
                if wrong := _wrong(number, allowed, whole=kind is int):
                    raise ValueError(f"{field.name}={value!r}: every entry {wrong}.")


def documented(cls: type[T]) -> type[T]:
    """
    Makes the first sentence of what a dataclass's docstring says of a field the help of its flag. A decorator.

    Fields that have a help of their own keep it.
    """
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (cls.__doc__ or "").splitlines():
        entry = re.match(r" +(\w+(?:, \w+)*) \(.+\):(.*)", line)
        if entry is not None:
            names, line = entry[1].split(", "), entry[2]
        elif not line.strip():
            names = []
        for name in names:
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    for field in fields(cast(Any, cls)):
        if field.name in texts and "help" not in field.metadata:
            sentence = re.match(r".*?\.(?= [^a-z]|$)", texts[field.name])
            said = texts[field.name] if sentence is None else sentence[0]
            field.metadata = {
                **field.metadata,
                "help": re.sub(r"\[`~?(?:\w+\.)*(\w+)`\]", r"\1", said).replace("`", "").replace("%", "%%"),
            }  # type: ignore[assignment]
    return cls


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


# Names that arguments of TRL had, or have in other trainers
_FORMER = {
    "tokenizer": "processing_class",
    "config": "args",
    "lora_config": "peft_config",
    "dataset": "train_dataset",
    **dict.fromkeys(("reward_fn", "reward_function", "reward_functions", "reward_model"), "reward_funcs"),
    **dict.fromkeys(
        ("max_new_tokens", "max_response_length", "response_length", "max_tokens"), "max_completion_length"
    ),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_coeff"), "beta"),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs"), "num_iterations"),
    **dict.fromkeys(("cliprange", "clip_range", "clip_eps"), "epsilon"),
    **dict.fromkeys(("batch_size", "train_batch_size", "mini_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("num_epochs", "epochs"), "num_train_epochs"),
    **dict.fromkeys(("lr",), "learning_rate"),
    **dict.fromkeys(("group_size", "num_samples", "n", "num_return_sequences", "rloo_k"), "num_generations"),
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    **dict.fromkeys(("torch_dtype", "dtype"), "model_init_kwargs={'dtype': ...}"),
}
# Arguments of TRL that have no successor, and why
_GONE = {
    "max_prompt_length": "Prompts are never cut",
    "ref_model": "The reference is the model without its adapter; set beta",
    "value_model": "The critic is a head on the policy",
    "vllm_device": "vLLM shares the device of the training",
}


def check_names(title: str, given: Iterable[str], known: Iterable[str], elsewhere: Iterable[str], where: str) -> None:
    """
    Refuses arguments that a class does not have, and says what they are called.

    Args:
        title (`str`): Name of the class in errors.
        given (`Iterable[str]`): Names of the arguments.
        known (`Iterable[str]`): Names that the class has.
        elsewhere (`Iterable[str]`): Names that the class beside it has.
        where (`str`): What that class is, in errors.

    Raises:
        TypeError: If a name is unknown.
    """
    known, elsewhere = list(known), list(elsewhere)
    for name in given:
        if name in known:
            continue
        former = _FORMER.get(name, name)
        argument = former.partition("=")[0]
        near = former if argument in known else nearest(name, known)
        if name in _GONE:
            instead = f"{_GONE[name]}: leave it out."
        elif argument in elsewhere:
            instead = f"It is an argument of {where}: {former if former != argument else former + '=...'}"
        else:
            instead = f"Did you mean {near}?" if near else "Leave it out."
        raise TypeError(f"{title} has no argument {name!r}. {instead}")


def instead_of(name: str, known: Iterable[str]) -> str:
    """Returns what to use instead of an unknown name: the closest known one, or all of them."""
    known = list(known)
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else f"Use one of {', '.join(known)}."
