"""
Reads Python out of what a model wrote, and judges it on the syntax tree.

Nothing here runs code, and nothing here knows of tests, agents or training.
"""

import ast
import itertools
import re
import textwrap
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_WORK = 40_000
"""What reading one reply may cost, in tokens parsed, which bounds the time that a hostile reply takes. A reply of 64 KiB has
10,000 to 20,000 tokens of code."""
_WORK_PER_PARSE = 30
_WORK_PER_SCOPE = 40
_CHARACTERS_PER_WORK = 32
"""An attempt to parse costs something, however early it fails: Python looks at every character."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_SCOPE = re.compile(r"\b(?:def|class|lambda|for)\b")
_AT_ITS_PLACE = ("invalid syntax", "unexpected indent", "unindent does not match any outer indentation level")
"""Errors that Python reports at the token at which it stopped reading. Others may point at something far before."""
_PROBE = 16
"""Lines of a long text that are parsed first."""


@lru_cache(maxsize=4096)
def _work_of(line: str) -> int:
    return 1 + len(_TOKEN.findall(line)) + _WORK_PER_SCOPE * len(_SCOPE.findall(line))


class Work:
    """What may still be spent on reading one reply; its parts share it."""

    def __init__(self) -> None:
        self.left = _WORK


class Lines:
    """
    A text that is parsed piece by piece, as long as the work lasts.

    Args:
        text (`str`): The text.
        work ([`Work`]): What may be spent on it.
    """

    def __init__(self, text: str, work: Work):
        self.lines = text.split("\n")
        self.work = work
        self._before = [0, *itertools.accumulate(map(_work_of, self.lines))]
        self._characters = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, start: int, end: int, head: str = "") -> str:
        """The lines `start` to `end`, after a head that ends its own line."""
        return head + "\n".join(self.lines[start:end])

    def _cost(self, start: int, end: int, read: int) -> int:
        """What it costs to parse `lines[start:end]` if Python reads on to the line `read`."""
        characters = self._characters[end] - self._characters[start]
        return _WORK_PER_PARSE + characters // _CHARACTERS_PER_WORK + self._before[read] - self._before[start]

    def parse(self, start: int, end: int, head: str = "") -> tuple[ast.Module | None, Exception | None]:
        """As [`parse_or_error`], of `lines[start:end]`; neither a tree nor an error if there is no work left for it."""
        if self._cost(start, end, end) > self.work.left:
            return None, None
        tree, error = parse_or_error(self.text(start, end, head))
        read = end
        if isinstance(error, SyntaxError) and error.msg in _AT_ITS_PLACE and error.lineno is not None:
            read = min(end, start + max(0, error.lineno - head.count("\n")))
        self.work.left -= self._cost(start, end, read)
        return tree, error

    def longest_end(self, start: int, head: str = "") -> int:
        """
        The last `end` such that `lines[start:end]` parses. An error at a line means that no longer text parses either, so
        each attempt jumps to the line before the error. Of what is nested too deep, the first half is tried.
        """
        end = len(self)
        if end - start > _PROBE:
            error = self.parse(start, start + _PROBE, head)[1]
            if isinstance(error, SyntaxError) and error.msg in _AT_ITS_PLACE and error.lineno is not None:
                line = error.lineno - head.count("\n")
                end = start + line - 1 if line < _PROBE else end
        while end > start:
            reach = range(start, end + 1)
            end = start + bisect_right(reach, self.work.left, key=lambda line: self._cost(start, line, line)) - 1
            if end <= start:  # not even a line can be afforded
                self.work.left = 0
                return start
            tree, error = self.parse(start, end, head)
            if tree is not None:
                return end
            if isinstance(error, RecursionError | MemoryError):
                end = (start + end) // 2
                continue
            lineno = error.lineno if isinstance(error, SyntaxError) else None
            end = min(end - 1, start + lineno - head.count("\n") - 1 if lineno else end - 1)
        return start


def parse(code: str) -> ast.Module | None:
    """
    The syntax tree of a text, if it is Python.

    Args:
        code (`str`): Source text.

    Returns:
        `ast.Module` or `None`: `None` if the text does not compile, `return` outside a function included.
    """
    return parse_or_error(code)[0]


@lru_cache(maxsize=512)  # every predicate parses the same text again
def parse_or_error(code: str) -> tuple[ast.Module | None, Exception | None]:
    """As [`parse`], and the error of a text that does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are the model's, not the user's
            tree = ast.parse(code)
            with _without_finally(tree):
                compile(tree, "<completion>", "exec", dont_inherit=True)
        return tree, None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, surrogates, deep nesting
        return None, error.with_traceback(None)


