"""Analyzes tests on their syntax tree: what they need from the program, which test methods they have, and whether a judge can
run them again for the next program. Never executes anything.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from typing import Any


_COMMON_MODULES = {
    name: name
    for name in (
        "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator os random re "
        "statistics string sys time typing numpy"
    ).split()
} | {"np": "numpy"}
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
# Modules that have no state, or whose state the judge resets before each program
_STATELESS = frozenset(
    (
        "__future__ abc array base64 bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions "
        "functools hashlib heapq io itertools json math numbers numpy operator random re statistics string textwrap time "
        "typing unittest uuid"
    ).split()
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_LOG_NAMES = frozenset(("logging", "assertLogs", "assertNoLogs"))
_LARGEST_BATCH = 64  # calls
_REACH_ALL = frozenset(
    "setattr delattr vars globals exec eval compile __import__ open __builtins__ mock patch".split()
)
_CHANGE_STATE = ("set", "add", "append", "extend", "insert", "update", "register", "remove", "pop", "clear", "install")


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


def leaves_nothing(nodes: list[ast.AST], modules: tuple[tuple[str, str], ...]) -> bool:
    """
    Whether the tests, complete or interrupted, leave nothing behind that the next program's tests could see.

    Args:
        nodes (`list[ast.AST]`): All nodes of the set-up and the tests.
        modules (`tuple[tuple[str, str], ...]`): Modules that they use without importing them.

    Returns:
        `bool`: `True` if they only use modules without state, and store nothing in them.
    """
    imported = {name for name, _ in modules}
    sources = {module for _, module in modules}
    for node in nodes:
        if isinstance(node, ast.Import):
            sources |= {_source(alias.name) for alias in node.names}
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            sources |= {_source(f"{node.module}.{alias.name}") for alias in node.names}
            imported |= {alias.asname or alias.name for alias in node.names}
    return sources <= _STATELESS and not imported & _REACH_ALL and not any(_reaches(node, imported) for node in nodes)


def _source(path: str) -> str:
    return "numpy.random" if path.startswith("numpy.random") else path.partition(".")[0]


def _reaches(node: ast.AST, imported: set[str]) -> bool:
    """Whether a node may change or pass on something that does not belong to the tests."""
    if isinstance(node, ast.Name):
        return node.id in _REACH_ALL
    if isinstance(node, ast.Assign):  # a second name for a module
        return isinstance(node.value, ast.Name) and node.value.id in imported
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return False
    root = node.value
    names = [node.attr] if isinstance(node, ast.Attribute) else []
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        names += [root.attr] if isinstance(root, ast.Attribute) else []
        root = root.value
    if not {*names}.isdisjoint(_REACH_ALL | {"__dict__", "__globals__"}):
        return True
    theirs = not isinstance(root, ast.Name) or root.id in imported
    if not isinstance(node.ctx, ast.Load):
        return theirs
    if not isinstance(root, ast.Name) or not theirs:
        return False
    is_numpys = root.id != "random" and "random" in names
    return is_numpys or any(name.startswith(_CHANGE_STATE) for name in names)


def patched_modules(nodes: list[ast.AST], modules: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Modules in which tests may replace something: those that they import, and those of dotted names in strings, as in
    `mock.patch("time.sleep")`."""
    found = {"builtins", *(module for _, module in modules)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            parts = node.value.split(".")
            found |= {".".join(parts[:k]) for k in range(1, len(parts))}
    return tuple(sorted(found - {"", "__future__"}))


def looks_at_logs(nodes: list[ast.AST]) -> bool:
    """Whether tests look at what is logged."""
    return any(
        (isinstance(node, ast.Name) and node.id in _LOG_NAMES)
        or (isinstance(node, ast.Attribute) and node.attr in _LOG_NAMES)
        or (isinstance(node, ast.alias) and node.name.partition(".")[0] in _LOG_NAMES)
        for node in nodes
    )


class Secrets:
    """The expected values of calls that are sent together, none of which may be an argument of a later one of them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.count = 0
        self.values: set[Any] = set()

    def given_away(self, args: tuple, kwargs: dict[str, Any], expected: Any) -> bool:
        """
        Whether a call must wait for the answers to the calls before it. If so, a new group of calls begins with it.

        Args:
            args (`tuple`): Positional arguments, literals.
            kwargs (`dict`): Keyword arguments, literals.
            expected (`Any`): The value that the test compares the result with.
        """
        values: list[Any] = []
        texts: list[str] = []
        _collect([*args, *kwargs.values()], values, texts)
        waits = self.count >= _LARGEST_BATCH or not self.values.isdisjoint(values)
        if texts and not waits:
            text = "\n".join(texts)
            waits = any(str(secret) in text for secret in self.values)
        if waits:
            self.forget()
        self.count += 1
        found: list[Any] = []
        _collect([expected], found, found)
        self.values.update(found)
        return waits


def _collect(items: list[Any], values: list[Any], texts: list[str]) -> None:
    """Adds the values in `items` to `values`, containers as their text, and strings also to `texts`. Truth values, `None`
    and empty strings are left out, because they reveal nothing."""
    for value in items:
        kind = type(value)
        if kind is int or kind is float:
            values.append(value)
        elif kind is str:
            if value:
                values.append(value)
                texts.append(value)
        elif kind in (list, tuple, set, frozenset, dict):
            inner = [part for pair in value.items() for part in pair] if kind is dict else list(value)
            values.append(repr(inner))
            _collect(inner, values, texts)
        elif kind is not bool and value is not None:
            values.append(value)
