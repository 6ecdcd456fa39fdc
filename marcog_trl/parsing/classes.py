"""
Finds the methods of a class in the replies of several agents, and merges them into the skeleton of the class.

Nothing here runs code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from marcog_trl.parsing.budget import Budget, Lines
from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.markup import blocks_of, normalise
from marcog_trl.parsing.prompts import context_of
from marcog_trl.parsing.syntax import (
    bound_names,
    combine,
    find,
    is_empty,
    is_stub,
    parse,
    place,
    shape,
    statements,
    top_level,
)


_INDENT = "    "
_BLOCK = "if True:\n"
"""Goes before indented lines so that they parse. Removing their indentation would change multi-line strings."""


@dataclass(frozen=True)
class Statement:
    """
    A statement on the level of a module or a class.

    Args:
        names (`frozenset[str]`): Names that it binds; its own text if there are none.
        uses (`frozenset[str]`): Names that it uses.
        text (`str`): Its source, indented for its place in the class.
    """

    names: frozenset[str]
    uses: frozenset[str]
    text: str


@dataclass(frozen=True)
class ClassPart:
    """
    The parts of a class that one text holds.

    Args:
        methods (`Mapping[str, str]`): Name → indented source of the methods that are complete and not stubs.
        attributes (`tuple[Statement, ...]`): Other statements of the class body.
        module (`tuple[Statement, ...]`): Imports, helpers and constants beside the class.
        error (`str`, *optional*): The first syntax error, such as "line 3, column 5: '(' was never closed", counted within
            the fenced block if there is one.
    """

    methods: Mapping[str, str]
    attributes: tuple[Statement, ...]
    module: tuple[Statement, ...]
    error: str | None


@dataclass(frozen=True)
class Skeleton:
    """
    A class that has methods to write.

    Args:
        name (`str`): Name of the class.
        source (`str`): Source of the module that holds it.
        asked (`tuple[str, ...]`): Methods to write: those without a body, in order. An `__init__` that only has `pass`
            counts as complete.
    """

    name: str
    source: str
    asked: tuple[str, ...]


def skeleton_of(problem: Mapping[str, Any]) -> Skeleton:
    """
    The class that a problem asks to complete.

    Args:
        problem (`Mapping`): One dataset row. The skeleton is in its `starter_code`, else in its prompt.

    Returns:
        [`Skeleton`]: The class named `entry_point`.

    Raises:
        ValueError: If there is no such class, or it has no methods to write.
    """
    skeleton = _skeleton(context_of(problem), problem.get("entry_point") or "")
    if skeleton is None:
        raise ValueError(
            f"Problem {problem.get('task_id')!r} has entry_point={problem.get('entry_point')!r}, but its starter_code or "
            "prompt has no class of that name with methods to write. Use problems such as ClassEval's, or set "
            "workflow='single' and use 'execution_reward'."
        )
    return skeleton


@lru_cache(maxsize=512)
def _skeleton(context: str, name: str) -> Skeleton | None:
    source = extract_code(context, name)
    node = _class_of(source, name)
    if node is None:
        return None
    asked = [
        function.name
        for function in _functions(node.body)
        if is_stub(function)
        and not (function.name == "__init__" and any(isinstance(line, ast.Pass) for line in function.body))
    ]
    return Skeleton(name, source, tuple(dict.fromkeys(asked))) if asked else None


def _class_of(source: str, name: str) -> ast.ClassDef | None:
    found = find(parse(source), name)
    return found if isinstance(found, ast.ClassDef) else None


def _functions(body: Sequence[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


# Reading


@lru_cache(maxsize=4096)  # solution, feedback and rewards read the same replies
def read_part(text: str, skeleton: Skeleton) -> ClassPart:
    """
    Find the parts of a class in a text: `class` with methods, or methods alone, indented or not, fenced or not. If one
    method does not parse, the others are still found. Stubs, and methods that are the same as in the skeleton, are left
    out.

    Args:
        text (`str`): Reply of an agent.
        skeleton ([`Skeleton`]): The class.

    Returns:
        [`ClassPart`]: The parts; the last version of a method that the text has twice.
    """
    text = normalise(text)
    budget = Budget()
    blocks = [block.text for block in blocks_of(text)]
    part = _read(blocks, skeleton, budget) if blocks else None
    if part is not None and (part.methods or part.error is not None):
        return part
    return _read([text], skeleton, budget)


def _read(texts: Sequence[str], skeleton: Skeleton, budget: Budget) -> ClassPart:
    given_class = _class_of(skeleton.source, skeleton.name)
    assert given_class is not None
    given = {function.name: function for function in _functions(given_class.body)}
    methods: dict[str, str] = {}
    attributes: list[Statement] = []
    module: list[Statement] = []
    unusable = {skeleton.name}  # names that left-out statements would have bound
    errors: list[str] = []
    for source, inner, outer, cut in (piece for text in texts for piece in _pieces(text, errors, budget)):
        written: dict[str, list[str]] = {}
        body = list(inner)
        for node in outer:
            if node is cut:
                continue
            if isinstance(node, ast.ClassDef) and node.name == skeleton.name:
                body += node.body
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_method(node, given):
                body.append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                module.append(_statement(source, node, ""))
            else:
                statement = _statement(source, node, "")
                if _is_constant(node) and not statement.uses & unusable:
                    module.append(statement)
                else:  # an example of how to use the class, or prose
                    unusable |= statement.names
        for node in body:
            if node is cut:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not is_empty(node) and not (node.name in given and _shape(node) == _shape(given[node.name])):
                    written.setdefault(node.name, []).append(_source(source, node, _INDENT))
            elif not isinstance(node, ast.Expr | ast.Pass):
                attributes.append(_statement(source, node, _INDENT))
        # A property and its setter share a name
        methods |= {name: "\n\n".join(versions) for name, versions in written.items()}
    return ClassPart(methods, tuple(attributes), tuple(module), next(iter(errors), None))


def _is_method(node: ast.FunctionDef | ast.AsyncFunctionDef, given: Mapping[str, Any]) -> bool:
    """Whether a function outside of any class is meant to be a method of the class."""
    first = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)][:1]
    marks = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    return (
        node.name in given or first in (["self"], ["cls"]) or bool(marks & {"staticmethod", "classmethod", "property"})
    )


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement outside of any class may define something that methods use."""
    if isinstance(node, ast.AnnAssign):
        return node.value is not None  # "Note: this" is not a constant
    return isinstance(node, ast.Assign | ast.Try | ast.If)


