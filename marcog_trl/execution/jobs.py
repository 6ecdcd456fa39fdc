"""Input and output of the executor: `Job`, `TestResult` and `Verdict`, and the checks of a job before it runs.

Test code is parsed here, never executed.
"""

import ast
import base64
import marshal
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from . import analysis, assertions
from .analysis import TestFormat
from .sandbox import values


LEAST_MEMORY_MB = 64  # most of it is for the interpreter itself
TEST_FORMATS = ("asserts", "check", "stdio", "unittest")
Status = Literal["passed", "failed", "timeout", "error", "infrastructure"]
TestStatus = Literal["passed", "failed", "timeout", "error", "skipped"]


@dataclass(frozen=True)
class Job:
    """
    One program and the tests that judge it. Jobs compare by value.

    Args:
        code (`str`):
            The untrusted program. It runs as a module named `solution`; for `stdio`, as `__main__`.
        tests (`str` or sequence of `str` or of pairs of `str`):
            `asserts`: a sequence of texts, each one test, run in order in one namespace. `check`: source that defines
            `check(candidate)`. `stdio`: a sequence of `(stdin, expected_stdout)` pairs. `unittest`: source with
            `TestCase` classes. A list is stored as a tuple.
        test_format (`str`, *optional*, defaults to `"asserts"`):
            One of `"asserts"`, `"check"`, `"stdio"`, `"unittest"`.
        setup (`str`, *optional*, defaults to `""`):
            Imports and helpers of the tests. It runs before them in their process; the program never sees it. For
            `stdio`, it may define `check_output(stdin, expected, output)`, which replaces the comparison word by word.
        entry_point (`str`, *optional*):
            Name that the program must define. `None` takes every name that the tests use and do not define from the
            program, except builtins. Required for `check`, where it is the `candidate`.
        timeout (`float`, *optional*):
            Limit of the CPU time of the whole job in seconds, loading and tests included. Defaults to the executor's.
        memory_mb (`int`, *optional*):
            Limit of the program's address space in MiB. Defaults to the executor's.
        test_timeout (`float`, *optional*):
            Limit of the CPU time of each test in seconds, within that of the job. Defaults to the executor's.
        files (`bool`, *optional*):
            Whether the program and its tests share a scratch folder. Defaults to the executor's `files`.
        kept_output (`int`, *optional*, defaults to `0`):
            For `stdio`: how many characters of what the program printed to keep as the `output` of each test's result.

    Raises:
        ValueError: If `code` or `setup` is not text.
    """

    code: str
    tests: str | Sequence[str] | Sequence[tuple[str, str]]
    test_format: TestFormat = "asserts"
    setup: str = ""
    entry_point: str | None = None
    timeout: float | None = None
    memory_mb: int | None = None
    test_timeout: float | None = None
    files: bool | None = None
    kept_output: int = 0

    def __post_init__(self):
        for field in ("code", "setup"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"{field} must be text, got {type(getattr(self, field)).__name__}.")
        if isinstance(self.tests, list):
            tests = tuple(tuple(test) if isinstance(test, list) else test for test in self.tests)
            object.__setattr__(self, "tests", tests)


@dataclass(frozen=True)
class TestResult:
    """
    The result of one test.

    Attributes:
        status (`str`): `"passed"`, `"failed"` (a wrong value or an exception), `"timeout"`, `"error"` (the program
            could not be loaded, lacks the entry point, or died, or the tests cannot be run), or `"skipped"` (not
            reached, or not run after `max_timeouts`).
        message (`str`): Why it did not pass; empty if it passed.
        seconds (`float`): Wall-clock time of this test in seconds.
        raised (`bool`): Whether it `"failed"` with an exception that came from the program, such as an `AssertionError`
            that the program raised. `False` if a value was wrong: an assertion of the tests was false, or the tests
            could not use the value. Decided outside the program's process, by where the exception came from.
        output (`str`): What the program printed, if the job keeps it.
    """

    __test__ = False  # so that pytest does not collect it

    status: TestStatus
    message: str = ""
    seconds: float = 0.0
    raised: bool = False
    output: str = ""


