"""
Source code as a syntax tree: parsing, finding definitions, and putting modules together.

Nothing here runs code.
"""

import ast
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def parse(code: str) -> ast.Module | None:
    """
    The syntax tree of a text, if it is Python.

    Args:
        code (`str`): Source text.

    Returns:
        `ast.Module` or `None`: `None` if the text does not compile, `return` outside a function included.
    """
    return parse_or_error(code)[0]


@lru_cache(maxsize=512)  # each predicate parses the same text
def parse_or_error(code: str) -> tuple[ast.Module | None, Exception | None]:
    """[`parse`], and the error if the text does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, for example: the model wrote them, not the user
            tree = ast.parse(code)
            with _without_finally(tree):
                compile(tree, "<completion>", "exec", dont_inherit=True)
        return tree, None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, surrogates, deep nesting
        return None, error.with_traceback(None)


@contextmanager
def _without_finally(tree: ast.Module) -> Iterator[None]:
    """Move `finally` blocks into `try`: Python compiles them at least twice, so 20 nested ones a million times."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.TryStar) and node.finalbody]
    before = [(node.body, node.finalbody) for node in blocks]
    for node in blocks:
        node.body, node.finalbody = [*node.body, *node.finalbody], []
        if not node.handlers:
            node.finalbody = [ast.copy_location(ast.Pass(), node)]
    try:
        yield
    finally:
        for node, (body, finalbody) in zip(blocks, before, strict=True):
            node.body, node.finalbody = body, finalbody


def place(error: Exception, lines_before: int = 0) -> str:
    """Message of an error of [`parse_or_error`], with its line and column in a text that has `lines_before` more lines."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno + lines_before}, column {error.offset or 1}: {error.msg}"
    return str(error)


def top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that can bind names of the module: those of its body, and those inside `if`, `try`, `for` and so on."""
    pending = [*ast.iter_child_nodes(node)][::-1]  # `elif` nests, too deep for recursion
    while pending:
        child = pending.pop()
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            pending += [*ast.iter_child_nodes(child)][::-1]


def shape(tree: ast.AST) -> tuple:
    """A value that is equal for code that differs in layout and comments only. (`ast.dump` recurses too deeply.)"""

    def mark(value: object) -> tuple:
        if isinstance(value, list):
            return tuple(map(mark, value))
        return (ast.AST,) if isinstance(value, ast.AST) else (type(value), value)

    return tuple((type(node), *(mark(value) for _, value in ast.iter_fields(node))) for node in ast.walk(tree))


def find(tree: ast.Module | None, name: str) -> Function | ast.ClassDef | ast.expr | None:
    """The node that defines a name at the top level: the last one, as in Python. Of `Solution().name`, it is the class."""
    name = name.partition("(")[0]
    found: Function | ast.ClassDef | ast.expr | None = None
    for node in top_level(tree) if tree is not None else ():
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                found = node
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    found = value
            case ast.AnnAssign(target=ast.Name(id=target_name), value=ast.expr() as value) if target_name == name:
                found = value
    return found


def bound_names(node: ast.stmt) -> Iterator[str]:
    """Names that an import, a definition or an assignment binds."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name.split(".")[0]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            for target in targets:
                yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def statements(function: Function) -> list[ast.stmt]:
    """Body of a function, without its docstring. The body of a lambda is a `return`."""
    if isinstance(function, ast.Lambda):
        return [ast.Return(value=function.body)]
    match function.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return function.body


def is_stub(function: ast.AST) -> bool:
    """Whether the body of a function does nothing: it has only a docstring, `pass`, `...` or definitions."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    idle = (ast.Pass, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return all(
        isinstance(node, idle) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def is_empty(function: ast.AST) -> bool:
    """Whether a function is a stub, or only raises `NotImplementedError`."""
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        match statements(function):
            case [
                ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError")))
            ]:
                return True
    return is_stub(function)


def combine(*sources: str) -> str:
    """
    Join several sources to one module, in order. `from __future__` imports come first, as Python demands.

    Args:
        *sources (`str`): Source code; empty sources are left out.

    Returns:
        `str`: The module. If a name is defined twice, the later definition holds.
    """
    future: list[str] = []
    rest = []
    for source in sources:
        tree = parse(source)
        if tree is not None:
            found = {
                node: None for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
            }
            future += [line for line in map(ast.unparse, found) if line not in future]
            source = without(source, tree, found)
        rest.append(source.strip("\n"))
    return "\n\n\n".join(part for part in ["\n".join(future), *rest] if part)


def without(code: str, tree: ast.Module, nodes: Collection[ast.stmt]) -> str:
    """Remove statements of the top level from the code, unless they share a line with other statements."""
    if not nodes:
        return code
    kept = {line for node in tree.body if node not in nodes for line in _lines_of(node)}
    dropped = {line for node in nodes for line in _lines_of(node)} - kept
    return "\n".join(line for number, line in enumerate(code.split("\n"), start=1) if number not in dropped)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
