"""
Experiments with a function, to see whether a program or a test needs what it returns.

The code of this file runs in the process of an untrusted program, in a namespace of its own, see
[`~marcog_trl.rewards.experiments.experiment`]. So it imports the standard library only, and nothing that it returns is
believed: what counts are the verdicts of the tests.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any


SWAPPED = str.maketrans("()[]{}<>+-*/.,:;!?", ")(][}{><-+/*,.;:?!")


def frozen(helper: Callable) -> Callable:
    """A helper that always returns what it returned first. Only solutions that need another value notice."""
    kept: list[Callable[[], Any]] = []

    def choose(value: Any, before: Any) -> Any:
        make = copies_of(value)
        if not kept and make is not None:
            kept.append(make)
        return kept[0]() if kept else value

    return replaced(helper, choose)


def changed(helper: Callable) -> Callable:
    """
    A helper that returns another value of the same type, without the truth of a container changed: see [`another`]. Truth
    values become the opposite of the first one. What cannot be changed, such as an object, becomes what the helper returned
    first. What only hands on the arguments does not count as work, and stays.
    """
    first: list[Any] = []
    turns = itertools.count()
    handed_on: set[int] | None = None

    def choose(value: Any, before: Any) -> Any:
        nonlocal handed_on
        if isinstance(value, Iterator):
            head = list(itertools.islice(value, 1000))
            return itertools.chain(choose(head, before), value)
        found = {i for i, argument in enumerate([*before, before]) if same(value, argument)}
        handed_on = found if handed_on is None else handed_on & found
        if handed_on:
            return value
        turn = next(turns)
        make = copies_of(value)
        if not first and make is not None:
            first.append(make)
        kept = first[0]() if first else value
        if type(value) is bool:
            return not kept
        other = another(value, turn, longer=turn % 2 == 1)
        return kept if same(other, value) and type(kept) is type(value) else other

    return replaced(helper, choose)


def alone(helper: Callable) -> Callable:
    """The helper in place of the entry point. Iterators become lists, which tests can compare."""

    @functools.wraps(helper)
    def entry_point(*args: Any, **kwargs: Any) -> Any:
        value = helper(*args, **kwargs)
        return list(value) if isinstance(value, Iterator) else value

    return entry_point


def above(function: Callable, examples: list[tuple[list[Any], dict[str, Any]]]) -> Callable:
    """
    A function that is right about examples only, given by the positional and the named arguments of their calls. Otherwise it
    returns another value, of the same type if there is one: numbers are larger, containers longer.
    """
    return right_about(examples, function, 0)


def below(function: Callable, examples: list[tuple[list[Any], dict[str, Any]]]) -> Callable:
    """As [`above`], with still other values: numbers have the other sign."""
    return right_about(examples, function, 1)


def right_about(examples: list[tuple[list[Any], dict[str, Any]]], function: Callable, turn: int) -> Callable:
    import inspect  # takes longer than most programs

    def arguments(args: Any, kwargs: Any) -> Any:
        """By parameter, with defaults, however they are passed; as they are passed if the function does not take them."""
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return [*args, kwargs]
        bound.apply_defaults()
        return bound.arguments

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        known = any(same(arguments(args, kwargs), arguments(*example)) for example in examples)
        value = function(*args, **kwargs)
        value = list(value) if isinstance(value, Iterator) else value
        if known:
            return value
        if value is None:
            return turn
        if type(value) in (str, list, tuple, set, frozenset) and not value:
            return type(value)("az"[turn])
        other = another(value, turn, longer=True)
        return None if same(other, value) else other

    return stand_in


def replaced(helper: Callable, choose: Callable[[Any, Any], Any]) -> Callable:
    """`helper` with `choose(value, arguments)` in place of each value. Its calls of itself get the true values."""
    inside = False

    def run(function: Callable, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return function(*args, **kwargs)
        finally:
            inside = False

    def items(iterator: Iterator) -> Iterator:
        end = object()
        while (item := run(next, iterator, end)) is not end:
            yield item

    @functools.wraps(helper)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return helper(*args, **kwargs)
        before = copies_of([*args, *kwargs.values()])  # the helper may change its arguments
        value = run(helper, *args, **kwargs)
        if isinstance(value, Iterator):
            value = items(value)
        return choose(value, [] if before is None else before())

    del stand_in.__wrapped__  # type: ignore[attr-defined]
    return stand_in


def copies_of(value: Any) -> Callable[[], Any] | None:
    """A function that makes a new copy of a value with each call; `None` if the value cannot be copied."""
    if isinstance(value, Iterator):
        (source,) = itertools.tee(value, 1)
        return lambda: copy.copy(source)
    try:
        kept = copy.deepcopy(value)
    except Exception:  # whatever the objects of the program raise
        return None
    return lambda: copy.deepcopy(kept)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal. Lists, tuples and ranges count as one type."""
    value, other = (list(v) if isinstance(v, (tuple, range)) else v for v in (value, other))
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # the comparison of the program's objects
        return False


def another(value: Any, turn: int, longer: bool = False) -> Any:
    """
    Another value of the same type: numbers move up or down, letters and digits become others, containers change by element
    and keep their keys. The direction depends on `turn` and on the place, so that neither order nor sums nor symmetry stay.

    Args:
        value (`Any`): The value.
        turn (`int`): Number of the call.
        longer (`bool`, *optional*, defaults to `False`): Whether a container or text also gets one more element.

    Returns:
        `Any`: The other value; `value` if it cannot be changed.
    """
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float, complex):
        return (-value - 1 if turn % 2 else value + 11) or value - 1
    if kind is str:
        letters = [other_letter(letter, turn + i) for i, letter in enumerate(value)]
        return "".join(letters + letters[-1:] * longer)
    if kind in (list, tuple):
        items = [another(item, turn + i) for i, item in enumerate(value)]
        return kind(items + [another(item, turn + len(items)) for item in value[-1:] * longer])
    if kind in (set, frozenset):
        items = [another(item, 0) for item in value]
        return kind(items + [another(item, 0) for item in sorted(items, key=repr)[-1:] * longer])
    if isinstance(value, dict):
        other = copy.copy(value)
        for i, (key, item) in enumerate(value.items()):
            other[key] = another(item, turn + i)
        for key in list(value)[-1:] * longer:
            other[another(key, turn)] = other[key]
        return other
    return value


def other_letter(letter: str, turn: int) -> str:
    """Another letter, digit or sign. The case of every second letter changes."""
    for letters in ("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"):
        if letter in letters:
            other = letters[(letters.index(letter) + 1 + turn % 5) % len(letters)]
            return other.swapcase() if turn % 2 else other
    return letter.translate(SWAPPED)