def _shape(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple]:
    """A value that is equal for functions that differ in layout, comments and docstring only."""
    parts: list[ast.AST] = [node.args, *node.decorator_list, *statements(node)]
    return [shape(part) for part in parts]


_Piece = tuple[str, list[ast.stmt], list[ast.stmt], ast.stmt | None]


def _pieces(text: str, errors: list[str], budget: Budget) -> Iterator[_Piece]:
    """
    The pieces of a text that parse. For each: its source, the statements that are indented in the text, those that are not,
    and the function of which only the beginning parses, if any. The first syntax error is added to `errors`.
    """
    lines = Lines(text, budget)
    tree, _ = lines.parse(0, len(lines))
    if tree is not None:
        yield text, [], tree.body, None
        return
    start = 0
    while start < len(lines) and budget.left > 0:
        line = lines.lines[start].lstrip()
        is_indented = line != lines.lines[start]
        is_definition = line.startswith(("def ", "async def ", "class ", "@"))
        if not is_definition and (is_indented or not line[:1].isidentifier()):
            start += 1
            continue
        head = _BLOCK if is_indented else ""
        end = lines.longest_end(start, head)
        source = lines.text(start, end, head) if end > start else ""
        tree = parse(source)
        assert tree is not None
        inner: list[ast.stmt] = tree.body[0].body if is_indented and end > start else []  # type: ignore[attr-defined]
        outer = tree.body[1:] if is_indented else tree.body
        cut = _cut(outer or inner, lines.lines[end:])
        if is_definition and (cut is not None or end == start) and not errors:
            error = lines.parse(start, len(lines), head)[1]
            errors += [] if error is None else [place(error, start - head.count("\n"))]
        yield source, inner, outer, cut
        start = max(start + 1, end)


def _cut(body: Sequence[ast.stmt], rest: Sequence[str]) -> ast.stmt | None:
    """The last function of a body, if the lines after it belong to it but do not parse."""
    last = body[-1] if body else None
    if isinstance(last, ast.ClassDef):
        return _cut(last.body, rest)
    following = next((line for line in rest if line.strip()), "")
    indentation = len(following) - len(following.lstrip())
    if not isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef) or last.body[0].lineno == last.lineno:
        return None
    return last if indentation >= last.body[0].col_offset else None


