"""Analyzes tests on their syntax tree: what they need from the program, and which test methods they have. Never
executes anything.
"""

import ast
import builtins
import symtable
from collections.abc import Iterator


_COMMON_MODULES = {
    name: name
    for name in (
        "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator os random re "
        "statistics string sys time typing numpy"
    ).split()
} | {"np": "numpy"}
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}


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


def test_methods(tree: ast.Module) -> tuple[str, ...]:
    """
    Finds the test methods in a module of tests, inherited ones included.

    Methods that the text does not show, such as those of an imported base class, are missing. The judge finds them.

    Args:
        tree (`ast.Module`): The module.

    Returns:
        `tuple[str, ...]`: `"Class.method"` in the order in which `unittest` runs them: sorted by class, then by method.
    """
    classes = {node.name: node for node in _top_level(tree.body) if isinstance(node, ast.ClassDef)}
    found = {name: _methods(name, classes, set()) for name in sorted(classes)}
    return tuple(f"{name}.{method}" for name, (is_case, methods) in found.items() if is_case for method in methods)


test_methods.__test__ = False  # type: ignore[attr-defined] # so that pytest does not collect it


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for inner in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _top_level(inner)


def _methods(name: str, classes: dict[str, ast.ClassDef], above: set[str]) -> tuple[bool, list[str]]:
    """Whether a class is a TestCase, and the names of its test methods."""
    is_case = False
    methods: set[str] = set()
    for base in classes[name].bases:
        known = base.id if isinstance(base, ast.Name) else None
        if known in classes and known not in {*above, name}:
            inherited = _methods(str(known), classes, {*above, name})
            is_case, methods = is_case or inherited[0], methods | set(inherited[1])
        else:
            is_case = is_case or ast.unparse(base).endswith("TestCase")
    for node in _top_level(classes[name].body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            methods.add(node.name)
        elif isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            methods = methods - names if isinstance(node.value, ast.Constant) else methods | names
    return is_case, sorted(method for method in methods if method.startswith("test"))


def seeded_modules(nodes: list[ast.AST]) -> tuple[str, ...]:
    """Modules whose random numbers tests seed: `random`, `numpy.random` or both."""
    if not any(getattr(node, "attr", getattr(node, "name", None)) == "seed" for node in nodes):
        return ()
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return ("random", "numpy.random") if any(name.startswith("numpy") for name in imported) else ("random",)
