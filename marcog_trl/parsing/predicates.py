"""
Predicates of code for reward functions: whether it defines a function, calls a helper, only wraps it, or ignores its result.

They read the syntax tree. Nothing here runs code.
"""

import ast
from collections.abc import Iterator

from marcog_trl.parsing.syntax import Function, bound_names, find, parse, statements


def defines(code: str, name: str) -> bool:
    """
    Whether code defines a name at its top level, with `def`, `class` or an assignment.

    Args:
        code (`str`): Source text.
        name (`str`): Name.

    Returns:
        `bool`: `False` also if the code does not parse.
    """
    return find(parse(code), name) is not None


def returns_value(code: str, name: str) -> bool:
    """
    Whether code defines a function that yields, or can return something other than `None`.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.

    Returns:
        `bool`: `False` if there is no such function. A `return` of a nested function does not count.
    """
    function = find(parse(code), name)
    if isinstance(function, ast.Lambda):
        return True
    if not isinstance(function, Function):
        return False
    for node in _scope(function):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                return True
    return False


def reads_arguments(code: str, name: str) -> bool:
    """
    Whether a function reads an argument, so that what it returns may depend on them.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.

    Returns:
        `bool`: `True` also for a function without parameters, and if there is no such function.
    """
    function = find(parse(code), name)
    if not isinstance(function, Function | ast.Lambda):
        return True
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return not parameters or bool(read & (parameters | {"locals", "vars"}))


def _scope(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of nested functions and classes."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def _reached(tree: ast.Module | None, name: str, stop: str) -> list[Function]:
    """The function `name`, and the functions of the module that it uses, directly or indirectly, except `stop`."""
    reached: list[Function] = []
    seen = {stop}
    pending = [name]
    while pending:
        current = pending.pop()
        function = find(tree, current)
        if current in seen or not isinstance(function, Function):
            continue
        seen.add(current)
        reached.append(function)
        pending += [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
    return reached


def _uses(function: Function, helper: str) -> list[ast.Call]:
    """The calls of `helper`, or with `helper` as an argument; none if `helper` is a local name of the function."""
    nodes = list(ast.walk(function))
    for node in nodes:
        is_local = (
            (isinstance(node, ast.Name) and node.id == helper and not isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.arg) and node.arg == helper)
            or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == helper)
            or (isinstance(node, ast.Import | ast.ImportFrom) and helper in bound_names(node))
        )
        if is_local:
            return []
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if any(
            isinstance(part, ast.Name) and part.id == helper
            for part in [call.func, *call.args, *(keyword.value for keyword in call.keywords)]
        )
    ]


def calls(code: str, name: str, helper: str = "aux") -> bool:
    """
    Whether a function calls a helper, directly or through other functions of the code. Passing the helper to another
    function (`map(aux, xs)`) counts as a call.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.
        helper (`str`, *optional*, defaults to `"aux"`): Name of the helper.

    Returns:
        `bool`: `False` if the helper's name is a parameter or a local variable of the function.
    """
    return any(_uses(function, helper) for function in _reached(parse(code), name, helper))


def is_thin_wrapper(code: str, name: str, helper: str = "aux") -> bool:
    """
    Whether a function only returns what a helper returns: `return aux(x, y)`, or `r = aux(x)` and `return r`.

    A function that computes the arguments (`aux(sorted(x))`) is not a thin wrapper. One that only returns the result of
    another thin wrapper is.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.
        helper (`str`, *optional*, defaults to `"aux"`): Name of the helper.

    Returns:
        `bool`: `False` if there is no such function.
    """
    tree = parse(code)
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        definition = find(tree, name)
        if isinstance(definition, ast.Name):  # f = aux
            target = definition.id
        elif isinstance(definition, Function):
            target = _passes_on(definition) or name
        else:
            return False
        if target == helper:
            return True
        name = target
    return False


def _passes_on(function: Function) -> str | None:
    """Name of the function whose result a function returns unchanged, if it does nothing else."""
    body = statements(function)
    match body:
        case [ast.Return(value=ast.Call() as call)]:
            pass
        case [
            ast.Assign(targets=[ast.Name(id=stored)], value=ast.Call() as call)
            | ast.AnnAssign(target=ast.Name(id=stored), value=ast.Call() as call),
            ast.Return(value=ast.Name(id=read)),
        ] if stored == read:
            pass
        case _:
            return None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    plain = (ast.Name, ast.Constant, ast.Attribute, ast.Starred, ast.Tuple, ast.List, ast.expr_context)
    if isinstance(call.func, ast.Name) and all(isinstance(n, plain) for a in arguments for n in ast.walk(a)):
        return call.func.id
    return None


def ignores_result(code: str, name: str, helper: str = "aux") -> bool:
    """
    Whether a function calls a helper but never uses its result: each call is a separate statement, or its result is
    assigned to variables that are never read.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.
        helper (`str`, *optional*, defaults to `"aux"`): Name of the helper.

    Returns:
        `bool`: `False` if the helper is not called.
    """
    used = ignored = 0
    for function in _reached(parse(code), name, helper):
        uses = _uses(function, helper)
        nodes = list(ast.walk(function))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in nodes:
            match node:
                case ast.Expr(value=value):
                    targets: list[ast.expr] = []
                case ast.Assign(targets=targets, value=value):
                    pass
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    targets = [target]
                case _:
                    continue
            value = value.value if isinstance(value, ast.Await) else value
            leaves = [leaf for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.expr)]
            plain = all(isinstance(leaf, ast.Name | ast.Tuple | ast.List | ast.Starred) for leaf in leaves)
            names = {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}
            is_aux = value in uses and isinstance(value.func, ast.Name) and value.func.id == helper
            ignored += is_aux and plain and not names & read
        used += len(uses)
    return used > 0 and ignored == used
