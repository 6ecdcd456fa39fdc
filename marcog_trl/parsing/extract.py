"""
Finds the Python code in the reply of a model.

Nothing here runs code.
"""

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from marcog_trl.execution.analysis import free_names
from marcog_trl.parsing.budget import Budget, Lines
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
def extract_code(text: str, entry_point: str | None = None, prompt: str | None = None) -> str:
    """
    Extract the code of a completion, with its imports, helpers and decorators.

    If the whole text is code, it is returned. Otherwise the function returns the first of these that exists: the last
    complete fenced block that defines `entry_point`; the longest piece that parses and defines it; `prompt` continued by
    the text, if the text is a function body; the longest piece that parses. A stub (a function without a body) is returned
    only if there is nothing better. Imports, helpers and constants that the code needs are put before it if earlier fenced
    blocks have them, then imports and helpers that `prompt` has and the code lacks. What a model thinks (`<think>…</think>`)
    is not read. Extracting code from extracted code changes nothing.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class to look for; any code if `None` or `""`.
        prompt (`str`, *optional*): Text of the problem, if it may hold code that the completion continues or uses.

    Returns:
        `str`: Code that parses, or `""`.
    """
    text, entry_point, budget = normalise(text), entry_point or None, Budget()
    candidates = list(_candidates(text, entry_point, budget))
    pieces: dict[int, str] = {}
    code, best = None, 0
    before: tuple[list[str], int] = ([], 0)
    for i, (source, read, earlier) in enumerate(candidates):
        if entry_point is not None and entry_point not in source:
            continue  # only if there is nothing better
        pieces[i] = read(source)
        rank = _rank(pieces[i], entry_point)
        if rank > best:
            code, best, before = pieces[i], rank, earlier
        if rank == 2:
            break
    if code is None and prompt is not None and entry_point is not None:
        code = _continue(normalise(prompt), text, entry_point, budget)
    if code is None:
        found = [pieces[i] if i in pieces else read(source) for i, (source, read, _) in enumerate(candidates)]
        code = max(found, key=len, default="")
    blocks, count = before
    if count:
        code = _with_earlier(blocks[:count], code, budget)
    return _supply(code, normalise(prompt), entry_point) if code and prompt else code


@lru_cache(maxsize=4096)
def syntax_error(text: str, entry_point: str | None = None, prompt: str | None = None) -> str | None:
    """
    Find the syntax error in the code of a completion.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class to look for; any code if `None` or `""`.
        prompt (`str`, *optional*): Text of the problem, as in [`extract_code`].

    Returns:
        `str` or `None`: For example "line 3, column 5: '(' was never closed", counted within the fenced block if there is
        one. `None` if there is no code, or if `entry_point` is complete, whatever the text around it.
    """
    text, entry_point, budget = normalise(text), entry_point or None, Budget()
    blocks, tail = fences(text, budget)
    candidates = [*reversed(blocks), *([] if tail is None else [tail]), text]
    # The block to look at: one that defines the entry point, else the last one, even if it is broken
    ranks = [
        _rank(_longest(source, entry_point, budget), entry_point)
        if entry_point is None or entry_point in source
        else 0
        for source in candidates
    ]
    rank = max(ranks)
    block = Lines(candidates[ranks.index(rank)], budget)
    tree, error = block.parse(0, len(block))
    if tree is not None or error is None:
        return None
    if prompt is not None and entry_point is not None and not rank:
        if _continue(normalise(prompt), text, entry_point, budget) is not None:
            return None
    starts = [i for i, line in enumerate(block.lines) if line.startswith(("def ", "async def ", "class "))]
    named = [i for i in starts if entry_point in block.lines[i].replace("(", " ").replace(":", " ").split()]
    if not starts:  # prose, unless a fence says that it is code
        return None if candidates[ranks.index(rank)] is text else place(error)
    start = (named or starts)[-1]
    end = block.longest_end(start)
    rest = next((line for line in block.lines[end:] if line.strip()), "")
    if end > start and not rest[:1].isspace():
        return None
    error = block.parse(start, len(block))[1]
    return None if error is None else place(error, start)


