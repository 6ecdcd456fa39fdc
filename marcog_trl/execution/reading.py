"""Reads tests in the forms in which people and published problem sets write them, for all who run tests. Never executes anything."""

import ast
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from typing import Any, cast

from . import analysis, assertions
from .analysis import TestFormat
from .jobs import TEST_FORMATS, UnusableTests, parsed


INPUTS = ("inputs", "input", "stdin")
OUTPUTS = ("outputs", "output", "stdout", "expected_output", "expected")
FUNCTIONS = ("fn_name", "func_name", "function_name")
CASES = ("test_cases", "tests")
_KINDS = ("testtype", "type")
_LISTS = "as_lists"
_LISTS_SOURCE = f"""\
def {_LISTS}(value):
    return [{_LISTS}(each) for each in value] if isinstance(value, (list, tuple)) else value
"""
_WAYS = "write asserts, check(candidate), functions named test_..., TestCase classes, or pairs of input and output"


@dataclass(frozen=True)
class Tests:
    """
    Tests as the executor runs them: fields of a [`Job`].

    Attributes:
        tests (`str` or `tuple`): See [`Job`].
        test_format (`str`): `"asserts"`, `"check"`, `"stdio"` or `"unittest"`.
        entry_point (`str` or `None`): The one that was given, or that the tests name: by `check(name)` or `fn_name`.
        setup (`str`): The set-up that was given, with the helpers that the tests need.
    """

    __test__ = False  # so that pytest does not collect it

    tests: str | tuple[str, ...] | tuple[tuple[str, str], ...]
    test_format: TestFormat
    entry_point: str | None = None
    setup: str = ""


class Cases(tuple):
    """A mapping as a tuple of pairs, which can be hashed."""


def read_tests(
    value: Any, test_format: str | None = None, entry_point: str | None = None, setup: str | None = None
) -> Tests:
    """
    Read tests.

    Statements that are not tests (imports, assignments, prints) belong to the next test. What cannot fail is refused.

    Args:
        value (`str`, `Sequence` or `Mapping`): One of

            - Python, as one text or a list of texts: asserts, scripts with helpers, `check(candidate)`, functions named
              `test_…` and classes of pytest, `TestCase` classes. In a list, each text is a test;
            - pairs of standard input and expected output; `{"inputs": […], "outputs": […]}`; or a list of
              `{"input": …, "output": …}`. With `fn_name`, the inputs are lists of arguments (or texts with one value in JSON a
              line), and the outputs are what the function returns;
            - any of these as text in JSON.
        test_format (`str`, *optional*): See [`Job`]. Found in the tests by default.
        entry_point (`str`, *optional*): Name of the function or class to test, or `"Solution().name"`.
        setup (`str`, *optional*): Imports and helpers of the tests.

    Returns:
        [`Tests`]: What the executor runs.

    Raises:
        UnusableTests: If there are no tests, or they cannot be run or cannot fail. The message is one line. It is a
            `ValueError`.
    """
    return _read(_hashable(value), test_format or None, entry_point or None, setup or "")


def _hashable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays of numpy, as pandas gives for lists
        value = value.tolist()
    if isinstance(value, Mapping):
        return Cases((str(key), _hashable(each)) for key, each in value.items() if each is not None)
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4096)
def _read(value: Any, test_format: str | None, entry_point: str | None, setup: str) -> Tests:
    if test_format not in (None, *TEST_FORMATS):
        raise UnusableTests(f"test_format={test_format!r} must be one of {', '.join(TEST_FORMATS)}")
    reader = _Reader(test_format, entry_point, setup)
    if isinstance(value, str):
        text = value.lstrip("\ufeff")
        data = _data(text) if test_format in (None, "stdio", "asserts") else None
        return reader.texts([text], cut=True) if data is None else reader.data(_hashable(data))
    return reader.data(value)


def _data(text: str) -> Any:
    """The list or mapping that a text writes in JSON or as literals of Python; `None` if it is something else."""
    if text.strip()[:1] not in ("{", "["):
        return None
    for load in (json.loads, ast.literal_eval):
        try:
            found = load(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, dict | list) else None
    return None


