"""Reads tests on their syntax tree: which format they have, what they need from the program, which of them need no test code to
be run, and which count as tests of their own. Never executes anything.
"""

import ast
import builtins
import copy
import importlib.metadata
import re
import symtable
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from . import assertions


TestFormat = Literal["asserts", "check", "stdio", "unittest"]
_COMMON_MODULES = {
    name: name
    for name in (
        "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator os random re "
        "statistics string sys time typing unittest numpy pytest"
    ).split()
} | {"np": "numpy"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*_FUNCTION, ast.ClassDef)
ENTRY_POINT = re.compile(r"[^\W\d]\w*(\(\)\.[^\W\d]\w*)?")  # `f`, or `Solution().f`
PROGRAMS = frozenset(  # modules from which tests import what the program defines
    "solution solutions main __main__ your_module your_solution your_code your_file your_script your_program your_package "
    "my_module my_solution my_code my_program my_script module program submission submissions answer answers candidate student "
    "student_code student_solution user_code user_solution user_module implementation impl sol source_code source target "
    "target_module module_under_test code_under_test code_to_test sut generated generated_code generated_solution solution_code "
    "solution_module task exercise problem function functions prog script completion response".split()
)
_FIXTURES = frozenset(
    "setup_module teardown_module setup_function teardown_function setup_class teardown_class".split()
)
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


def guess_format(source: str) -> TestFormat:
    """
    Finds the format of tests.

    Args:
        source (`str`): Python source.

    Returns:
        `str`: `"unittest"` if the module has classes or functions of tests that no statement calls; `"check"` if it defines
        `check` for one candidate; else `"asserts"`.
    """
    body = ast.parse(source).body
    run = _names(node for node in body if not isinstance(node, DEFINITIONS) and not assertions.is_main_block(node))
    if any(assertions.test_methods(node) and (assertions.is_case(node) or node.name not in run) for node in body):  # type: ignore[attr-defined]
        return "unittest"
    functions = test_functions(body)
    if functions and run.isdisjoint(function.name for function in functions):
        return "unittest"
    check = check_function(ast.Module(body, []))
    if check is None or (
        not _checks(body) and "check" in run | _names(node for node in body if assertions.is_main_block(node))
    ):
        return "asserts"
    return "check"


def collected(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements of a module of tests that run when its tests are collected, without imports that only others need."""
    found = [node for node in body if not assertions.is_main_block(node) and not assertions.runs_tests(node)]
    used = _names(found)
    return [node for node in found if not isinstance(node, ast.Import) or not used.isdisjoint(bound_names(node))]


def test_functions(body: Sequence[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that pytest would run: their names begin with `test`. Helpers with arguments, which others call, are not among
    them."""
    found = [node for node in body if isinstance(node, _FUNCTION) and node.name.startswith("test")]
    return [node for node in found if not assertions.required_arguments(node) or node.name not in _names(body)]


def checked_name(tree: ast.Module) -> str | None:
    """The candidate that a module passes to its function `check`: `f` if it ends with `check(f)`."""
    found = {ast.unparse(call.args[0]) for call in _checks(tree.body)}
    return found.pop() if len(found) == 1 else None


def _checks(body: Iterable[ast.stmt]) -> list[ast.Call]:
    """The calls `check(name)` and `check(Class().name)` that are statements of a module or of its main block."""
    calls = []
    for node in body:
        if assertions.is_main_block(node):
            calls += _checks(node.body)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            named = isinstance(call.func, ast.Name) and call.func.id == "check" and len(call.args) == 1
            if named and not call.keywords and ENTRY_POINT.fullmatch(ast.unparse(call.args[0])):
                calls.append(call)
    return calls


def calls_check(node: ast.stmt) -> bool:
    """Whether a statement does nothing but to call `check` with a candidate."""
    return bool(_checks([node])) and (not assertions.is_main_block(node) or len(_checks([node])) == len(node.body))  # type: ignore[attr-defined]


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {leaf.id for node in nodes for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}


def of_program(tree: ast.Module, entry_point: str | None) -> ast.Module:
    """
    Takes what tests import from the program by name.

    Args:
        tree (`ast.Module`): The tests or their set-up.
        entry_point (`str` or `None`): Name that the program must define.

    Returns:
        `ast.Module`: The same tree if it imports nothing from the program; otherwise one in which the imported names are free.

    Raises:
        ValueError: If the tests use the program's module for anything else than its names.
    """
    if not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree)):
        return tree
    imports = _ImportsOfProgram(entry_point)
    new = imports.visit(copy.deepcopy(tree))
    if not imports.found:
        return tree
    left = imports.modules & _names([new])
    if left:
        raise ValueError(
            f"the tests use the module {sorted(left)[0]} itself, and the program has no module: import names from it"
        )
    return ast.parse(ast.unparse(ast.fix_missing_locations(new)))


