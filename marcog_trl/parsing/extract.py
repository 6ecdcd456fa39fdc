"""
Finds the Python code in the reply of a model.

Nothing here runs code.
"""

from __future__ import annotations

import ast
import re
import textwrap
import typing
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from marcog_trl.execution.analysis import free_names
from marcog_trl.parsing.budget import Budget, Lines
from marcog_trl.parsing.markup import blocks_of, dedent, normalise, unix_lines
from marcog_trl.parsing.syntax import (
    Function,
    bound_names,
    combine,
    find,
    is_stub,
    parse,
    place,
    shape,
    top_level,
    without,
)


@lru_cache(maxsize=4096)  # workflows, feedback and rewards read the same replies
def extract_code(
    text: str, entry_point: str | None = None, prompt: str | None = None, names: tuple[str, ...] = ()
) -> str:
    """
    Extract the code of a completion, with its imports, helpers and decorators.

    If the whole text is code, it is returned. Otherwise, the function returns the first of these that exists: the last complete
    fenced block that defines `entry_point`; the longest piece that parses and defines it; `prompt` continued by the text, if the text
    is a function body; the longest piece that parses. Without an entry point, it is a program: the last complete block that reads and
    prints something when it runs, else the last one that does one of the two. A stub (a function without a body) is returned only if there
    is nothing better. Imports, helpers and constants that the code needs are put before it if other blocks (else other pieces) have
    them, then imports and helpers that `prompt` has and the code lacks. Thoughts (`<think>…</think>`) and what follows an end token are not
    read. Extracting code from extracted code changes nothing.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class to look for, or `Solution().name`; a program if `None` or `""`.
        prompt (`str`, *optional*): Text of the problem, if it may hold code that the completion continues or uses.
        names (`tuple[str, ...]`, *optional*): Other names that the code should define, if the completion does.

    Returns:
        `str`: Code that parses, or `""`.
    """
    reply = _Reply(normalise(text), entry_point or None)
    code = reply.whole()
    if code and (reply.entry_point is None or _rank(code, reply.entry_point) == 2):
        return _supply(code, unix_lines(prompt), reply.entry_point) if prompt else code
    best = reply.best()
    if reply.entry_point is None or reply.rank(best):
        code = reply.with_helpers(best, names)
    else:
        continued = _continue(unix_lines(prompt), reply) if prompt is not None else None
        found = [_in_line(reply.text, reply.entry_point), continued, max(map(reply.code, reply.order), key=len)]
        code = next(code for code in found if code is not None)
    return _supply(code, unix_lines(prompt), reply.entry_point) if code and prompt else code


@lru_cache(maxsize=4096)
def syntax_error(text: str, entry_point: str | None = None, prompt: str | None = None) -> str | None:
    """
    Find the syntax error in the code of a completion.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class to look for; a program if `None` or `""`.
        prompt (`str`, *optional*): Text of the problem, as in [`extract_code`].

    Returns:
        `str` or `None`: For example "line 3, column 5: '(' was never closed", counted within the fenced block if there is
        one. `None` if there is no code, or if `entry_point` is complete, whatever the text around it.
    """
    reply = _Reply(normalise(text), entry_point or None)
    best = reply.best()  # it may be broken
    block = Lines(reply.sources[best], reply.budget)
    tree, error = block.parse(0, len(block))
    if tree is not None or error is None:
        return None
    if prompt is not None and reply.entry_point is not None and not reply.rank(best):
        if _continue(unix_lines(prompt), reply) is not None:
            return None
    starts = [i for i, line in enumerate(block.lines) if line.startswith(("def ", "async def ", "class "))]
    named = [i for i in starts if entry_point in block.lines[i].replace("(", " ").replace(":", " ").split()]
    if not starts:  # prose, unless a fence says that it is code
        return None if best == reply.order[-1] else place(error)
    start = (named or starts)[-1]
    end = block.longest_end(start)
    rest = next((line for line in block.lines[end:] if line.strip()), "")
    if end > start and not rest[:1].isspace():
        return None
    error = block.parse(start, len(block))[1]
    return None if error is None else place(error, start)