def _statement(source: str, node: ast.stmt, indent: str) -> Statement:
    text = _source(source, node, indent)
    nodes = [node, *top_level(node)] if isinstance(node, ast.Try | ast.If) else [node]
    names = {name for part in nodes for name in bound_names(part)} - {"*"}
    uses = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    return Statement(frozenset(names or {text}), frozenset(uses), text)


@lru_cache(maxsize=64)  # called for each statement of a source
def _lines(source: str) -> list[str]:
    return source.split("\n")


def _source(source: str, node: ast.stmt, indent: str) -> str:
    """Source of a statement at another indentation. Multi-line strings stay as they are."""
    if not {"body", "cases"} & {*node._fields}:  # a simple statement: how its other lines are indented does not matter
        own = [
            line.encode() for line in _lines(source)[node.lineno - 1 : node.end_lineno]
        ]  # columns are counted in bytes
        own[-1] = own[-1][: node.end_col_offset]
        own[0] = own[0][node.col_offset :]
        return indent + b"\n".join(own).decode()
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
    lines = _lines(source)
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    old = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    in_strings = {
        number
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant | ast.JoinedStr)
        for number in range(leaf.lineno + 1, (leaf.end_lineno or leaf.lineno) + 1)
    }
    return "\n".join(
        line if number in in_strings or not line.strip() else indent + line.removeprefix(old)
        for number, line in enumerate(lines[first - 1 : node.end_lineno], start=first)
    )


# Merging


def merge_class(skeleton: Skeleton, parts: Mapping[str, ClassPart], owners: Mapping[str, str] | None = None) -> str:
    """
    Merge the methods, attributes, imports and helpers that agents wrote into the class. If several agents wrote a method,
    the owner's version is used, else the first agent's. Methods that nobody wrote stay as they are in the skeleton.

    Args:
        skeleton ([`Skeleton`]): The class.
        parts (`Mapping[str, ClassPart]`): Agent → parts that it wrote, in the order of the team.
        owners (`Mapping[str, str]`, *optional*): Method → agent that was to write it.

    Returns:
        `str`: Source of the module that holds the class.
    """
    tree = parse(skeleton.source)
    given = _class_of(skeleton.source, skeleton.name)
    assert tree is not None and given is not None
    methods: dict[str, str] = {}
    for part in reversed([*parts.values()]):
        methods |= part.methods
    for name, agent in (owners or {}).items():
        if agent in parts and name in parts[agent].methods:
            methods[name] = parts[agent].methods[name]

    attributes = _first([part.attributes for part in parts.values()])
    bound = {name for statement in attributes for name in statement.names}
    names = {function.name for function in _functions(given.body)} | set(methods)
    body: list[str] = []
    placed: set[str] = set()
    for node in given.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statement = _statement(skeleton.source, node, _INDENT)
            body += [] if statement.names <= bound else [statement.text]
            continue
        if not placed:
            body += [statement.text for statement in attributes if not statement.uses & names]
        if node.name not in methods:
            body.append(_source(skeleton.source, node, _INDENT))
        elif node.name not in placed:
            body.append(methods[node.name])
        placed.add(node.name)
    body += [text for name, text in methods.items() if name not in placed]
    body += [statement.text for statement in attributes if statement.uses & names]  # such as x = property(get_x)

    module = _first([part.module for part in parts.values()])
    bound = {name for statement in module for name in statement.names}
    around = [_statement(skeleton.source, node, "") for node in tree.body if node is not given]
    module = [*(statement for statement in around if not statement.names <= bound), *module]
    module.sort(key=lambda statement: not statement.text.startswith("from __future__"))
    before = "\n".join(statement.text for statement in module if skeleton.name not in statement.uses)
    after = [statement.text for statement in module if skeleton.name in statement.uses]
    return combine(before, "\n\n".join([_header(given), *body]), *after)


def _first(groups: Iterable[Sequence[Statement]]) -> list[Statement]:
    """Statements of all groups, in order, without those whose names an earlier group binds."""
    kept: list[Statement] = []
    bound: set[str] = set()
    for group in groups:
        kept += [statement for statement in group if not statement.names <= bound]
        bound |= {name for statement in group for name in statement.names}
    return kept


def _header(node: ast.ClassDef) -> str:
    """The `class` line and its decorators."""
    header = ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], node.decorator_list)
    return ast.unparse(ast.fix_missing_locations(header)).removesuffix(f"\n{_INDENT}pass")
