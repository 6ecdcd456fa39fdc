"""Analyzes assert statements on the syntax tree: which need no test code to be run, and which count as tests of their own.

Never runs anything.
"""

import ast
import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


_OPERATORS: dict[type, str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not"}
_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
LEFT, RIGHT, RECORD = "__left__", "__right__", "__record__"  # names that instrumented tests use


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
    found = _direct(node.test)
    if found is None and any(isinstance(part, ast.BinOp) for part in ast.walk(node.test)):
        found = _direct(_Folder().visit(copy.deepcopy(node.test)))
    return found


def _direct(test: ast.expr) -> Direct | None:
    symbol, expected = "true", None
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


class _Folder(ast.NodeTransformer):
    """Evaluates arithmetic between small numbers, such as `3 * 19` and `2 ** 10` in the arguments of tests."""

    _OPERATIONS: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = _number(node.left), _number(node.right)
        operation = self._OPERATIONS.get(type(node.op))
        if left is None or right is None or operation is None:
            return node
        small = abs(left) <= 1 << 64 and abs(right) <= (64 if isinstance(node.op, ast.Pow) else 1 << 64)
        try:
            value = operation(left, right) if small else None
        except (ArithmeticError, ValueError):
            return node  # the test itself raises
        return ast.copy_location(ast.Constant(value), node) if type(value) in (int, float) else node


def _number(node: ast.expr) -> int | float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    found = node.value if isinstance(node, ast.Constant) else None
    return found if type(found) is int or type(found) is float else None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except _NO_LITERAL:
        return False
    return True


def holds(found: Any, operator: str, expected: Any) -> bool:
    """Whether a decoded value is what a `Direct` expects; both are of exact builtin types."""
    if operator == "true":
        return bool(found)
    if operator == "false":
        return not found
    if operator == "is":
        return found is expected
    if operator == "is not":
        return found is not expected
    return bool(found == expected) if operator == "==" else bool(found != expected)


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