@dataclass(frozen=True)
class Verdict:
    """
    The result of one job.

    Attributes:
        status (`str`): The worst result: `"infrastructure"`, `"timeout"`, `"error"`, `"failed"` or `"passed"`, worst
            first. `"infrastructure"` means that the executor failed; it says nothing about the program.
        passed (`int`): Number of tests that passed.
        total (`int`): Number of tests, at least 1.
        tests (`tuple[TestResult, ...]`): One result per test, in order.
        message (`str`): The first problem; empty if everything passed.
        seconds (`float`): Wall-clock time of the job in seconds, from the time when a worker began with it.
        unusable (`bool`): Whether the tests cannot be run, so that the verdict (`"error"`) says nothing about the program.
    """

    status: Status
    passed: int
    total: int
    tests: tuple[TestResult, ...] = ()
    message: str = ""
    seconds: float = 0.0
    unusable: bool = False


_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class UnusableTests(ValueError):
    """The tests or their set-up cannot be run: they do not parse, or they test nothing."""


def unusable(job: Job, reason: str) -> Verdict:
    """The verdict on a job whose tests cannot be run. A model may have written them, so this is not an exception."""
    total = max(1, len(job.tests)) if isinstance(job.tests, tuple) else 1
    return Verdict("error", 0, total, (TestResult("error", reason),) * total, reason, unusable=True)


@dataclass(frozen=True)
class Plan:
    """The needs of a job's tests. Computed once for all programs that share the tests."""

    total: int
    exports: tuple[str, ...]
    modules: tuple[tuple[str, str], ...] = ()  # (name, module) pairs that the tests use without importing them
    seeded: tuple[str, ...] = ()  # modules whose random numbers the tests seed
    checker: bool = False  # whether the set-up defines check_output
    files: bool = False  # whether the tests work with files
    codes: tuple[str, ...] = ()  # the set-up and the tests, compiled for the judge
    counted: bool = False  # whether the asserts of a check are tests of their own
    functions: tuple[str, ...] = ()  # functions of a module of tests that are tests
    imports: tuple[str, ...] = ()  # modules that the tests import
    calls: list[dict[str, Any]] | None = None  # the tests as calls, if each compares a call of literals with a literal


