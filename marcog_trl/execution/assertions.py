"""Finds, on the syntax tree of tests, what can fail: a test that cannot fail would pass every program."""

import ast
from collections.abc import Iterable, Iterator


Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Match, ast.Try, ast.TryStar)
_ASSERTING = ("assert", "fail", "raises", "warns")  # in the names of functions of libraries
_CATCHING = frozenset("AssertionError Exception BaseException".split())
_EXITS = frozenset("exit quit _exit".split())


class Assertions:
    """
    What can fail in modules that share one namespace.

    Args:
        trees (`Iterable[ast.Module]`): The modules.
    """

    def __init__(self, trees: Iterable[ast.Module]):
        self._functions: dict[str, list[Function | ast.Lambda]] = {}  # methods, too
        self._known: dict[int, bool] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, _FUNCTION):
                    self._functions.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            self._functions.setdefault(target.id, []).append(node.value)

    def in_function(self, function: Function | ast.Lambda) -> bool:
        """Whether a call of a function can fail."""
        if id(function) not in self._known:
            self._known[id(function)] = False  # while its own calls are looked at
            body = function.body
            found = self.in_expression(body) if isinstance(body, ast.expr) else self.in_body(body)
            self._known[id(function)] = found
        return self._known[id(function)]

    def in_body(self, body: Iterable[ast.stmt]) -> bool:
        """Whether one of some statements can fail."""
        return any(map(self.in_statement, body))

    def in_statement(self, node: ast.stmt) -> bool:
        """Whether a statement can fail because of an assertion. A definition alone cannot."""
        if isinstance(node, ast.Assert):
            return not always_true(node.test)
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, (*_FUNCTION, ast.ClassDef)):
            return False
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self._in_try(node)
        if isinstance(node, (ast.With, ast.AsyncWith)) and any(_suppresses(item.context_expr) for item in node.items):
            return False
        blocks = [block for _, block in ast.iter_fields(node) if isinstance(block, list)]
        parts = [part for block in blocks for part in block] + [
            part for _, part in ast.iter_fields(node) if isinstance(part, ast.AST)
        ]
        return any(map(self._in_part, parts))

    def in_expression(self, node: ast.AST) -> bool:
        """Whether an expression calls, or passes on, a function that can fail."""
        return any(map(self._is_asserting, ast.walk(node)))

    def _in_part(self, node: ast.AST) -> bool:
        if isinstance(node, ast.stmt):
            return self.in_statement(node)
        if isinstance(node, ast.match_case):
            return self.in_body(node.body)
        return self.in_expression(node)

    def _in_try(self, node: ast.Try | ast.TryStar) -> bool:
        handlers = [self.in_body(handler.body) for handler in node.handlers]
        caught = [found for handler, found in zip(node.handlers, handlers, strict=True) if _catches(handler.type)]
        swallowed = bool(caught) and not caught[0]
        in_body = self.in_body(node.body) and not swallowed
        return in_body or any(handlers) or self.in_body([*node.orelse, *node.finalbody])

    def _is_asserting(self, node: ast.AST) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name in self._functions:
            return any(map(self.in_function, self._functions[name]))
        if not isinstance(node, ast.Call):
            return False
        name = _name(node.func)
        if name == "assertTrue" and node.args and always_true(node.args[0]):
            return False
        if name in _EXITS:
            return bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value not in (None, 0)
        return any(word in name.lower() for word in _ASSERTING)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _catches(kind: ast.expr | None) -> bool:
    """Whether an `except` of this kind catches a failed assertion."""
    if kind is None:
        return True
    return any(_name(each) in _CATCHING for each in (kind.elts if isinstance(kind, ast.Tuple) else [kind]))


def _suppresses(node: ast.expr) -> bool:
    """Whether this is `contextlib.suppress` of a failed assertion."""
    return isinstance(node, ast.Call) and _name(node.func) == "suppress" and any(map(_catches, node.args))


def keeps_failures(node: ast.AST) -> bool:
    """Whether a statement that catches assertions notes them in a variable, which a later statement may look at."""
    handlers = node.handlers if isinstance(node, (ast.Try, ast.TryStar)) else []
    parts = [part for handler in handlers for part in ast.walk(handler)]
    return any(isinstance(part, (ast.Assign, ast.AugAssign)) or _name(part) in ("append", "add") for part in parts)


def is_awaited(kind: ast.ClassDef, method: Function) -> bool:
    """Whether the test method of a class is run if it is a coroutine: a plain `TestCase` does not await it."""
    return not isinstance(method, ast.AsyncFunctionDef) or "TestCase" not in map(_name, kind.bases)


def always_true(node: ast.expr) -> bool:
    """Whether an expression is true whatever the program does."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(not isinstance(element, ast.Starred) for element in node.elts)
    if isinstance(node, ast.Dict):
        return any(key is not None for key in node.keys)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.Constant) and part.value for part in node.values)
    if isinstance(node, ast.BoolOp):
        return (any if isinstance(node.op, ast.Or) else all)(map(always_true, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return isinstance(node.operand, ast.Constant) and not node.operand.value
    return isinstance(node, (ast.Lambda, ast.GeneratorExp))


def slip(node: ast.stmt) -> str | None:
    """What is wrong with a statement that was meant as a test and is none; `None` for other statements."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and always_true(node.test):
        return "asserts a tuple, which is always true: leave out the parentheses"
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        return "is not asserted: write 'assert' before it"
    return None


def mistake(node: ast.stmt) -> str | None:
    """As [`slip`], and for every assert of what is always true, other than a constant."""
    if (
        isinstance(node, ast.Assert)
        and not isinstance(node.test, (ast.Constant, ast.Tuple))
        and always_true(node.test)
    ):
        return "asserts what is always true: compare what the program returns"
    return slip(node)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run with a body, those inside of blocks included, without those that may be there to raise."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While)):
            yield from statements([*node.body, *node.orelse])


# Tests of a module


def is_main_block(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    if len(node.test.ops) != 1 or not isinstance(node.test.ops[0], ast.Eq):
        return False
    sides = (node.test.left, node.test.comparators[0])
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return named and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def runs_tests(node: ast.stmt) -> bool:
    """Whether a statement runs the tests of its module: `unittest.main()`, `sys.exit(pytest.main([...]))`."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return isinstance(node, ast.Expr) and any(
        _name(call.func) == "main"
        and (isinstance(call.func, ast.Name) or _name(call.func.value) in ("unittest", "pytest"))  # type: ignore[attr-defined]
        for call in calls
    )


def test_methods(node: ast.stmt) -> list[Function]:
    """The methods of a class whose names begin with `test`."""
    body = node.body if isinstance(node, ast.ClassDef) else ()
    return [item for item in body if isinstance(item, _FUNCTION) and item.name.startswith("test")]


def is_case(node: ast.stmt) -> bool:
    """Whether a statement defines a class that may be a `TestCase`: one with a base."""
    return isinstance(node, ast.ClassDef) and bool(node.bases)


def required_arguments(function: Function) -> list[str]:
    """Names of the arguments that a call of a function must give."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    return [argument.arg for argument in required]