class _Reply:
    """
    A reply, and where its code may be: in its fenced blocks, else anywhere in it.

    Args:
        text (`str`): The text, as [`normalise`] returns it.
        entry_point (`str`, *optional*): Function or class to look for; a program if `None`.

    Attributes:
        sources (`list[str]`): The fenced blocks, then the whole text. Methods take their indices.
        order (`list[int]`): The indices: of two blocks that rank the same, the first in this order counts.
    """

    def __init__(self, text: str, entry_point: str | None):
        self.text, self.entry_point, self.budget = text, entry_point, Budget()
        self.blocks = blocks_of(text)
        self.sources = [*(block.text for block in self.blocks), dedent(text)]
        by_preference = sorted(range(len(self.blocks)), key=lambda i: (self.blocks[i].closed, i), reverse=True)
        self.order = [*sorted(by_preference, key=lambda i: self.blocks[i].is_foreign), len(self.blocks)]
        self._pieces: dict[int, list[str]] = {}
        self._ranks: dict[int, int] = {}
        self._definitions: dict[bool, dict[str, list[_Definition]]] = {}

    def whole(self) -> str:
        """The whole text, if it is code."""
        lines = Lines(self.sources[-1], self.budget)
        tree, _ = lines.parse(0, len(lines))
        return "" if tree is None else _tidy(self.sources[-1], tree)

    def best(self) -> int:
        """The source with the highest rank."""
        highest = 3 if self.entry_point is None else 2
        best = self.order[0]
        for i in self.order:
            if self.rank(i) > self.rank(best):
                best = i
            if self.rank(best) == highest:
                break
        return best

    def rank(self, i: int) -> int:
        """
        For an entry point: 0 if a source does not define it, 1 if it defines a stub of it, 2 if it defines more. For a program: 0 if a
        source has no code, 1 if it does nothing when it runs, 2 if it does, and 3 if it reads and prints.
        """
        if i not in self._ranks:
            self._ranks[i] = (
                self._program_rank(i) if self.entry_point is None else _rank(self.code(i), self.entry_point)
            )
        return self._ranks[i]

    def _program_rank(self, i: int) -> int:
        code, is_block = self.code(i), i < len(self.blocks)
        tree = parse(code)
        if not code or tree is None or (is_block and self.blocks[i].is_foreign):
            return min(1, len(code))
        if not any(map(_acts, tree.body)):
            return 1
        text = self.sources[i] if is_block else code  # of a block that is cut off, all that it would have done
        needed = self.with_helpers(i) if not _reads_and_prints(text) else ""
        return 3 if _reads_and_prints(f"{text}\n{needed}") else 2

    def code(self, i: int) -> str:
        """The longest piece of a source; one that defines the entry point comes before a stub of it, and that before others."""
        return max(self.pieces(i), key=lambda piece: (_rank(piece, self.entry_point), len(piece)), default="")

    def pieces(self, i: int) -> list[str]:
        """The longest runs of lines of a source that parse, without prose."""
        if i not in self._pieces:
            self._pieces[i] = _pieces(self.sources[i], self.budget)
        return self._pieces[i]

    def with_helpers(self, i: int, names: Sequence[str] = ()) -> str:
        """
        The code of a source, after the imports, helpers and constants that it needs and other blocks, or pieces, have. `names` are
        needed, too.
        """
        code = self.code(i)
        is_block = i < len(self.blocks)
        own = (i, 0) if is_block else (0, self.pieces(i).index(code) if code else 0)
        tree = parse(code)
        bound = {name for node in (top_level(tree) if tree is not None else ()) for name in bound_names(node)}
        pending = [*free_names([code]), *(name for name in names if name not in bound)]
        definitions = self.definitions(is_block) if pending else {}
        needed: set[_Definition] = set()
        while pending and self.budget.left > 0:
            name = pending.pop()
            found = definitions.get(name, definitions.get("*", []))
            before = [definition for definition in found if definition.place < own]
            chosen = before[-1:] or [definition for definition in found if definition.place > own][:1]
            for definition in chosen:
                if definition not in needed:
                    needed.add(definition)
                    pending += free_names([definition.source])
                    self.budget.left -= len(definition.source)
        helpers = sorted(needed, key=lambda definition: (definition.place, definition.number))
        return combine(*(definition.source for definition in helpers), code) if needed else code

    def definitions(self, of_blocks: bool) -> dict[str, list[_Definition]]:
        """What the blocks, or the pieces of the whole text, define, by name and in order; `"*"` for imports of all names."""
        if of_blocks not in self._definitions:
            sources = range(len(self.blocks)) if of_blocks else [len(self.blocks)]
            places = [
                ((i, 0) if of_blocks else (0, k), piece) for i in sources for k, piece in enumerate(self.pieces(i))
            ]
            found: dict[str, list[_Definition]] = {}
            for place, piece in places:
                for definition, names in _definitions(piece, place):
                    for name in names:
                        found.setdefault(name, []).append(definition)
            self._definitions[of_blocks] = found
        return self._definitions[of_blocks]