@contextmanager
def _without_finally(tree: ast.Module) -> Iterator[None]:
    """Python compiles what stands in `finally` twice and more, nested 20 deep a million times: let it stand in `try`."""
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


# Extraction


@lru_cache(maxsize=4096)  # joint actions share replies, and workflows, feedback and rewards all ask
def extract_code(text: str, entry_point: str | None = None, prompt: str | None = None) -> str:
    """
    The code in a completion, complete with its own imports, helpers and decorators.

    A text that is code as a whole is taken as it is. Otherwise the last complete fenced block that defines `entry_point`
    counts, else the longest parsable piece that does, else the text continues `prompt` (a function body), else the longest
    parsable piece. A function without a body counts only where no other is. Imports and helpers of `prompt` that the code
    lacks are put before it. Extracting twice is extracting once.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class that is asked for; any code if `None` or `""`.
        prompt (`str`, *optional*): The problem's text, if it may hold code that the completion continues or relies on.

    Returns:
        `str`: Code that parses; `""` if there is none.
    """
    text, entry_point, work = normalise(text), entry_point or None, Work()
    candidates = list(_candidates(text, entry_point, work))
    pieces: dict[int, str] = {}
    code, best = None, 0
    for i, (source, read) in enumerate(candidates):
        if entry_point is not None and entry_point not in source:
            continue  # only if there is nothing better
        pieces[i] = read(source)
        rank = _rank(pieces[i], entry_point)
        if rank > best:
            code, best = pieces[i], rank
        if rank == 2:
            break
    if code is None and prompt is not None and entry_point is not None:
        code = _continue(normalise(prompt), text, entry_point, work)
    if code is None:
        found = [pieces[i] if i in pieces else read(source) for i, (source, read) in enumerate(candidates)]
        code = max(found, key=len, default="")
    return _supply(code, normalise(prompt), entry_point) if code and prompt else code


def syntax_error(text: str, entry_point: str | None = None, prompt: str | None = None) -> str | None:
    """
    Where the code in a completion stops being Python.

    Args:
        text (`str`): Completion.
        entry_point (`str`, *optional*): Function or class that is asked for; any code if `None` or `""`.
        prompt (`str`, *optional*): The problem's text, as in [`extract_code`].

    Returns:
        `str` or `None`: "line 3, column 5: '(' was never closed", counted within the fenced block if there is one; `None`
        if what was asked for is whole, whatever stands around it, or if there is no code.
    """
    text, entry_point, work = normalise(text), entry_point or None, Work()
    blocks, tail = fences(text, work)
    candidates = [*reversed(blocks), *([] if tail is None else [tail]), text]
    # The block that was meant: one that defines the entry point, else the last, be it broken.
    ranks = [
        _rank(_longest(source, entry_point, work), entry_point) if entry_point is None or entry_point in source else 0
        for source in candidates
    ]
    rank = max(ranks)
    block = Lines(candidates[ranks.index(rank)], work)
    tree, error = block.parse(0, len(block))
    if tree is not None or error is None:
        return None
    if prompt is not None and entry_point is not None and not rank:
        if _continue(normalise(prompt), text, entry_point, work) is not None:
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


def place(error: Exception, lines_before: int = 0) -> str:
    """What an error of [`parse_or_error`] says, and at which line and column of a text with so many lines before."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno + lines_before}, column {error.offset or 1}: {error.msg}"
    return str(error)


def combine(*sources: str) -> str:
    """
    One module from several, in order; `from __future__` lines come first, where Python wants them.

    Args:
        *sources (`str`): Code; empty ones are left out.

    Returns:
        `str`: The combination. Names defined later win.
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
            source = _without(source, tree, found)
        rest.append(source.strip("\n"))
    return "\n\n\n".join(part for part in ["\n".join(future), *rest] if part)


def normalise(text: str) -> str:
    """The text with Unix line ends, without byte order marks before lines, and without blank lines around it."""
    text = f"\n{text}".replace("\r\n", "\n").replace("\r", "\n").replace("\n\ufeff", "\n")
    return text.strip("\n").rstrip()


_STARTS = ("@", "#", "(", "[", "{", "*", '"', "'")
"""What code may start with, besides a name."""