class _Reader:
    def __init__(self, test_format: str | None, entry_point: str | None, setup: str):
        self.test_format = test_format
        self.entry_point = entry_point
        self.setup = setup

    def tests(self, tests: Any, test_format: TestFormat, entry_point: str | None = None, setup: str = "") -> Tests:
        if self.test_format not in (None, test_format):
            raise UnusableTests(
                f"test_format={self.test_format!r}, but the tests are {test_format!r}. Leave out test_format"
            )
        return Tests(tests, test_format, self.entry_point or entry_point, "\n".join(filter(None, [self.setup, setup])))

    # Lists and mappings

    def data(self, value: Any) -> Tests:
        if not value:
            raise UnusableTests(f"no tests: a problem needs at least one; {_WAYS}")
        if isinstance(value, Cases):
            return self.columns(dict(value))
        if not isinstance(value, tuple):
            raise UnusableTests(f"tests={value!r:.80} is a {type(value).__name__}: {_WAYS}")
        if all(isinstance(each, str) for each in value):
            if len(value) == 1 and (data := _data(value[0])) is not None and self.test_format != "asserts":
                return self.data(_hashable(data))
            return self.texts([text.lstrip("\ufeff") for text in value], cut=False)
        if all(isinstance(each, Cases) for each in value):
            return self.rows([dict(each) for each in value])
        for k, each in enumerate(value):
            if not isinstance(each, tuple) or len(each) != 2:
                raise UnusableTests(f"tests[{k}] must be a (stdin, expected_stdout) pair of texts, got {each!r:.80}")
        return self.pairs(list(value))

    def columns(self, given: Mapping[str, Any]) -> Tests:
        for name in CASES:
            if isinstance(given.get(name), tuple) and not any(key in given for key in (*INPUTS, *OUTPUTS)):
                function = _first(given, FUNCTIONS)
                cases = [Cases((*each, ("fn_name", function))) for each in given[name]] if function else given[name]
                return self.data(tuple(cases))
        inputs, outputs = _sides(given, "tests")
        several = isinstance(inputs, tuple) and isinstance(outputs, tuple)
        if several and len(inputs) != len(outputs):
            raise UnusableTests(f"the tests have {len(inputs)} inputs, but {len(outputs)} outputs")
        pairs = list(zip(inputs, outputs, strict=True)) if several else [(inputs, outputs)]
        function = _first(given, FUNCTIONS)
        return self.calls(pairs, function, wrapped=True) if function else self.pairs(pairs)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> Tests:
        pairs = [_sides(row, f"tests[{k}]") for k, row in enumerate(rows)]
        names = {_first(row, FUNCTIONS) for row in rows}
        kinds = {str(_first(row, _KINDS) or "") for row in rows}
        functional = {kind for kind in kinds if kind.startswith("func")}
        if len(names) > 1 or (functional and functional != kinds):
            raise UnusableTests("some tests call a function and some read standard input: make a problem of each kind")
        (name,) = names
        if name is None and functional:
            if self.entry_point is None:
                raise UnusableTests("the tests call a function that they do not name: set entry_point to its name")
            name = self.entry_point
        return self.pairs(pairs) if name is None else self.calls(pairs, name)

    def pairs(self, pairs: Sequence[tuple[Any, Any]]) -> Tests:
        if not pairs:
            raise UnusableTests(f"no tests: a problem needs at least one; {_WAYS}")
        return self.tests(
            tuple((_stream(given, k), _stream(wanted, k)) for k, (given, wanted) in enumerate(pairs)), "stdio"
        )

    def calls(self, pairs: Sequence[tuple[Any, Any]], name: str, wrapped: bool = False) -> Tests:
        """Asserts that call a function. `wrapped` outputs may be lists of one value, the one that is returned."""
        if not pairs:
            raise UnusableTests(f"no tests: a problem needs at least one; {_WAYS}")
        called = self.entry_point or name
        texts = []
        for k, (given, wanted) in enumerate(pairs):
            is_text = isinstance(given, str)
            given = [_json(line, k) for line in given.splitlines() if line.strip()] if is_text else _thawed(given)
            wanted = _json(wanted, k) if is_text and isinstance(wanted, str) else _thawed(wanted)
            if isinstance(given, dict):
                arguments = [f"{key}={_literal(value, k)}" for key, value in given.items()]
            else:
                arguments = [_literal(value, k) for value in (given if isinstance(given, list) else [given])]
            call, expected = f"{called}({', '.join(arguments)})", _literal(wanted, k)
            if not isinstance(wanted, list):
                texts.append(f"assert {call} == {expected}")
            elif wrapped and len(wanted) == 1:
                texts.append(f"assert {_LISTS}({call}) in ({expected}, {_literal(wanted[0], k)})")
            else:
                texts.append(f"assert {_LISTS}({call}) == {expected}")
        helper = _LISTS_SOURCE if any(_LISTS in text for text in texts) and _LISTS not in self.setup else ""
        return self.tests(tuple(texts), "asserts", name, helper)

    # Python

    def texts(self, texts: Sequence[str], cut: bool) -> Tests:
        """Reads texts of Python. `cut` says whether a text may be several tests."""
        texts = [text for text in texts if text.strip()]
        if not texts:
            raise UnusableTests(f"no tests: a problem needs at least one; {_WAYS}")
        trees, texts = _parsed(texts, "tests" if cut else "tests[{}]")
        whole = "\n".join(texts)
        known = assertions.Assertions([parsed(self.setup, "setup"), *trees])
        test_format = self.test_format or analysis.guess_format(whole)
        if test_format in ("check", "unittest"):
            tree = parsed(whole, "tests")
            of_format = analysis.fault_of_check if test_format == "check" else analysis.fault_of_functions
            fault = of_format(tree, known)
            if fault is not None:
                raise UnusableTests(fault)
            name = analysis.checked_name(tree) if test_format == "check" else self.name_under_test(trees)
            return self.tests(whole, cast(TestFormat, test_format), name)
        if test_format != "asserts":
            raise UnusableTests(f"test_format={test_format!r}, but the tests are Python. Leave out test_format")
        tests: list[str] = []
        waiting: list[str] = []  # statements that belong to the next test
        for tree, text in zip(trees, texts, strict=True):
            parts = list(_parts(tree, text, known))
            if not cut:
                parts = [("\n".join(part for part, _ in parts), any(is_test for _, is_test in parts))]
            for part, is_test in parts:
                waiting.append(part)
                if is_test:
                    tests.append("\n".join(waiting))
                    waiting = []
        fault = analysis.fault_of_asserts(trees, known)
        if fault is not None or not tests:
            raise UnusableTests(fault or f"the tests assert nothing, so that every program passes: {_WAYS}")
        name = self.name_under_test(trees)
        return self.tests(tuple(tests), "asserts", name)

    def name_under_test(self, trees: list[ast.Module]) -> str | None:
        """The only name that tests take from the program, if it is one. Raises an error if they do not test the program."""
        setup = parsed(self.setup, "setup")
        name = self.entry_point and self.entry_point.partition("(")[0]
        own = [analysis.of_program(tree, self.entry_point) for tree in trees]
        body = [node for tree in own for node in tree.body]
        if name and any(name in analysis.bound_names(node) for node in body):
            raise UnusableTests(
                f"the tests define {name} themselves, so that they would not test the program: leave it out"
            )
        sources = [ast.unparse(tree) for tree in [setup, *own]]
        exported, _ = analysis.exports(sources, [setup, *own], None)
        if not exported and not name:
            raise UnusableTests("the tests use nothing of the program: call the function that it defines")
        for node in body:
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Name) and node.test.id in (name, *exported):
                raise UnusableTests(f"'{ast.unparse(node)}' is true for every program: call {node.test.id}")
        return exported[0] if len(exported) == 1 else None


