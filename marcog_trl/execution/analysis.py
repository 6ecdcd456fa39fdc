"""Reads tests on their syntax tree: which format they have, what they need from the program, which of them need no test code to
be run, and which count as tests of their own. Never executes anything.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal


TestFormat = Literal["asserts", "check", "stdio", "unittest"]
_COMMON_MODULES = {
    name: name
    for name in (
        "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator os random re "
        "statistics string sys time typing numpy"
    ).split()
} | {"np": "numpy"}
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
_FILE_MODULES = frozenset(
    "sqlite3 dbm shelve tempfile shutil pathlib glob fileinput zipfile tarfile gzip bz2 lzma openpyxl docx PyPDF2 pypdf".split()
)
_FILE_FUNCTIONS = frozenset(  # of os
    "path stat listdir scandir walk remove unlink rename replace mkdir makedirs rmdir removedirs chdir getcwd symlink link "
    "truncate access".split()
)
_FILE_NAME = re.compile(r"[\w./-]+\.(?:csv|db|ini|jpg|json|log|md|pdf|png|sqlite|toml|tsv|txt|xml|yaml|yml|zip)")
_RUN = frozenset("eval exec compile __import__ get_type_hints".split())  # functions that run text
_LOAD = frozenset(  # modules that run or build what they read
    "pickle _pickle cPickle dill cloudpickle joblib marshal shelve runpy importlib imp code codeop ctypes _ctypes".split()
)
_READ = frozenset("read_pickle load_module exec_module".split())
_OPERATORS: dict[type, str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not"}
_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
LEFT, RIGHT, RECORD = "__left__", "__right__", "__record__"  # names that instrumented tests use


# Format, and what the tests need


def split_asserts(source: str) -> list[str]:
    """
    Cuts a module into tests: each ends with an assert and begins after the one before.

    Args:
        source (`str`): Python source.

    Returns:
        `list[str]`: the tests in order; statements after the last assert are a test of their own.
    """
    lines, tests, start = StringIO(source, newline=None).read().split("\n"), [], 0
    body = ast.parse(source).body
    for k, node in enumerate(body):
        if isinstance(node, ast.Assert) or k == len(body) - 1:
            end = node.end_lineno or len(lines)
            if end > start:  # not in the line of the assert before
                tests.append("\n".join(lines[start:end]))
            start = end
    return tests


def guess_format(source: str) -> TestFormat:
    """`check` if the module defines a function of that name, `unittest` if it has classes with test methods, else
    `asserts`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return "check"
        if isinstance(node, ast.ClassDef) and any(getattr(item, "name", "").startswith("test") for item in node.body):
            return "unittest"
    return "asserts"


def exports(
    sources: list[str], trees: list[ast.Module], entry_point: str | None
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """
    Finds the names to take from the program, and the modules that the tests use without importing them.

    A program could define a `math` of its own, with an `isclose` that is always true. So `math.isclose` in a test means the
    standard library's, even if the test relies on the program to import it. For the same reason, the name of a builtin is
    only taken from the program if it is the entry point, or if the tests call nothing else.

    Args:
        sources (`list[str]`): The set-up and the tests, which share one namespace.
        trees (`list[ast.Module]`): The same sources, parsed.
        entry_point (`str` or `None`): Name that the program must define.

    Returns:
        `tuple`: The names, and pairs of a name and the module that it means.
    """
    free = free_names(sources)
    if entry_point is None and not free:
        entry_point = _builtin_under_test(trees)
    modules = {}
    for name in free:
        if name in _COMMON_MODULES and name != entry_point and _only_as_module(name, trees):
            modules[name] = _COMMON_MODULES[name]
    names = [name for name in free if name not in modules]
    if entry_point is not None:
        names = list(dict.fromkeys([entry_point, *names]))
    return tuple(names), tuple(modules.items())


def _builtin_under_test(trees: list[ast.Module]) -> str | None:
    """The function that all asserts call first, if it is a builtin: `sum` in `assert sum(1, 2) == 3`."""
    asserts = [node.test for tree in trees for node in tree.body if isinstance(node, ast.Assert)]
    calls = [next((node for node in ast.walk(test) if isinstance(node, ast.Call)), None) for test in asserts]
    names = {call.func.id for call in calls if call is not None and isinstance(call.func, ast.Name)}
    return names.pop() if len(names) == 1 and names <= _BUILTINS else None


def _only_as_module(name: str, trees: list[ast.Module]) -> bool:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    attributes = sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        for node in nodes
    )
    return uses == attributes