def _rank(code: str, entry_point: str | None) -> int:
    """0 if code is not what was asked for, 1 if it is a stub of it, 2 if it is more."""
    if entry_point is None:
        return 2 if code else 0
    found = find(parse(code), entry_point)
    return 0 if found is None else 1 if is_stub(found) else 2


def _candidates(text: str, entry_point: str | None, work: Work) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Texts that may be code, in order of preference, and what reads the code in them."""

    def as_it_is(source: str) -> str:
        lines = Lines(source, work)
        tree, _ = lines.parse(0, len(lines))
        return "" if tree is None else _tidy(source, tree)

    def longest(source: str) -> str:
        return _longest(source, entry_point, work)

    whole = _dedent(text)
    yield whole, as_it_is
    blocks, tail = fences(text, work)
    for block in reversed(blocks):
        yield block, longest
    if tail is not None:
        yield tail, longest
    yield whole, longest


def fences(text: str, work: Work) -> tuple[list[str], str | None]:
    """The complete fenced blocks, and what follows a fence that is never closed. A fence may end the last line of code."""
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
                for attempt in (Lines(block, work), Lines(as_body, work)):
                    tree, error = attempt.parse(0, len(attempt))
                    affordable = tree is not None or error is not None
                    if tree is not None:  # else the fence is in a string
                        blocks.append(block)
                        opened = None
                        break
    return blocks, None if opened is None else _dedent("\n".join(opened))


def _dedent(text: str) -> str:
    """Remove common indentation; text without any stays untouched, blank lines within strings included."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text


def _longest(text: str, entry_point: str | None, work: Work) -> str:
    """The longest run of lines that parses; one that defines the entry point goes before any other, a stub of it last."""
    lines = Lines(text, work)
    pieces = []
    start = 0
    while start < len(lines) and work.left > 0:
        line, end = lines.lines[start], start
        if line[:1].isidentifier() or line.startswith(_STARTS):
            end = lines.longest_end(start)
        if end > start:
            piece = lines.text(start, end)
            tree = parse(piece)
            pieces.append(_tidy(piece, tree) if tree is not None else "")
            if not pieces[-1] and line.startswith(("'", '"')):
                end = start  # a string may hold what is meant
        start = max(end, start + 1)
    return max(pieces, key=lambda piece: (_rank(piece, entry_point), len(piece)), default="")


def _tidy(code: str, tree: ast.Module) -> str:
    """Drop prose that happens to parse ("Sure", "Note: this"): names that would be looked up at load, to no use."""
    prose = {node for node in tree.body if _is_prose(node)}
    kept = [node for node in tree.body if node not in prose]
    if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in kept):
        return ""  # quoted, or what a program prints
    return _without(code, tree, prose).strip("\n").rstrip()


def _is_prose(node: ast.stmt) -> bool:
    """Whether a statement of the top level can have no effect; a docstring is left where it is."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant):
        return False
    acts = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not any(isinstance(leaf, acts) for leaf in ast.walk(node))


def _without(code: str, tree: ast.Module, nodes: Collection[ast.stmt]) -> str:
    """The code without some statements of its top level, unless they share a line with others."""
    if not nodes:
        return code
    kept = {line for node in tree.body if node not in nodes for line in _lines_of(node)}
    dropped = {line for node in nodes for line in _lines_of(node)} - kept
    return "\n".join(line for number, line in enumerate(code.split("\n"), start=1) if number not in dropped)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _head_of(prompt: str) -> str:
    """What stands in a prompt's last fenced block, else all of it."""
    blocks = fences(prompt, Work())[0]
    return blocks[-1] if blocks else prompt


def _continue(prompt: str, text: str, entry_point: str, work: Work) -> str | None:
    """The code of `prompt` continued by a function body, if that defines more than the prompt's stub."""
    blocks, tail = fences(text, work)
    head = _head_of(prompt)
    alone = find(parse(_longest(head, entry_point, Work())), entry_point)
    codes = []
    for body in (text, *blocks[-1:], *([] if tail is None else [tail])):
        lines = Lines(body, work)
        if lines.parse(0, len(lines))[0] is not None:
            continue  # a module of its own
        first_stripped = "    " + body.lstrip()  # chat templates strip the first line's indent and leave the others'
        for candidate in (body, first_stripped, textwrap.indent(textwrap.dedent(body), "    ")):
            code = _longest(f"{head}\n{candidate}", entry_point, work)
            function = find(parse(code), entry_point)
            # A class with stubs for methods is no stub itself: it must have got something
            if function is None or is_stub(function) or (alone is not None and shape(alone) == shape(function)):
                continue
            codes.append(code)
    return max(codes, key=lambda code: code.count("\n"), default=None)