def _parsed(texts: list[str], label: str) -> tuple[list[ast.Module], list[str]]:
    """The trees of texts, and the texts. Texts that are the lines of one text are joined."""
    own = [_without_margin(text) for text in texts]
    whole = _without_margin("\n".join(texts))
    try:
        return [parsed(text, label.format(k)) for k, text in enumerate(own)], own
    except UnusableTests as error:
        fault = error
    try:
        return [parsed(whole, "tests")], [whole]
    except UnusableTests:
        raise fault from fault.__cause__


def _flat(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements of a script, with those under `if __name__ == "__main__":` in their place."""
    found: list[ast.stmt] = []
    for node in body:
        found += node.body if isinstance(node, ast.If) and assertions.is_main_block(node) else [node]
    return found


def _parts(tree: ast.Module, text: str, known: assertions.Assertions) -> Iterator[tuple[str, bool]]:
    """The statements of a text, and whether each is a test. Statements in one line belong together."""
    body = _flat(tree.body)
    if body != tree.body:
        text = ast.unparse(ast.Module(body, []))
        tests = [known.in_statement(node) for node in body]
        body = ast.parse(text).body
    else:
        tests = [known.in_statement(node) for node in body]
    # Not `splitlines`, which also splits at characters that do not end a line of Python
    lines = StringIO(text, newline=None).readlines()
    start = 0
    for k, node in enumerate(body):
        end = node.end_lineno or len(lines)
        if k + 1 < len(body) and body[k + 1].lineno == end:
            tests[k + 1] |= tests[k]
            continue
        yield "".join(lines[start:end]).removesuffix("\n"), tests[k]
        start = end


def _without_margin(text: str) -> str:
    """A text without the indentation that all of its lines have."""
    first = text.lstrip("\r\n")
    return textwrap.dedent(first) if first[:1] in (" ", "\t") else text


def _first(given: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((given[name] for name in names if given.get(name)), None)


def _sides(given: Mapping[str, Any], label: str) -> tuple[Any, Any]:
    """The input and the output of a test, or those of all tests."""
    sides = [next((given[name] for name in names if name in given), None) for names in (INPUTS, OUTPUTS)]
    if None in sides:
        raise UnusableTests(
            f"{label} has the keys {sorted(given)}, but needs one of {', '.join(INPUTS)} and one of {', '.join(OUTPUTS)}"
        )
    return sides[0], sides[1]


def _stream(value: Any, k: int) -> str:
    """Standard input or output: a text, its lines, or a number."""
    if isinstance(value, tuple) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(str(line).rstrip("\n") for line in value)
    if not isinstance(value, str | int | float):
        raise UnusableTests(f"tests[{k}] must be a (stdin, expected_stdout) pair of texts, got {value!r:.80}")
    return str(value)


def _json(text: str, k: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UnusableTests(f"tests[{k}] has {text!r:.80}, which is not JSON: {error}") from None


def _thawed(value: Any) -> Any:
    if isinstance(value, Cases):
        return {key: _thawed(each) for key, each in value}
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


def _literal(value: Any, k: int) -> str:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UnusableTests(f"tests[{k}] has {text:.80}, which Python cannot write as a literal") from None
    return text