@dataclass(frozen=True)
class _Definition:
    """
    An import, a function, a class or a constant.

    Args:
        place (`tuple[int, int]`): Its block and piece.
        number (`int`): Its number in the piece.
        source (`str`): Its source, with decorators.
    """

    place: tuple[int, int]
    number: int
    source: str


def _definitions(piece: str, place: tuple[int, int]) -> Iterator[tuple[_Definition, list[str]]]:
    """The definitions of a piece that are not stubs, each with the names that it binds."""
    definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    kinds = (*definition, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    tree, lines = parse(piece), piece.split("\n")
    for number, node in enumerate(tree.body if tree is not None else ()):
        if isinstance(node, kinds) and not is_stub(node):
            decorators = node.decorator_list if isinstance(node, definition) else []
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            yield _Definition(place, number, source), list(bound_names(node))


_READS = re.compile(r"\b(?:input\s*\(|stdin\b|open\s*\(\s*0|fileinput\b)")
_PRINTS = re.compile(r"\b(?:print\s*\(|print\b(?=,)|stdout\b)")
_PRETENDS_TO_READ = re.compile(r"\bsys\.stdin\s*=(?!=|.*(?:stdin|\(0))|^\s*(?:def|class) input\b", re.MULTILINE)


def _reads_and_prints(text: str) -> bool:
    return bool(_READS.search(text) and _PRINTS.search(text) and not _PRETENDS_TO_READ.search(text))


def _acts(node: ast.stmt) -> bool:
    """Whether a statement of the top level does more than to define something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(isinstance(leaf, ast.Call | ast.Await | ast.Assert) for leaf in ast.walk(node))


_TYPES = frozenset(typing.__all__)
_STARTS = ("@", "#", "(", "[", "{", "*", '"', "'")
"""Characters that code may start with, besides those of a name."""


def _mentions(code: str, name: str) -> bool:
    """Whether code has a name, which Python compares in its normal form."""
    name = name.partition("(")[0]
    return name in code or (not code.isascii() and name in unicodedata.normalize("NFKC", code))


def _rank(code: str, entry_point: str | None) -> int:
    """0 if the code does not define the entry point, 1 if it defines a stub of it, 2 if it defines more."""
    if entry_point is None or not _mentions(code, entry_point):
        return 0
    found = find(parse(code), entry_point)
    return 0 if found is None else 1 if is_stub(found) else 2


def _pieces(text: str, budget: Budget) -> list[str]:
    """The longest runs of lines that parse, without prose."""
    lines = Lines(text, budget)
    pieces = []
    start = 0
    while start < len(lines) and budget.left > 0:
        line, end = lines.lines[start], start
        if line[:1].isidentifier() or line.startswith(_STARTS):
            end = lines.longest_end(start)
        if end > start:
            piece = lines.text(start, end)
            tree = parse(piece)
            pieces.append(_tidy(piece, tree) if tree is not None else "")
            if not pieces[-1] and line.startswith(("'", '"')):
                end = start  # the code may be inside a string
        start = max(end, start + 1)
    return pieces


def _longest(text: str, entry_point: str | None, budget: Budget) -> str:
    """The longest piece; one that defines the entry point comes before a stub of it, and that before others."""
    return max(_pieces(text, budget), key=lambda piece: (_rank(piece, entry_point), len(piece)), default="")


def _tidy(code: str, tree: ast.Module) -> str:
    """Drop prose that happens to parse ("Sure", "Note: this"): it would raise a `NameError` when the code is loaded."""
    prose = {node for node in tree.body if _is_prose(node)}
    kept = [node for node in tree.body if node not in prose]
    if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in kept):
        return ""  # quotes, or the output of a program
    return without(code, tree, prose).strip("\n").rstrip()


def _is_prose(node: ast.stmt) -> bool:
    """Whether a statement of the top level has no effect. Docstrings do not count as prose."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant):
        return False
    acts = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not any(isinstance(leaf, acts) for leaf in ast.walk(node))


def _head_of(prompt: str, entry_point: str | None) -> str:
    """
    The last fenced block of a prompt that defines the entry point, else its last block, else the whole prompt. A function without a
    body, at the end, gets one.
    """
    blocks = [block.text for block in blocks_of(prompt) if block.closed]
    asked = [
        block
        for block in blocks
        if entry_point is not None and _rank(_longest(block, entry_point, Budget()), entry_point)
    ]
    head = [prompt, *blocks, *asked][-1]
    return f"{head} pass" if head.endswith(":") and parse(head) is None and parse(f"{head} pass") is not None else head


def _continue(prompt: str, reply: _Reply) -> str | None:
    """The code of `prompt` continued by a function body, if the result defines more than the stub in the prompt."""
    entry_point, budget = reply.entry_point, reply.budget
    assert entry_point is not None
    head = _head_of(prompt, entry_point)
    alone = find(parse(_longest(head, entry_point, Budget())), entry_point)
    closed = [block.text for block in reply.blocks if block.closed]
    codes = []
    for body in (reply.text, *closed[-1:], *(block.text for block in reply.blocks if not block.closed)):
        lines = Lines(body, budget)
        if lines.parse(0, len(lines))[0] is not None:
            continue  # a complete module
        first_stripped = "    " + body.lstrip()  # chat templates strip the indentation of the first line only
        for candidate in (body, first_stripped, textwrap.indent(textwrap.dedent(body), "    ")):
            code = _longest(f"{head}\n{candidate}", entry_point, budget)
            function = find(parse(code), entry_point)
            # A class whose methods are stubs is not a stub itself: it must have changed
            if function is None or is_stub(function) or (alone is not None and shape(alone) == shape(function)):
                continue
            codes.append(code)
    return max(codes, key=lambda code: code.count("\n"), default=None)


def _in_line(text: str, entry_point: str) -> str | None:
    """Code between single backticks that defines the entry point."""
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if _rank(span, entry_point) == 2]
    return spans[-1] if spans else None


def _supply(code: str, prompt: str, entry_point: str | None) -> str:
    """
    Put imports and helpers of the prompt before code that lacks them. Names of `typing` that the prompt uses without an import, and
    those that a class `Solution` uses, are imported, too, as the judge of such problems does.
    """
    context, tree = parse(_longest(_head_of(prompt, entry_point), entry_point, Budget())), parse(code)
    if tree is None:
        return code
    bound = {name for node in top_level(tree) for name in bound_names(node)}
    bound |= {entry_point} if entry_point is not None else set()
    needed = []
    for node in context.body if context is not None else ():
        names = set(bound_names(node))
        if not names <= bound and not (isinstance(node, Function) and is_stub(node)):
            needed.append(ast.unparse(node))
    code = combine("\n".join(needed), code) if needed else code
    given = free_names([ast.unparse(context)]) if context is not None else ()
    if "(" in (entry_point or "") or not _TYPES.isdisjoint(given):
        types = sorted(_TYPES.intersection(free_names([code])))
        code = combine(f"from typing import {', '.join(types)}", code) if types else code
    return code
