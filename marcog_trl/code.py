"""
Reads Python out of what a model wrote, and judges it on the syntax tree.

Nothing here runs code, and nothing here knows of tests, agents or training.
"""

import ast
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
PARSES_PER_TEXT = 300
"""A completion is cut into parsable pieces with at most so many attempts, so that a hostile one costs bounded time."""


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
            compile(tree, "<completion>", "exec", dont_inherit=True)
        return tree, None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, surrogates, deep nesting
        return None, error.with_traceback(None)


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
    text, entry_point = normalise(text), entry_point or None
    pieces: list[str] = []
    code, best = None, 0
    for piece in _candidates(text, entry_point):
        pieces.append(piece)
        rank = _rank(piece, entry_point)
        if rank > best:
            code, best = piece, rank
        if rank == 2:
            break
    if code is None and prompt is not None and entry_point is not None:
        code = _continue(normalise(prompt), text, entry_point)
    if code is None:
        code = max(pieces, key=len, default="")
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
    text, entry_point = normalise(text), entry_point or None
    blocks, tail = fences(text)
    candidates = [*reversed(blocks), *([] if tail is None else [tail]), text]
    # The block that was meant: one that defines the entry point, else the last, be it broken.
    block = max(candidates, key=lambda c: _rank(_longest(c, entry_point), entry_point))
    error = parse_or_error(block)[1]
    if error is None:
        return None
    if prompt is not None and entry_point is not None and not _rank(_longest(block, entry_point), entry_point):
        if _continue(normalise(prompt), text, entry_point) is not None:
            return None
    lines = block.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "async def ", "class "))]
    named = [i for i in starts if entry_point in lines[i].replace("(", " ").replace(":", " ").split()]
    if not starts:  # prose, unless a fence says that it is code
        return None if block is text else place(error)
    start = (named or starts)[-1]
    end = longest_end(lines, start, len(lines), [PARSES_PER_TEXT])
    rest = [line for line in lines[end:] if line.strip()]
    if end > start and not (rest and rest[0][0].isspace()):
        return None
    error = parse_or_error("\n".join(lines[start:]))[1]
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
            found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
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


def _candidates(text: str, entry_point: str | None) -> Iterator[str]:
    """Pieces of code in order of preference."""
    whole = _dedent(text)
    tree = parse(whole)
    if tree is not None:
        yield _tidy(whole, tree)
    blocks, tail = fences(text)
    for block in reversed(blocks):
        yield _longest(block, entry_point)
    if tail is not None:
        yield _longest(tail, entry_point)
    yield _longest(whole, entry_point)


def fences(text: str) -> tuple[list[str], str | None]:
    """The complete fenced blocks, and what follows a fence that is never closed. A fence may end the last line of code."""
    blocks: list[str] = []
    budget = PARSES_PER_TEXT
    opened: list[str] | None = None
    indent = 0
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
            if last.endswith("```") and last.count("```") % 2 and content[0] != "#" and budget:
                budget -= 1
                block = _dedent("\n".join([*opened[:-1], last.removesuffix("```")]))
                as_body = f"def body():\n{textwrap.indent(block, '    ')}"
                if parse(block) is not None or parse(as_body) is not None:  # else the fence is in a string
                    blocks.append(block)
                    opened = None
    return blocks, None if opened is None else _dedent("\n".join(opened))


def _dedent(text: str) -> str:
    """Remove common indentation; text without any stays untouched, blank lines within strings included."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text


def _longest(text: str, entry_point: str | None) -> str:
    """The longest run of lines that parses; one that defines the entry point goes before any other, a stub of it last."""
    lines = text.split("\n")
    budget = [PARSES_PER_TEXT]
    pieces = []
    start = 0
    while start < len(lines):
        end = start
        if lines[start][:1].isidentifier() or lines[start].startswith(_STARTS):
            end = longest_end(lines, start, len(lines), budget)
        if end > start:
            piece = "\n".join(lines[start:end])
            tree = parse(piece)
            pieces.append(_tidy(piece, tree) if tree is not None else "")
            if not pieces[-1] and lines[start].startswith(("'", '"')):
                end = start  # a string may hold what is meant
        start = max(end, start + 1)
    return max(pieces, key=lambda piece: (_rank(piece, entry_point), len(piece)), default="")


def longest_end(lines: list[str], start: int, end: int, budget: list[int]) -> int:
    """
    The last `end` such that `lines[start:end]` parses. An error at a line means that no longer text parses either, so each
    attempt jumps to the line before the error. Of what is nested too deep, the first half is tried.
    """
    while end > start and budget[0] > 0:
        budget[0] -= 1
        error = parse_or_error("\n".join(lines[start:end]))[1]
        if error is None:
            return end
        if isinstance(error, RecursionError | MemoryError):
            end = (start + end) // 2
            continue
        lineno = error.lineno if isinstance(error, SyntaxError) else None
        end = min(end - 1, start + lineno - 1 if lineno else end - 1)
    return start


def _tidy(code: str, tree: ast.Module) -> str:
    """Drop prose that happens to parse ("Sure", "Note: this"): names that would be looked up at load, to no use."""
    prose = [node for node in tree.body if _is_prose(node)]
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


def _without(code: str, tree: ast.Module, nodes: Sequence[ast.stmt]) -> str:
    """The code without some statements of its top level, unless they share a line with others."""
    if not nodes:
        return code
    kept = {line for node in tree.body if node not in nodes for line in _lines_of(node)}
    dropped = {line for node in nodes for line in _lines_of(node)} - kept
    return "\n".join(line for number, line in enumerate(code.split("\n"), start=1) if number not in dropped)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _continue(prompt: str, text: str, entry_point: str) -> str | None:
    """The code of `prompt` continued by a function body, if that defines more than the prompt's stub."""
    blocks, tail = fences(text)
    head = fences(prompt)[0][-1] if fences(prompt)[0] else prompt
    alone = find(parse(_longest(head, entry_point)), entry_point)
    codes = []
    for body in (text, *blocks[-1:], *([] if tail is None else [tail])):
        if parse(body) is not None:
            continue  # a module of its own
        first_stripped = "    " + body.lstrip()  # chat templates strip the first line's indent and leave the others'
        for candidate in (body, first_stripped, textwrap.indent(textwrap.dedent(body), "    ")):
            code = _longest(f"{head}\n{candidate}", entry_point)
            function = find(parse(code), entry_point)
            # A class with stubs for methods is no stub itself: it must have got something
            if function is None or is_stub(function) or (alone is not None and shape(alone) == shape(function)):
                continue
            codes.append(code)
    return max(codes, key=lambda code: code.count("\n"), default=None)


def _supply(code: str, prompt: str, entry_point: str | None) -> str:
    """Put the prompt's imports and helpers before code that lacks them."""
    source = fences(prompt)[0][-1] if fences(prompt)[0] else prompt
    context, tree = parse(_longest(source, entry_point)), parse(code)
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