def plan(job: Job) -> Plan:
    """
    Checks a job and finds what its tests need from the program.

    Args:
        job (`Job`): The job.

    Returns:
        `Plan`: The number of tests, the names to take from the program, and how to run the tests.

    Raises:
        UnusableTests: If the tests or `setup` cannot be run.
        ValueError: If a field of the job is wrong.
    """
    if not isinstance(job, Job):
        raise ValueError(f"expected a Job, got {type(job).__name__}")
    name = job.entry_point
    if name is not None and not (isinstance(name, str) and analysis.ENTRY_POINT.fullmatch(name)):
        raise ValueError(
            f"entry_point={name!r} must be the name of a function or class of the program, or 'Solution().name'"
        )
    check_limit("timeout", job.timeout, optional=True)
    check_limit("test_timeout", job.test_timeout, optional=True)
    check_count("memory_mb", job.memory_mb, least=LEAST_MEMORY_MB, optional=True)
    check_count("kept_output", job.kept_output, least=0)
    if job.test_format not in TEST_FORMATS:
        raise ValueError(f"test_format={job.test_format!r} must be one of {', '.join(TEST_FORMATS)}")
    if job.test_format in ("asserts", "stdio"):
        if not isinstance(job.tests, tuple):
            raise ValueError(f"{job.test_format} tests must be a list, got {type(job.tests).__name__}")
        if not job.tests:
            raise UnusableTests("no tests: a job needs at least one test")
    elif not isinstance(job.tests, str):
        raise ValueError(f"{job.test_format} tests must be one text, got {type(job.tests).__name__}")
    for k, test in enumerate(job.tests if isinstance(job.tests, tuple) else ()):
        if job.test_format == "asserts" and not isinstance(test, str):
            raise ValueError(f"tests[{k}] must be text, got {type(test).__name__}")
        if job.test_format == "stdio" and not (
            isinstance(test, tuple) and len(test) == 2 and all(isinstance(part, str) for part in test)
        ):
            raise ValueError(f"tests[{k}] must be a (stdin, expected_stdout) pair of texts, got {test!r:.80}")
        if job.test_format == "stdio" and not _is_unicode(test[0]):
            raise UnusableTests(f"tests[{k}] has a lone surrogate in stdin, which cannot be encoded: {test[0]!r:.80}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # when parts of the tests are compiled again
            return _plan(job.test_format, job.tests, job.setup, job.entry_point)
    except (RecursionError, MemoryError) as error:
        raise UnusableTests(f"the tests are nested too deeply: {error}") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_limit(name: str, value: float | int | None, optional: bool = False) -> None:
    """Raises `ValueError` unless `value` is a finite positive number (or `None`, if `optional`)."""
    if value is None and optional:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a positive number{' or None' if optional else ''}")


def check_count(name: str, value: int | None, least: int = 1, optional: bool = False) -> None:
    """Raises `ValueError` unless `value` is an integer of at least `least` (or `None`, if `optional`)."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}{' or None' if optional else ''}")


@lru_cache(maxsize=4096)
def _plan(test_format: str, tests: str | tuple, setup: str, entry_point: str | None) -> Plan:
    sources = {"setup": setup}
    if test_format != "stdio":
        sources |= (
            {f"tests[{k}]": test for k, test in enumerate(tests)} if isinstance(tests, tuple) else {"tests": tests}
        )
    given = [parsed(source, label) for label, source in sources.items()]
    try:
        trees = [analysis.of_program(tree, entry_point) for tree in given]
    except ValueError as error:
        raise UnusableTests(str(error)) from None
    texts = [
        text if tree is before else ast.unparse(tree)
        for text, before, tree in zip(sources.values(), given, trees, strict=True)
    ]
    setup_tree, *rest = trees
    if test_format == "unittest":
        rest[0].body = analysis.collected(rest[0].body)
    if test_format == "stdio":
        checker = any(isinstance(node, ast.FunctionDef) and node.name == "check_output" for node in setup_tree.body)
        _refuse(ast.walk(setup_tree))
        return Plan(
            len(tests),
            (),
            checker=checker,
            files=analysis.uses_files(ast.walk(setup_tree)),
            codes=(_code(setup_tree, "<setup>"),),
            imports=analysis.imported_modules(trees),
        )
    exported = entry_point and entry_point.partition("(")[0]
    exports, modules = analysis.exports(texts, trees, exported)
    imports = (*analysis.imported_modules(trees), *dict(modules).values())
    if test_format == "asserts":
        for k, tree in enumerate(rest):
            if not tree.body:
                raise UnusableTests(f"tests[{k}] holds no statement")
            if all(isinstance(node, analysis.DEFINITIONS) or assertions.is_main_block(node) for node in tree.body):
                raise UnusableTests(f"tests[{k}]={tests[k]!r:.80} only defines something, which every program passes")
            for node in assertions.statements(tree.body):
                wrong = assertions.slip(node)
                _raise(wrong and f"tests[{k}]={tests[k]!r:.80} {wrong}")
        calls = _calls([tree.body for tree in rest], exports, setup_tree)
        return Plan(len(rest), exports, modules, imports=imports, **_reach(trees, calls, analysis.explained))
    (tree,) = rest
    if test_format == "unittest":
        classes = [n for part in (setup_tree, tree) for n in ast.walk(part) if isinstance(n, ast.ClassDef)]
        functions = analysis.test_functions(tree.body)
        if not classes and not functions:
            raise UnusableTests(
                "test_format='unittest' needs a TestCase class with at least one test method, or functions named test_..."
            )
        # The judge counts them again: tests may be inherited, assigned or coroutines
        total = len(functions) + sum(len(assertions.test_methods(node)) for node in classes)
        reach = _reach(trees, None, lambda tree: tree)
        names = tuple(function.name for function in functions)
        return Plan(max(1, total), exports, modules, functions=names, imports=imports, **reach)
    check = analysis.check_function(tree)
    if check is None:
        raise UnusableTests(
            f"tests={tests!r:.80} must define a function check(candidate), because test_format='check'"
        )
    if entry_point is None:
        raise ValueError("test_format='check' needs entry_point, the name of the function that is passed as candidate")
    if analysis.checked_name(tree) == entry_point:
        tree.body = [node for node in tree.body if not analysis.calls_check(node)]
    units = analysis.units(check)
    calls = None
    if units and exported == entry_point and analysis.is_plain_check(tree, check):
        calls = _calls([[unit] for unit in units], (check.args.args[0].arg,), setup_tree, rename=entry_point)
    reach = _reach(trees, calls, lambda tree: analysis.instrumented(tree, check))
    return Plan(max(1, len(units)), exports, modules, counted=bool(units), imports=imports, **reach)


def _raise(fault: str | None) -> None:
    if fault is not None:
        raise UnusableTests(fault)


def _reach(
    trees: list[ast.Module],
    calls: list[dict[str, Any]] | None,
    rewrite: Callable[[ast.Module], ast.Module],
) -> dict[str, Any]:
    """Finds what tests do besides calling the program, as arguments of `Plan`. The set-up comes first. `rewrite` changes the tests so
    that the judge can tell them apart and explain them."""
    if calls is not None:  # the tests are not run
        return {"calls": calls, "files": analysis.uses_files(ast.walk(trees[0]))}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    _refuse(nodes)
    codes = [_code(trees[0], "<setup>"), *(_code(rewrite(tree), "<tests>") for tree in trees[1:])]
    return {"seeded": analysis.seeded_modules(nodes), "files": analysis.uses_files(nodes), "codes": tuple(codes)}


def _refuse(nodes: Iterable[ast.AST]) -> None:
    _raise(analysis.refusal(nodes))


def _code(tree: ast.Module, name: str) -> str:
    """A compiled module as text. Workers run the same Python as this process."""
    return base64.b64encode(marshal.dumps(compile(tree, name, "exec", dont_inherit=True))).decode()


def _calls(
    bodies: list[list[ast.stmt]], exports: tuple[str, ...], setup: ast.Module, rename: str | None = None
) -> list[dict[str, Any]] | None:
    """The tests as calls and the literals to compare with; `None` if the tests have to be run."""
    if not all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in setup.body):
        return None
    codec = values.Codec(shared=False)
    calls: list[dict[str, Any]] = []
    for body in bodies:
        test = analysis.direct(body[0]) if len(body) == 1 else None
        if test is None or test.name not in exports:
            return None
        try:
            args = [codec.encode(arg) for arg in test.args]
            kwargs = {name: codec.encode(value) for name, value in test.kwargs.items()}
            expected = codec.encode(test.expected)
        except values.Uncrossable:
            return None
        call = [rename or test.name, args, kwargs]
        calls.append({"call": call, "operator": test.operator, "expected": expected})
    return calls


def parsed(source: str, label: str) -> ast.Module:
    """The syntax tree of tests. Raises an [`UnusableTests`] that names them `label` if they are not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about invalid escapes in the tests
            compile(source, f"<{label}>", "exec", dont_inherit=True)  # which finds more errors
            return ast.parse(source)
    except _UNPARSABLE as error:
        raise UnusableTests(f"{label}={source!r:.80} does not parse: {error}") from error
