"""
Reads the methods of a class out of what several agents wrote, and puts them into the class's skeleton, on the syntax tree.

Nothing here runs code, and nothing here knows of prompts, tests or rewards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from marcog_trl.parsing.budget import Budget, Lines
from marcog_trl.parsing.extract import extract_code, fences, normalise
from marcog_trl.parsing.prompts import context_of
from marcog_trl.parsing.syntax import bound_names, combine, find, is_stub, parse, place, shape, statements, top_level


_INDENT = "    "
_BLOCK = "if True:\n"
"""What is put before indented lines so that they parse as they stand; taking their indentation off would change strings."""


@dataclass(frozen=True)
class Statement:
    """
    A statement on the level of a module or a class.

    Args:
        names (`frozenset[str]`): What it binds; its own text if that cannot be said.
        uses (`frozenset[str]`): Names that it mentions.
        text (`str`): Its source, indented as its place in the class wants it.
    """

    names: frozenset[str]
    uses: frozenset[str]
    text: str


@dataclass(frozen=True)
class ClassPart:
    """
    What one text holds of a class.

    Args:
        methods (`Mapping[str, str]`): Methods that are whole and do something → source, indented.
        attributes (`tuple[Statement, ...]`): The other statements of the class's body.
        module (`tuple[Statement, ...]`): Imports, helpers and constants beside the class.
        error (`str`, *optional*): Where the text stops being Python: "line 3, column 5: '(' was never closed", counted
            within the fenced block if there is one.
    """

    methods: Mapping[str, str]
    attributes: tuple[Statement, ...]
    module: tuple[Statement, ...]
    error: str | None


@dataclass(frozen=True)
class Skeleton:
    """
    A class with methods that are left to write.

    Args:
        name (`str`): Name of the class.
        source (`str`): Source of the module that holds it.
        asked (`tuple[str, ...]`): Methods to write: those without a body, in order. An `__init__` that is just `pass` is
            taken for finished.
    """

    name: str
    source: str
    asked: tuple[str, ...]


def skeleton_of(problem: Mapping[str, Any]) -> Skeleton:
    """
    The class that a problem wants completed.

    Args:
        problem (`Mapping`): One dataset row; the skeleton is in its `starter_code`, else in its prompt.

    Returns:
        [`Skeleton`]: The class named `entry_point`.

    Raises:
        ValueError: If there is no such class, or none of its methods is left to write.
    """
    skeleton = _skeleton(context_of(problem), problem.get("entry_point") or "")
    if skeleton is None:
        raise ValueError(
            f"problem {problem.get('task_id')!r} has entry_point={problem.get('entry_point')!r}, which is no class with "
            "methods to write in its starter_code or prompt, as ClassEval's are; workflow='single' with "
            "'execution_reward' works for any problem"
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
    What a text holds of a class: `class` with methods, or bare methods, indented or not, fenced or not. A method that does
    not parse does not take the others with it. Methods without a body, and those that are as in the skeleton, do not count
    as written.

    Args:
        text (`str`): What an agent wrote.
        skeleton ([`Skeleton`]): The class.

    Returns:
        [`ClassPart`]: What was found; of a method that is written twice, the last version.
    """
    text = normalise(text)
    budget = Budget()
    blocks, tail = fences(text, budget)
    blocks += [] if tail is None else [tail]
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
    unusable = {skeleton.name}  # what statements that are left out would have bound
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
                else:  # tries the class out, as examples do, or is prose
                    unusable |= statement.names
        for node in body:
            if node is cut:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not _is_empty(node) and not (node.name in given and _shape(node) == _shape(given[node.name])):
                    written.setdefault(node.name, []).append(_source(source, node, _INDENT))
            elif not isinstance(node, ast.Expr | ast.Pass):
                attributes.append(_statement(source, node, _INDENT))
        # A property and its setter share a name
        methods |= {name: "\n\n".join(versions) for name, versions in written.items()}
    return ClassPart(methods, tuple(attributes), tuple(module), next(iter(errors), None))


def _is_method(node: ast.FunctionDef | ast.AsyncFunctionDef, given: Mapping[str, Any]) -> bool:
    """Whether a function that stands outside of any class is meant for it."""
    first = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)][:1]
    marks = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    return (
        node.name in given or first in (["self"], ["cls"]) or bool(marks & {"staticmethod", "classmethod", "property"})
    )


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement outside of any class may set up something that methods use."""
    if isinstance(node, ast.AnnAssign):
        return node.value is not None  # "Note: this" is none
    return isinstance(node, ast.Assign | ast.Try | ast.If)


def _is_empty(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method is a stub, `raise NotImplementedError` included."""
    match statements(node):
        case [ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError")))]:
            return True
    return is_stub(node)


def _shape(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple]:
    """What is equal for functions that differ in layout, comments and docstring only."""
    parts: list[ast.AST] = [node.args, *node.decorator_list, *statements(node)]
    return [shape(part) for part in parts]


_Piece = tuple[str, list[ast.stmt], list[ast.stmt], ast.stmt | None]


def _pieces(text: str, errors: list[str], budget: Budget) -> Iterator[_Piece]:
    """
    The parts of a text that parse: source, statements that stand indented, statements that do not, and that one of them, or
    of their classes, of which only the beginning parses. What begins as code and is not whole is added to `errors`.
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
    """The last function of a body, if the lines after it, which do not parse, belong to it."""
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


@lru_cache(maxsize=64)  # each statement of a source asks
def _lines(source: str) -> list[str]:
    return source.split("\n")


def _source(source: str, node: ast.stmt, indent: str) -> str:
    """A statement's text at another indentation; what is inside strings stays as it is."""
    if not {"body", "cases"} & set(node._fields):  # a simple statement, whose further lines may be indented at will
        own = [line.encode() for line in _lines(source)[node.lineno - 1 : node.end_lineno]]  # columns count bytes
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
    The class, with the methods, attributes, imports and helpers that agents wrote. Of several versions, the owner's counts,
    else that of the first agent that wrote one; methods that nobody wrote stay as they are in the skeleton.

    Args:
        skeleton ([`Skeleton`]): The class.
        parts (`Mapping[str, ClassPart]`): Agent → what it wrote, in the order of the team.
        owners (`Mapping[str, str]`, *optional*): Method → agent that was asked to write it.

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
    """The statements of all groups in order, without those that bind only what a group before theirs binds."""
    kept: list[Statement] = []
    bound: set[str] = set()
    for group in groups:
        kept += [statement for statement in group if not statement.names <= bound]
        bound |= {name for statement in group for name in statement.names}
    return kept


def _header(node: ast.ClassDef) -> str:
    """The `class` line, with decorators."""
    header = ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], node.decorator_list)
    return ast.unparse(ast.fix_missing_locations(header)).removesuffix(f"\n{_INDENT}pass")
