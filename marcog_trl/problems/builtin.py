"""
The built-in problem set: "first do this, then do that", for integers, lists and strings.

Each problem consists of two steps. In its reference solution, the function `aux` does the first step, and the entry point
calls `aux` and does the second step. Nothing is downloaded, and no code is run except that of the steps below.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any


@dataclass(frozen=True)
class Step:
    """
    One step of a problem. A kind of value (`takes`, `gives`) is also the name of the argument: `numbers` is a list of
    integers, `n` an integer, `text` a string.

    Args:
        name (`str`): Unique name.
        takes (`str`): Kind of the input.
        gives (`str`): Kind of the output.
        text (`str`): Description in the docstring, with `{k}` for the parameter.
        code (`str`): Expression with `{x}`, exactly once, and `{k}`.
        mistakes (`tuple[str, ...]`): Wrong expressions, with mistakes that a programmer might make.
        ks (`tuple[int, ...]`, *optional*, defaults to `(0,)`): Values of the parameter; `(0,)` if there is none.
    """

    name: str
    takes: str
    gives: str
    text: str
    code: str
    mistakes: tuple[str, ...]
    ks: tuple[int, ...] = (0,)


DIGITS = tuple(range(2, 10))
SMALL = (2, 3, 4)

STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step("evens", "numbers", "numbers", "keep the even numbers", "[v for v in {x} if v % 2 == 0]",
             ("[v for v in {x} if v % 2 == 1]", "[v for v in {x} if v > 2]")),
        Step("odds", "numbers", "numbers", "keep the odd numbers", "[v for v in {x} if v % 2 == 1]",
             ("[v for v in {x} if v % 2 == 0]", "[v for v in {x} if v > 1]")),
        Step("above", "numbers", "numbers", "keep the numbers above {k}", "[v for v in {x} if v > {k}]",
             ("[v for v in {x} if v < {k}]", "[v for v in {x} if v % {k} == 0]"), DIGITS),
        Step("below", "numbers", "numbers", "keep the numbers below {k}", "[v for v in {x} if v < {k}]",
             ("[v for v in {x} if v > {k}]", "[v for v in {x} if v % {k} == 0]"), DIGITS),
        Step("add", "numbers", "numbers", "add {k} to each number", "[v + {k} for v in {x}]",
             ("[v - {k} for v in {x}]", "[v * {k} for v in {x}]"), DIGITS),
        Step("multiply", "numbers", "numbers", "multiply each number by {k}", "[v * {k} for v in {x}]",
             ("[v + {k} for v in {x}]", "[v // {k} for v in {x}]"), DIGITS),
        Step("remainder", "numbers", "numbers", "take each number modulo {k}", "[v % {k} for v in {x}]",
             ("[v // {k} for v in {x}]", "[v - {k} for v in {x}]"), DIGITS),
        Step("square", "numbers", "numbers", "square each number", "[v * v for v in {x}]",
             ("[v + v for v in {x}]", "[v * 3 for v in {x}]")),
        Step("reverse", "numbers", "numbers", "reverse the list", "{x}[::-1]",
             ("sorted({x})", "{x}[1:]")),
        Step("sort", "numbers", "numbers", "sort the list", "sorted({x})",
             ("{x}[::-1]", "sorted({x})[::-1]")),
        Step("drop", "numbers", "numbers", "drop the first {k} numbers", "{x}[{k}:]",
             ("{x}[:{k}]", "{x}[-{k}:]"), SMALL),
        Step("take", "numbers", "numbers", "take the first {k} numbers", "{x}[:{k}]",
             ("{x}[{k}:]", "{x}[-{k}:]"), SMALL),
        Step("index", "numbers", "numbers", "add its index to each number", "[i + v for i, v in enumerate({x})]",
             ("[i * v for i, v in enumerate({x})]", "[i for i, v in enumerate({x})]")),
        Step("front", "numbers", "numbers", "put {k} in front", "[{k}] + {x}",
             ("{x} + [{k}]", "[v + {k} for v in {x}]"), DIGITS),
        Step("end", "numbers", "numbers", "put {k} at the end", "{x} + [{k}]",
             ("[{k}] + {x}", "[v + {k} for v in {x}]"), DIGITS),
        Step("sum", "numbers", "n", "add all numbers up", "sum({x})", ("max({x})", "len({x})")),
        Step("largest", "numbers", "n", "find the largest number", "max({x})", ("min({x})", "sum({x})")),
        Step("smallest", "numbers", "n", "find the smallest number", "min({x})", ("max({x})", "len({x})")),
        Step("last", "numbers", "n", "pick the last number", "{x}[-1]", ("{x}[0]", "max({x})")),
        Step("how_many", "numbers", "n", "count the numbers", "len({x})", ("sum({x})", "min({x})")),
        Step("join", "numbers", "text", "join the numbers with dashes", "'-'.join(map(str, {x}))",
             ("''.join(map(str, {x}))", "'+'.join(map(str, {x}))")),
        Step("plus", "n", "n", "increase it by {k}", "{x} + {k}", ("{x} - {k}", "{x} * {k}"), DIGITS),
        Step("times", "n", "n", "scale it by {k}", "{x} * {k}", ("{x} + {k}", "{x} // {k}"), DIGITS),
        Step("modulo", "n", "n", "reduce it modulo {k}", "{x} % {k}", ("{x} // {k}", "{x} - {k}"), DIGITS),
        Step("power", "n", "n", "raise it to the power {k}", "{x} ** {k}", ("{x} * {k}", "{x} + {k}"), (2, 3)),
        Step("digits", "n", "numbers", "list its digits", "[int(c) for c in str({x})]",
             ("[int(c) + 1 for c in str({x})]", "[int(c) for c in str({x})][::-1]")),
        Step("up_to", "n", "numbers", "list the numbers from 1 up to it", "list(range(1, {x} + 1))",
             ("list(range({x}))", "list(range(1, {x}))")),
        Step("backwards", "text", "text", "read the text backwards", "{x}[::-1]", ("{x}[1:]", "{x}[:-1]")),
        Step("upper", "text", "text", "make the text upper case", "{x}.upper()", ("{x}.title()", "{x}.lower()")),
        Step("cut", "text", "text", "cut the first {k} letters", "{x}[{k}:]", ("{x}[:{k}]", "{x}[-{k}:]"), SMALL),
        Step("double", "text", "text", "double each letter", "''.join(c * 2 for c in {x})",
             ("''.join(c for c in {x})", "''.join(c * 3 for c in {x})")),
        Step("dashes", "text", "text", "put dashes between the letters", "'-'.join({x})",
             ("'+'.join({x})", "'-' + {x}")),
        Step("repeat", "text", "text", "repeat the text {k} times", "{x} * {k}", ("{x}[:{k}]", "{x}[{k}:]"), SMALL),
        Step("consonants", "text", "text", "remove the vowels", "''.join(c for c in {x} if c not in 'aeiou')",
             ("''.join(c for c in {x} if c in 'aeiou')", "''.join(c for c in {x} if c not in 'aei')")),
        Step("lengths", "text", "numbers", "list the length of each word", "[len(w) for w in {x}.split()]",
             ("[len(w) + 1 for w in {x}.split()]", "[w for w in {x}.split()]")),
        Step("length", "text", "n", "count the letters", "len({x})", ("len({x}) - 1", "len({x}.split())")),
        Step("vowels", "text", "n", "count the vowels", "sum(c in 'aeiou' for c in {x})",
             ("sum(c not in 'aeiou' for c in {x})", "sum(c in 'aei' for c in {x})")),
    )
}  # fmt: skip

ENTRY_POINT = "solve"
SIZES = {"train": 800, "validation": 96, "test": 120}
SHARES = {"validation": 0.11, "test": 0.14}
MIN_TESTS, MAX_TESTS = 5, 8
EXAMPLE_LENGTH = 50  # maximum number of characters of the input and output in the docstring
WORDS = (
    "apple banana cherry grape lemon melon olive peach plum quince radish spinach tomato walnut yam zucchini".split()
)


def write_aux(step: Step, k: int, expression: str | None = None) -> str:
    """
    Write the function of the helper.

    Args:
        step (`Step`): First step of the problem.
        k (`int`): Its parameter.
        expression (`str`, *optional*): One of `step.mistakes` in place of `step.code`.

    Returns:
        `str`: Source of `aux`.
    """
    return f"def aux({step.takes}):\n    return {(expression or step.code).format(x=step.takes, k=k)}"


def write_main(step: Step, k: int, argument: str, expression: str | None = None) -> str:
    """
    Write the function of the main agent.

    Args:
        step (`Step`): Second step of the problem.
        k (`int`): Its parameter.
        argument (`str`): Name of the argument of the entry point: the kind that the first step takes.
        expression (`str`, *optional*): One of `step.mistakes` in place of `step.code`.

    Returns:
        `str`: Source of the entry point.
    """
    code = (expression or step.code).format(x=f"aux({argument})", k=k)
    return f"def {ENTRY_POINT}({argument}):\n    return {code}"


@dataclass(frozen=True, eq=False)
class _BoundStep:
    """A step with a value of its parameter, ready to run. Compares by identity."""

    step: Step
    k: int
    expression: str

    @cached_property
    def run(self) -> Callable[[Any], Any]:
        return eval(f"lambda x: {self.expression.format(x='x', k=self.k)}")

    @cached_property
    def mistakes(self) -> list[_BoundStep]:
        return [_BoundStep(self.step, self.k, expression) for expression in self.step.mistakes]


_BOUND_STEPS = [_BoundStep(step, k, step.code) for step in STEPS.values() for k in step.ks]
_NOTHING = [_BoundStep(Step("nothing", kind, kind, "", "{x}", ()), 0, "{x}") for kind in ("numbers", "n", "text")]


def _try(call: _BoundStep, value: Any) -> Any:
    """Result of a step; `None` if it raises an exception."""
    try:
        return call.run(value)
    except (TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError, OverflowError):
        return None


def _fulfils(first: _BoundStep, second: _BoundStep, value: Any, expected: Any) -> bool:
    return _try(second, _try(first, value)) == expected


def _rivals(first: _BoundStep, second: _BoundStep, value: Any, expected: Any) -> list[tuple[_BoundStep, _BoundStep]]:
    """
    All wrong programs that pass a test with this input and output: other pairs of steps, a single step, no step, and
    mistakes in one of the steps.
    """
    rivals = [(f, second) for f in first.mistakes if _fulfils(f, second, value, expected)]
    rivals += [(first, g) for g in second.mistakes if _fulfils(first, g, value, expected)]
    gives = second.step.gives
    agreeing: dict[tuple[str, str], list[_BoundStep]] = {}
    for f in (call for call in (*_BOUND_STEPS, *_NOTHING) if call.step.takes == first.step.takes):
        between = _try(f, value)
        case = (f.step.gives, str(between))
        if case not in agreeing:
            seconds = [g for g in (*_BOUND_STEPS, *_NOTHING) if g.step.takes == f.step.gives and g.step.gives == gives]
            agreeing[case] = [g for g in seconds if _try(g, between) == expected]
        rivals += [(f, g) for g in agreeing[case] if (f, g) != (first, second)]
    return rivals


def _draw(kind: str, rng: random.Random, short: bool) -> Any:
    """Draw an input of a kind. Short inputs are for the docstring."""
    if kind == "numbers":
        return [rng.randint(1, 12) for _ in range(rng.randint(4, 5) if short else rng.randint(5, 8))]
    if kind == "n":
        return rng.randint(2, 19) if short else rng.randint(2, 60)
    return " ".join(rng.sample(WORDS, rng.randint(1, 2) if short else rng.randint(2, 3)))


def _small(value: Any) -> bool:
    """Whether a value is not empty and small enough to be written in a test."""
    if isinstance(value, int):
        return abs(value) < 10**6
    return 0 < len(value) <= 60 and (isinstance(value, str) or all(map(_small, value)))


def _examples(first: _BoundStep, second: _BoundStep, rng: random.Random) -> list[tuple[Any, Any]] | None:
    """
    Pairs of input and output that only this pair of steps satisfies, with the one for the docstring first; `None` if another
    program is equal to it, or nearly so.
    """
    examples: list[tuple[Any, Any]] = []
    rivals: list[tuple[_BoundStep, _BoundStep]] = []
    for _ in range(60):
        value = _draw(first.step.takes, rng, short=not examples)
        between = first.run(value)
        if not _small(between) or any(value == seen for seen, _ in examples):
            continue
        expected = second.run(between)
        if not _small(expected) or (not examples and len(f"{value}{expected}") > EXAMPLE_LENGTH):
            continue
        if examples:
            survivors = [(f, g) for f, g in rivals if _fulfils(f, g, value, expected)]
        else:
            survivors = _rivals(first, second, value, expected)
        if len(examples) < MIN_TESTS - 1 or len(survivors) < len(rivals) or not rivals:
            examples.append((value, expected))
            rivals = survivors
        if len(examples) >= MIN_TESTS and not rivals:
            return examples
        if len(examples) == MAX_TESTS:
            return None
    return None


def _statement(first: _BoundStep, second: _BoundStep, value: Any, result: Any) -> dict[str, Any]:
    """The columns that say what to do: the prompt, with this input and result as its example, and the steps."""
    steps = f"First {first.step.text.format(k=first.k)}, then {second.step.text.format(k=second.k)}."
    example = f">>> {ENTRY_POINT}({value!r})\n    {result!r}"
    return {
        "prompt": f'def {ENTRY_POINT}({first.step.takes}):\n    """{steps}\n\n    {example}\n    """\n',
        "entry_point": ENTRY_POINT,
        "first": first.step.name,
        "first_k": first.k,
        "second": second.step.name,
        "second_k": second.k,
    }


def _row(task_id: str, first: _BoundStep, second: _BoundStep, examples: list[tuple[Any, Any]]) -> dict[str, Any]:
    statement = _statement(first, second, *examples[0])
    aux, main = write_aux(first.step, first.k), write_main(second.step, second.k, first.step.takes)
    return {
        "task_id": task_id,
        **statement,
        "test": [f"assert {ENTRY_POINT}({value!r}) == {expected!r}" for value, expected in examples],
        "test_format": "asserts",
        "setup": "",
        "canonical_solution": f"{aux}\n\n\n{main}\n",
        "starter_code": statement["prompt"],
        "aux": aux,
        "main": main,
    }


def _choices(first: str, second: str, rng: random.Random) -> list[tuple[_BoundStep, _BoundStep]]:
    """All choices of the parameters of two steps, shuffled."""
    choices = [(f, s) for f in _BOUND_STEPS if f.step.name == first for s in _BOUND_STEPS if s.step.name == second]
    return rng.sample(choices, len(choices))


@lru_cache
def pairings() -> dict[str, list[tuple[str, str]]]:
    """
    Distribute the pairs of steps over the splits. The pairs do not depend on the seed of the problems, so a model that was
    built on the training problems of one seed has not seen held-out pairs of another seed.

    Returns:
        `dict[str, list[tuple[str, str]]]`: Split → pairs of first and second step. Each pair is in one split only, and each
        of its steps is also in `train`, in the same position.
    """
    rng = random.Random("pairings")
    pairs = [(a.name, b.name) for a in STEPS.values() for b in STEPS.values() if a.gives == b.takes and a != b]
    train = [pair for pair in pairs if any(_examples(*calls, rng) for calls in _choices(*pair, rng)[:3])]
    sizes = {split: round(share * len(train)) for split, share in SHARES.items()}
    splits: dict[str, list[tuple[str, str]]] = {"train": train, **{split: [] for split in SHARES}}
    for first, second in rng.sample(train, len(train)):
        split = next((split for split in SHARES if len(splits[split]) < sizes[split]), None)
        partners = min(sum(first == pair[0] for pair in train), sum(second == pair[1] for pair in train))
        if split is not None and partners > 2:
            train.remove((first, second))
            splits[split].append((first, second))
    return splits


@lru_cache
def generate(split: str, seed: int = 0) -> tuple[dict[str, Any], ...]:
    """
    Generate a split of the built-in set: distinct problems, with each pair of steps about equally often.

    Args:
        split (`str`): `train`, `validation` or `test`. No pair of steps is in two splits, but all steps are in all splits.
        seed (`int`, *optional*, defaults to `0`): Seed of parameters, examples and tests.

    Returns:
        `tuple[dict, ...]`: Rows with the columns of all problem sets, `aux` and `main` (the two functions of the reference
        solution), and `first`, `first_k`, `second`, `second_k` (names in [`STEPS`], and parameters).
    """
    rng = random.Random(f"{split} {seed}")
    waiting = [_choices(first, second, rng) for first, second in pairings()[split]]
    rows: list[dict[str, Any]] = []
    while any(waiting) and len(rows) < SIZES[split]:
        rng.shuffle(waiting)
        for choices in waiting:
            while choices and len(rows) < SIZES[split]:
                first, second = choices.pop()
                examples = _examples(first, second, rng)
                if examples is not None:
                    rows.append(_row(f"builtin/{split}/{len(rows)}", first, second, examples))
                    break
    rng.shuffle(rows)
    return tuple(rows)


def generate_exercises(seed: int = 0) -> tuple[dict[str, Any], ...]:
    """
    Generate exercises in reading, one for each pair of steps that do not fit together: the second does not take what the first
    gives. They have no test and no solution, but both functions can be written. Their example has an input of the first step,
    and a result of the second one for an input of its own. No split has such a pair.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of parameters and examples.

    Returns:
        `tuple[dict, ...]`: Rows with the columns `prompt`, `entry_point`, `first`, `first_k`, `second` and `second_k`.
    """
    rng = random.Random(f"exercises {seed}")
    pairs = [(a.name, b.name) for a in STEPS.values() for b in STEPS.values() if a.gives != b.takes]
    rows = []
    for first, second in (_choices(*pair, rng)[0] for pair in pairs):
        results = (second.run(_draw(second.step.takes, rng, short=True)) for _ in count())
        rows.append(_statement(first, second, _draw(first.step.takes, rng, short=True), next(filter(_small, results))))
    return tuple(rows)