_THOUGHTS = re.compile(r"^[ \t]*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.MULTILINE | re.DOTALL)
_END_OF_THOUGHTS = re.compile(r"\A.*?</think(?:ing)?>[ \t]*$", re.MULTILINE | re.DOTALL)
"""For chat templates that begin the thoughts themselves."""


def normalise(text: str) -> str:
    """
    The text without what a model thinks before it answers, with Unix line ends, without byte order marks, and without blank lines
    at its start and end.
    """
    text = f"\n{text}".replace("\r\n", "\n").replace("\r", "\n").replace("\n\ufeff", "\n")
    if "<think" in text:
        text = _THOUGHTS.sub("", text)
    elif "</think" in text:
        text = _END_OF_THOUGHTS.sub("", text)
    return text.strip("\n").rstrip()


_STARTS = ("@", "#", "(", "[", "{", "*", '"', "'")
"""Characters that code may start with, besides those of a name."""


def _rank(code: str, entry_point: str | None) -> int:
    """0 if the code does not define the entry point, 1 if it defines a stub of it, 2 if it defines more."""
    if entry_point is None:
        return 2 if code else 0
    found = find(parse(code), entry_point)
    return 0 if found is None else 1 if is_stub(found) else 2


_Candidate = tuple[str, Callable[[str], str], tuple[list[str], int]]


def _candidates(text: str, entry_point: str | None, budget: Budget) -> Iterator[_Candidate]:
    """Texts that may be code, in order of preference, each with the function that reads it, the blocks, and how many are before."""

    def as_it_is(source: str) -> str:
        lines = Lines(source, budget)
        tree, _ = lines.parse(0, len(lines))
        return "" if tree is None else _tidy(source, tree)

    def longest(source: str) -> str:
        return _longest(source, entry_point, budget)

    whole = _dedent(text)
    yield whole, as_it_is, ([], 0)
    blocks, tail = fences(text, budget)
    for i in reversed(range(len(blocks))):
        yield blocks[i], longest, (blocks, i)
    if tail is not None:
        yield tail, longest, (blocks, len(blocks))
    yield whole, longest, ([], 0)


def fences(text: str, budget: Budget) -> tuple[list[str], str | None]:
    """The complete fenced blocks, and the text after a fence that is never closed. A closing fence may end a line of code."""
    blocks: list[str] = []
    opened: list[str] | None = None
    indent, affordable = 0, True
    for line in text.split("\n"):
        content = line.lstrip()
        if content.startswith("```"):
            if opened is None:
                opened, indent = [], len(line) - len(content)
            else:
                blocks.append(_dedent("\n".join(opened)))
                opened = None
        elif opened is not None:
            opened.append(line[min(indent, len(line) - len(content)) :])
            last = opened[-1].rstrip()
            if last.endswith("```") and last.count("```") % 2 and content[0] != "#" and affordable:
                block = _dedent("\n".join([*opened[:-1], last.removesuffix("```")]))
                as_body = f"def body():\n{textwrap.indent(block, '    ')}"
                for attempt in (Lines(block, budget), Lines(as_body, budget)):
                    tree, error = attempt.parse(0, len(attempt))
                    affordable = tree is not None or error is not None
                    if tree is not None:  # else the fence is in a string
                        blocks.append(block)
                        opened = None
                        break
    return blocks, None if opened is None else _dedent("\n".join(opened))


def _dedent(text: str) -> str:
    """Remove common indentation. A text without any stays as it is, blank lines in strings included."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text


def _longest(text: str, entry_point: str | None, budget: Budget) -> str:
    """The longest run of lines that parses; one that defines the entry point comes before a stub of it, and that before others."""
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
    return max(pieces, key=lambda piece: (_rank(piece, entry_point), len(piece)), default="")


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


def _head_of(prompt: str) -> str:
    """The last fenced block of a prompt, else the whole prompt."""
    blocks = fences(prompt, Budget())[0]
    return blocks[-1] if blocks else prompt


def _continue(prompt: str, text: str, entry_point: str, budget: Budget) -> str | None:
    """The code of `prompt` continued by a function body, if the result defines more than the stub in the prompt."""
    blocks, tail = fences(text, budget)
    head = _head_of(prompt)
    alone = find(parse(_longest(head, entry_point, Budget())), entry_point)
    codes = []
    for body in (text, *blocks[-1:], *([] if tail is None else [tail])):
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


def _with_earlier(blocks: Sequence[str], code: str, budget: Budget) -> str:
    """Put imports, helpers and constants of earlier blocks before code that needs them."""
    definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    kinds = (*definition, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    pending = list(free_names([code]))
    definitions: dict[str, tuple[int, str]] = {}  # name → place and source of the last definition
    place = 0
    for block in blocks if pending else ():
        piece = _longest(block, None, budget)
        tree, lines = parse(piece), piece.split("\n")
        for node in tree.body if tree is not None else ():
            if isinstance(node, kinds) and not is_stub(node):
                decorators = node.decorator_list if isinstance(node, definition) else []
                first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
                source = "\n".join(lines[first - 1 : node.end_lineno])
                definitions |= dict.fromkeys(bound_names(node), (place, source))
                place += 1
    needed: set[tuple[int, str]] = set()
    while pending:
        name = pending.pop()
        found = definitions.get(name, definitions.get("*"))
        if found is not None and found not in needed:
            needed.add(found)
            pending += free_names([found[1]])
    return combine(*(source for _, source in sorted(needed)), code) if needed else code


def _supply(code: str, prompt: str, entry_point: str | None) -> str:
    """Put imports and helpers of the prompt before code that lacks them."""
    context, tree = parse(_longest(_head_of(prompt), entry_point, Budget())), parse(code)
    if context is None or tree is None:
        return code
    bound = {name for node in top_level(tree) for name in bound_names(node)}
    bound |= {entry_point} if entry_point is not None else set()
    needed = []
    for node in context.body:
        names = set(bound_names(node))
        if not names <= bound and not (isinstance(node, Function) and is_stub(node)):
            needed.append(ast.unparse(node))
    return combine("\n".join(needed), code) if needed else code
