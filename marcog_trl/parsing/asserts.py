"""
Reads the one assert that a tester writes.

An assert that a model wrote runs in the process that judges programs, and may decide what the model earns. So it has to be a
test of what a function returns, and nothing else: it can neither look at the source of the function, nor at the clock, random
numbers, files or addresses in memory.
"""

import ast
import builtins

from marcog_trl.execution.analysis import free_names
from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.syntax import parse


_NODES = (
    ast.Assert, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator,
    ast.IfExp, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Name, ast.Attribute,
    ast.expr_context, ast.Call, ast.keyword, ast.Starred, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
_READERS = frozenset("all any list max min set sorted sum tuple".split())
"""Builtins that read their argument to its end."""
_LAZY = frozenset("enumerate map reversed zip".split())
"""Builtins whose results are iterators. They must be read where they are made: printed, they show an address."""
_BUILTINS = _READERS | _LAZY | frozenset("abs bool dict float int isinstance len range round str".split())
_METHODS = frozenset("count endswith index items join keys lower split startswith strip title upper values".split())


def assert_in(reply: str, function: str) -> str | None:
    """
    Extract the assert of a reply: the first one at the top level of its code, if it tests a function.

    Args:
        reply (`str`): The reply.
        function (`str`): Name of the function to test.

    Returns:
        `str` or `None`: Source of the assert. `None` if there is no code, no assert, or one that does not call the function
        or does anything else than calculate with values, comprehensions, and some builtins and methods (`abs`, `len`,
        `sorted`, `split`, …): it has no other attributes, lambdas, other functions or imports.
    """
    code = extract_code(reply)
    tree = parse(code)
    found = next((node for node in tree.body if isinstance(node, ast.Assert)), None) if tree is not None else None
    test = None if found is None else ast.get_source_segment(code, found)
    return test if found is not None and test and _only_tests(found, test, function) else None


def _only_tests(tree: ast.Assert, source: str, function: str) -> bool:
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if not bound.isdisjoint({function, *dir(builtins)}) or free_names([source]) != (function,):
        return False
    known = {id(call.func) for call in calls if _name(call) in (function, *_BUILTINS) or _method(call) in _METHODS}
    read = {id(node.iter) for node in nodes if isinstance(node, ast.comprehension)}
    read |= {
        id(call.args[0])
        for call in calls
        if len(call.args) == 1 and (_name(call) in _READERS or _method(call) == "join")
    }
    return all(
        isinstance(node, _NODES)
        and (not isinstance(node, ast.Name) or node.id in bound | _BUILTINS or id(node) in known)
        and (not isinstance(node, ast.Attribute) or id(node) in known)
        and (not isinstance(node, ast.Call) or id(node.func) in known)
        and (not _is_lazy(node) or id(node) in read)
        for node in nodes
    )


def _name(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _method(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _is_lazy(node: ast.AST) -> bool:
    return isinstance(node, ast.GeneratorExp) or (isinstance(node, ast.Call) and _name(node) in _LAZY)