def _supply(code: str, prompt: str, entry_point: str | None) -> str:
    """Put the prompt's imports and helpers before code that lacks them."""
    context, tree = parse(_longest(_head_of(prompt), entry_point, Work())), parse(code)
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


# Predicates


def top_level(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that bind names of the module: its body, with `if`, `try` and the like opened."""
    pending = [*ast.iter_child_nodes(node)][::-1]  # `elif` nests, too deep for recursion
    while pending:
        child = pending.pop()
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            pending += [*ast.iter_child_nodes(child)][::-1]


def shape(tree: ast.AST) -> tuple:
    """What is equal for code that differs in layout and comments only; `ast.dump` would recurse."""

    def mark(value: object) -> tuple:
        if isinstance(value, list):
            return tuple(map(mark, value))
        return (ast.AST,) if isinstance(value, ast.AST) else (type(value), value)

    return tuple((type(node), *(mark(value) for _, value in ast.iter_fields(node))) for node in ast.walk(tree))


def find(tree: ast.Module | None, name: str) -> Function | ast.ClassDef | ast.expr | None:
    """What defines a name at the top level; the last definition wins, as it does in Python."""
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


def _scope(function: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes without those of functions and classes inside it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def statements(function: Function) -> list[ast.stmt]:
    """A function's body without its docstring; a lambda's as a `return`."""
    if isinstance(function, ast.Lambda):
        return [ast.Return(value=function.body)]
    match function.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return function.body


def is_stub(function: ast.AST) -> bool:
    """Whether a function's body does nothing: a docstring, `pass`, `...`, definitions that nothing uses."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    idle = (ast.Pass, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return all(
        isinstance(node, idle) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def defines(code: str, name: str) -> bool:
    """
    Whether code binds a name at its top level, by `def`, `class` or assignment.

    Args:
        code (`str`): Source text.
        name (`str`): Name.

    Returns:
        `bool`: `False` also if the code does not parse.
    """
    return find(parse(code), name) is not None


def returns_value(code: str, name: str) -> bool:
    """
    Whether code defines a function that can return something other than `None` (or yields).

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.

    Returns:
        `bool`: `False` if there is no such function. `return` in a function nested inside it does not count.
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


def _reached(tree: ast.Module | None, name: str, stop: str) -> list[Function]:
    """The function `name` and the module's functions that it uses, directly or through others, `stop` excluded."""
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
    """The calls of `helper`, or of something that is handed `helper` as an argument, unless the name is local here."""
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
    Whether a function calls a helper, itself or through other functions of the code; handing it to a call
    (`map(aux, xs)`) counts.

    Args:
        code (`str`): Source text.
        name (`str`): Name of the function.
        helper (`str`, *optional*, defaults to `"aux"`): Name of the helper.

    Returns:
        `bool`: `False` where the name is a parameter or a local variable.
    """
    return any(_uses(function, helper) for function in _reached(parse(code), name, helper))


def is_thin_wrapper(code: str, name: str, helper: str = "aux") -> bool:
    """
    Whether a function does nothing but return what a helper returns: `return aux(x, y)`, or `r = aux(x)` and `return r`.

    Arguments that are computed (`aux(sorted(x))`) are work of its own. A function that only calls another such function is
    thin too.

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
    """The name of the function whose result is returned as it is, if that is all that happens."""
    body = statements(function)
    match body:
        case [ast.Return(value=ast.Call() as call)]:
            pass
        case [
            ast.Assign(targets=[ast.Name(id=stored)], value=ast.Call() as call),
            ast.Return(value=ast.Name(id=read)),
        ]:
            if stored != read:
                return None
        case [
            ast.AnnAssign(target=ast.Name(id=stored), value=ast.Call() as call),
            ast.Return(value=ast.Name(id=read)),
        ]:
            if stored != read:
                return None
        case _:
            return None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    plain = (ast.Name, ast.Constant, ast.Attribute, ast.Starred, ast.Tuple, ast.List, ast.expr_context)
    if isinstance(call.func, ast.Name) and all(isinstance(n, plain) for a in arguments for n in ast.walk(a)):
        return call.func.id
    return None


def ignores_result(code: str, name: str, helper: str = "aux") -> bool:
    """
    Whether a function calls a helper and uses no result of it: every call is a statement of its own or is assigned to
    variables that are never read.

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