def free_names(sources: list[str]) -> tuple[str, ...]:
    """
    Finds names that the sources use as globals and that none of them binds, except builtins.

    Args:
        sources (`list[str]`): Valid Python sources that will share one namespace.

    Returns:
        `tuple[str, ...]`: The names, in alphabetical order.
    """
    used: set[str] = set()
    bound: set[str] = set()
    try:
        tables = [symtable.symtable("\n".join(sources), "<tests>", "exec")]
    except SyntaxError:  # a `from __future__ import` that is no longer at the beginning
        tables = [symtable.symtable(source, "<tests>", "exec") for source in sources]
    while tables:
        table = tables.pop()
        tables.extend(table.get_children())
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if top or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported() or (top and symbol.is_namespace()):
                    bound.add(symbol.get_name())
                if symbol.is_referenced():
                    used.add(symbol.get_name())
    return tuple(sorted(used - bound - _BUILTINS))


def seeded_modules(nodes: list[ast.AST]) -> tuple[str, ...]:
    """Modules whose random numbers tests seed: `random`, `numpy.random` or both."""
    if not any(getattr(node, "attr", getattr(node, "name", None)) == "seed" for node in nodes):
        return ()
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return ("random", "numpy.random") if any(name.startswith("numpy") for name in imported) else ("random",)


# What the tests do


def uses_files(nodes: Iterable[ast.AST]) -> bool:
    """
    Whether tests work with files.

    Args:
        nodes (`Iterable[ast.AST]`): All nodes of the tests and their set-up.

    Returns:
        `bool`: Whether they call `open`, import a module such as `sqlite3` or `tempfile`, use a function of `os` that works
        with files, or name a file such as `"cookies.json"`.
    """
    return any(map(_uses_files, nodes))


def _uses_files(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _FILE_NAME.fullmatch(node.value) is not None
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "open"
    if isinstance(node, ast.Attribute):
        if not isinstance(node.value, ast.Name):
            return False
        return node.value.id in _FILE_MODULES or (node.value.id == "os" and node.attr in _FILE_FUNCTIONS)
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _FILE_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        return module in _FILE_MODULES or (
            node.module == "os" and any(alias.name in _FILE_FUNCTIONS for alias in node.names)
        )
    return False


def refusal(nodes: Iterable[ast.AST]) -> str | None:
    """
    Reason why a judge cannot run tests.

    Args:
        nodes (`Iterable[ast.AST]`): All nodes of the tests and their set-up.

    Returns:
        `str` or `None`: The reason with what to do, or `None` if the tests can be run.
    """
    for node in nodes:
        name = _runs_text(node)
        if name is not None:
            return (
                f"the tests use {name}, which could run the program's text among them. "
                "Compare values, or use ast.literal_eval or json"
            )
    return None


def _runs_text(node: ast.AST) -> str | None:
    """The name by which a node could run what a program returned or wrote."""
    if isinstance(node, ast.Name) and node.id in _RUN:
        return node.id
    if isinstance(node, ast.Attribute) and node.attr in (_RUN - {"compile"}) | _READ:
        return node.attr
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        found = [node.module or "", *(alias.name for alias in node.names)]
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return "allow_pickle"
    else:
        return None
    return next((name for name in found if name.partition(".")[0] in _LOAD or name in _RUN), None)


# Their asserts


@dataclass(frozen=True)
class Direct:
    """`assert name(*args, **kwargs) operator expected` with literals only, or `assert [not] name(*args, **kwargs)`."""

    name: str
    args: tuple
    kwargs: dict[str, Any]
    operator: str  # "==", "!=", "is", "is not", "true", "false"
    expected: Any


def direct(node: ast.stmt) -> Direct | None:
    """
    Reads a statement as the comparison of a call with literal arguments with a literal.

    Args:
        node (`ast.stmt`): A statement of a test.

    Returns:
        `Direct` or `None`: what to call and what to expect, or `None` if the statement has to be run.
    """
    if not isinstance(node, ast.Assert) or (node.msg is not None and not _says_nothing(node.msg)):
        return None
    test, symbol, expected = node.test, "true", None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, symbol = test.operand, "false"
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPERATORS:
        symbol, other = _OPERATORS[type(test.ops[0])], test.comparators[0]
        test = test.left
        if not isinstance(test, ast.Call) or _is_literal(test):
            test, other = other, test
        try:
            expected = ast.literal_eval(other)
        except _NO_LITERAL:
            return None
        if symbol in ("is", "is not") and expected not in (None, True, False):
            return None
    if not isinstance(test, ast.Call) or not isinstance(test.func, ast.Name):
        return None
    names = [keyword.arg for keyword in test.keywords]
    if None in names or len(set(names)) < len(names):
        return None
    try:
        args = tuple(ast.literal_eval(value) for value in test.args)
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in test.keywords}
    except _NO_LITERAL:
        return None
    return Direct(test.func.id, args, kwargs, symbol, expected)