class _ImportsOfProgram(ast.NodeTransformer):
    def __init__(self, entry_point: str | None):
        self.entry_point = (entry_point or "").partition("(")[0]
        self.modules: set[str] = set()
        self.found = False

    def means_program(self, module: str, names: Iterable[str] = ()) -> bool:
        first, last = module.partition(".")[0], module.rpartition(".")[2]
        if first in sys.stdlib_module_names - {"__main__"}:
            return False
        return last in PROGRAMS or (bool(self.entry_point) and self.entry_point in names and not is_installed(first))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        names = [alias.name for alias in node.names]
        if not node.level and not self.means_program(node.module or "", names):
            return node
        self.found = True
        new: list[ast.stmt] = [
            ast.Assign([ast.Name(alias.asname, ast.Store())], ast.Name(alias.name, ast.Load()))
            for alias in node.names
            if alias.asname not in (None, alias.name)
        ]
        return [ast.copy_location(statement, node) for statement in new] or ast.copy_location(ast.Pass(), node)

    def visit_Import(self, node: ast.Import) -> Any:
        taken = [alias for alias in node.names if self.means_program(alias.name)]
        if not taken:
            return node
        self.found = True
        self.modules |= {alias.asname or alias.name for alias in taken}
        node.names = [alias for alias in node.names if alias not in taken]
        return node if node.names else ast.copy_location(ast.Pass(), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in self.modules:
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        return self.generic_visit(node)


@lru_cache(maxsize=1)
def _installed() -> frozenset[str]:
    return frozenset(importlib.metadata.packages_distributions())


def is_installed(module: str) -> bool:
    """Whether an installed package has a top-level module of this name."""
    return module in _installed()


def bound_names(node: ast.stmt) -> set[str]:
    """Names that an import or a definition binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.name} if isinstance(node, DEFINITIONS) else set()


def imported_modules(trees: Iterable[ast.Module]) -> tuple[str, ...]:
    """Top-level modules that tests import, apart from those whose absence they handle with `try`."""
    found: dict[str, None] = {}
    pending: list[ast.AST] = list(trees)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Try) and any(map(_handles_absence, node.handlers)):
            pending += [*node.orelse, *node.finalbody]
            continue
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module.partition(".")[0]] = None
        pending += ast.iter_child_nodes(node)
    return tuple(found)


def _handles_absence(handler: ast.ExceptHandler) -> bool:
    names = _names([handler.type]) if handler.type is not None else set()
    return handler.type is None or not names.isdisjoint({"ImportError", "ModuleNotFoundError", "Exception"})


# What cannot fail


def fault_of_asserts(trees: Sequence[ast.Module], known: assertions.Assertions) -> str | None:
    """
    Finds what would be no test.

    Args:
        trees (`Sequence[ast.Module]`): The tests.
        known (`Assertions`): What can fail in them and in their set-up.

    Returns:
        `str` or `None`: What is wrong with the first assert that can never fail, or that is never run, and what to do.
    """
    body = [node for tree in trees for node in tree.body]
    flat = [part for node in body for part in (node.body if assertions.is_main_block(node) else [node])]  # type: ignore[attr-defined]
    for node in assertions.statements(flat):
        wrong = assertions.mistake(node)
        if wrong is not None:
            return f"{_shown(node)} {wrong}"
        if isinstance(node, (ast.Try, ast.With)) and not known.in_statement(node) and _has_assert(node):
            if assertions.keeps_failures(node):
                continue
            return f"{_shown(node)} swallows its own AssertionError: let it pass, or raise it again"
    for node in flat:
        if isinstance(node, DEFINITIONS) and node.name not in _names(body) and _has_assert(node):
            return f"{_shown(node)} is never called: call it, or name it test_{node.name} and leave out test_format"
    return None


def fault_of_functions(tree: ast.Module, known: assertions.Assertions) -> str | None:
    """What is wrong with the test functions and the classes of tests of a module, in the way of [`fault_of_asserts`]."""
    methods = [method for node in tree.body for method in assertions.test_methods(node)]
    for function in test_functions(tree.body):
        arguments = assertions.required_arguments(function)
        if arguments:
            return f"{function.name} takes {', '.join(arguments)}: fixtures and parameters of pytest are not run. Write the values into the test"
        wrong = _fault_of_function(function, known)
        if wrong is not None:
            return wrong
    for kind in tree.body:
        for method in assertions.test_methods(kind):
            if not assertions.is_awaited(kind, method):  # type: ignore[arg-type]
                return (
                    f"{method.name} is a coroutine, which TestCase does not await: derive from IsolatedAsyncioTestCase"
                )
            if _yields(method):
                return f"{method.name} yields, so that it would not be run: make a function of each test"
    for method in methods:
        wrong = _fault_of_function(method, known)
        if wrong is not None and not any(map(known.in_function, methods)) and not _may_crash(method):
            return wrong
        if len(assertions.required_arguments(method)) > 1 and not method.decorator_list:
            return f"{method.name} takes arguments: fixtures and parameters of pytest are not run. Write the values into the test"
    for node in tree.body:
        for name in {getattr(node, "name", ""), *(getattr(item, "name", "") for item in getattr(node, "body", ()))}:
            if name in _FIXTURES and not assertions.is_case(node):
                return f"{name} is a fixture of pytest, which is not run. Write it into the tests, or use a TestCase with setUp"
    return None


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a generator. Functions inside of it may be some."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return False


def _may_crash(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method is only there to call something, without a look at what it returns."""
    calls = [node.value for node in method.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return len(calls) == len(method.body) and not any("assert" in ast.unparse(call.func) for call in calls)


def _fault_of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, known: assertions.Assertions) -> str | None:
    for node in assertions.statements(function.body):
        wrong = assertions.mistake(node) if isinstance(node, ast.Assert) else None
        if wrong is not None:
            return f"in {function.name}, {_shown(node)} {wrong}"
    if _yields(function):
        return f"{function.name} yields, so that it would not be run: make a function of each test"
    if known.in_function(function):
        return None
    for node in assertions.statements(function.body):
        wrong = assertions.slip(node)
        if wrong is not None:
            return f"in {function.name}, {_shown(node)} {wrong}"
    returned = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function))
    if returned:
        return f"{function.name} returns a value, which nobody reads, and asserts nothing: write 'assert' instead of 'return'"
    if _has_assert(function) and not any(map(assertions.keeps_failures, ast.walk(function))):
        return f"{function.name} swallows its own AssertionError: let it pass, or raise it again"
    return f"{function.name} asserts nothing, so that every program passes: write an assert"


def fault_of_check(tree: ast.Module, known: assertions.Assertions) -> str | None:
    """What is wrong with the function `check` of a module, in the way of [`fault_of_asserts`]."""
    check = check_function(tree)
    if check is None:
        return f"tests={ast.unparse(tree)!r:.80} must define a function check(candidate), because test_format='check'"
    required = assertions.required_arguments(check)
    if len(required) > 1 or not (check.args.posonlyargs or check.args.args or check.args.vararg):
        return f"check takes ({', '.join(required)}), but must take one argument, the candidate"
    return _fault_of_function(check, known)


def _has_assert(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Assert) and not assertions.always_true(part.test) for part in ast.walk(node))


def _shown(node: ast.stmt) -> str:
    """The first line of a statement, as an error shows it."""
    return repr(ast.unparse(node).partition("\n")[0])[:80]


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
