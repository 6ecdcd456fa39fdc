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
    ast.IfExp, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Name,
    ast.expr_context, ast.Call, ast.keyword, ast.Starred, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
_READERS = frozenset("all any list max min set sorted sum tuple".split())
"""Builtins that read a generator to its end. A generator that reaches other places could be printed, with its address."""
_BUILTINS = _READERS | frozenset("abs bool dict float int isinstance len range round str".split())


def assert_in(reply: str, function: str) -> str | None:
    """
    Extract the assert of a reply: the first one at the top level of its code, if it tests a function.

    Args:
        reply (`str`): The reply.
        function (`str`): Name of the function to test.

    Returns:
        `str` or `None`: Source of the assert. `None` if there is no code, no assert, or one that does not call the function
        or does anything else than calculate with values, comprehensions and some builtins (`abs`, `len`, `sorted`, …): it
        has no attributes, lambdas, other functions or imports.
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
    known = {
        id(call.func) for call in calls if isinstance(call.func, ast.Name) and call.func.id in (function, *_BUILTINS)
    }
    read = {id(call.args[0]) for call in calls if _reads_all(call)}
    return all(
        isinstance(node, _NODES)
        and (not isinstance(node, ast.Name) or node.id in bound | _BUILTINS or id(node) in known)
        and (not isinstance(node, ast.Call) or id(node.func) in known)
        and (not isinstance(node, ast.GeneratorExp) or id(node) in read)
        for node in nodes
    )


def _reads_all(call: ast.Call) -> bool:
    """Whether a call of a builtin reads its only positional argument to its end."""
    return isinstance(call.func, ast.Name) and call.func.id in _READERS and len(call.args) == 1