def _says_nothing(message: ast.expr) -> bool:
    """Whether an assert's message cannot bind names or suspend. It is evaluated only if the assert fails."""
    return not any(
        isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for node in ast.walk(message)
    )


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except _NO_LITERAL:
        return False
    return True


def check_function(tree: ast.Module) -> ast.FunctionDef | None:
    """The last function named `check` at the top level of a module."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    return found[-1] if found else None


def units(check: ast.FunctionDef) -> list[ast.Assert]:
    """
    The asserts of a check function that count as a test of their own.

    These are the asserts outside `try`, `with`, inner functions and classes, where the test itself decides what follows a
    failed assert. Asserts of a true constant do not count.

    Args:
        check (`ast.FunctionDef`): The function.

    Returns:
        `list[ast.Assert]`: the asserts in the order of the text; empty if the whole function is one test.
    """
    found: list[ast.Assert] = []

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Assert):
                if not (isinstance(node.test, ast.Constant) and node.test.value):
                    found.append(node)
            elif isinstance(node, (ast.If, ast.For, ast.While)):
                walk(node.body)
                walk(node.orelse)

    walk(check.body)
    return found


def is_plain_check(tree: ast.Module, check: ast.FunctionDef) -> bool:
    """Whether a check module has no code that must be run, apart from the asserts of the check function."""
    arguments = check.args
    if len(arguments.args) != 1 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or check.decorator_list:
        return False
    for node in tree.body:
        simple = isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Assign)
            and _is_literal(node.value)
            and all(isinstance(target, ast.Name) for target in node.targets)
        )
        if not simple and node is not check and not _is_noise(node):
            return False
    return all(isinstance(node, ast.Assert) or _is_noise(node) for node in check.body)


def _is_noise(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def explain(node: ast.Assert) -> list[ast.stmt]:
    """Statements that do the same as an assert, and keep both sides of its comparison for the message."""
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or node.msg is not None:
        return [node]
    new: list[ast.stmt] = [
        ast.Assign([ast.Name(LEFT, ast.Store())], test.left),
        ast.Assign([ast.Name(RIGHT, ast.Store())], test.comparators[0]),
        ast.Assert(
            ast.Compare(ast.Name(LEFT, ast.Load()), test.ops, [ast.Name(RIGHT, ast.Load())]),
            ast.Call(
                ast.Name("__mismatch__", ast.Load()),
                [ast.Name(LEFT, ast.Load()), ast.Constant(_SYMBOLS[type(test.ops[0])]), ast.Name(RIGHT, ast.Load())],
                [],
            ),
        ),
    ]
    return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in new]


_SYMBOLS: dict[type, str] = {
    **_OPERATORS,
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}


def explained(tree: ast.Module) -> ast.Module:
    """The module, with its top-level asserts replaced by `explain`."""
    body: list[ast.stmt] = []
    for node in tree.body:
        body += explain(node) if isinstance(node, ast.Assert) else [node]
    tree.body = body
    return tree


def instrumented(tree: ast.Module, check: ast.FunctionDef) -> ast.Module:
    """
    Rewrites a check function so that each of its `units` runs under `with __record__(index):`.

    Args:
        tree (`ast.Module`): The module that holds the function; changed in place.
        check (`ast.FunctionDef`): The function; changed in place. If it has no units, the whole function is one test.

    Returns:
        `ast.Module`: The module.
    """
    numbers = {id(node): k for k, node in enumerate(units(check))}

    def rewrite(body: list[ast.stmt]) -> list[ast.stmt]:
        new: list[ast.stmt] = []
        for node in body:
            if id(node) in numbers:
                assert isinstance(node, ast.Assert)
                call = ast.Call(ast.Name(RECORD, ast.Load()), [ast.Constant(numbers[id(node)])], [])
                new.append(ast.copy_location(ast.With([ast.withitem(call)], explain(node)), node))
            else:
                if isinstance(node, (ast.If, ast.For, ast.While)):
                    node.body, node.orelse = rewrite(node.body), rewrite(node.orelse)
                new.append(node)
        return new

    check.body = rewrite(check.body)
    ast.fix_missing_locations(tree)
    return tree
