"""
Reads the markup of a reply: thoughts, special tokens, and the fences around code.

Each text is scanned from left to right, in time that grows with its length only.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from html import unescape


_THOUGHTS = re.compile(
    r"^[ \t]*<(think|thinking|thoughts?|reasoning|scratchpad)>.*?(?:</\1>[ \t]*|\Z)"
    r"|^[ \t]*\[THINK\].*?(?:\[/THINK\][ \t]*|\Z)"
    r"|^[ \t]*◁think▷.*?(?:◁/think▷[ \t]*|\Z)"
    r"|^[ \t]*<\|begin_of_thought\|>.*?(?:<\|end_of_thought\|>[ \t]*|\Z)",
    re.MULTILINE | re.DOTALL,
)
_MARKED_THOUGHT = re.compile(
    r"<(?:think|thinking|thoughts?|reasoning|scratchpad)>|\[THINK\]|◁think▷|<\|begin_of_thought\|>"
)
_END_OF_THOUGHTS = re.compile(
    r"(?<![\"'`])(?:</(?:think|thinking|thoughts?|reasoning|scratchpad)>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>)(?![\"'`])"
)
_ANSWER_CHANNEL = re.compile(r"<\|channel\|>final[^<\n]*<\|message\|>")
_FIRST_TOKENS = re.compile(
    r"\A(?:\s*(?:<[|｜][^|｜<>\n]{1,40}[|｜]>|<s>|<bos>|<start_of_turn>|\[/INST\])(?:assistant|model)?[ \t]*+)+\n*"
)
_END_TOKEN = re.compile(
    r"(?:<[|｜](?:end(?!_header)[^|｜<>\n]{0,30}|im_end|eo[stm](?:_id|_token)?|return)[|｜]>|</s>|<eos>|<pad>|<(?:end_of_turn|end_of_utterance|EOT)>)"
    r"(?![\"'`])",
    re.IGNORECASE,
)
_OPEN_QUOTE = re.compile(r"(?:^|\W)[bfruBFRU]{0,2}'[^']*$")
"""A quote, rather than the apostrophe of "don't"."""


def normalise(text: str) -> str:
    """
    The text of a reply, without what a model thinks before it answers, without special tokens at its start and whatever follows a
    token that ends it, with Unix line ends, without byte order marks, and without blank lines at its start and end.
    """
    text = _FIRST_TOKENS.sub("", unix_lines(text))
    *_, text = _ANSWER_CHANNEL.split(text)
    text = _THOUGHTS.sub("", text)
    thoughts = next((m for m in _END_OF_THOUGHTS.finditer(text) if not _is_quoted(text, m)), None)
    if thoughts is not None and _MARKED_THOUGHT.search(text, 0, thoughts.start()) is None:
        text = text[thoughts.end() :].lstrip(" \t")  # the template of the chat has begun them
    end = next((m for m in _END_TOKEN.finditer(text) if not _is_quoted(text, m)), None)
    text = text if end is None else text[: end.start()]
    return text.strip("\n").rstrip()


def unix_lines(text: str) -> str:
    """The text with Unix line ends, without byte order marks, and without blank lines at its start and end."""
    text = f"\n{text}".replace("\r\n", "\n").replace("\r", "\n").replace("\n\ufeff", "\n")
    return text.strip("\n").rstrip()


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Whether a mark lies in a string of one line: a quote is open before it, and its line goes on."""
    before = text[max(0, mark.start() - 1000) : mark.start()].rpartition("\n")[2]
    goes_on = text[mark.end() : mark.end() + 40].partition("\n")[0].strip()
    is_open = before.count('"') % 2 or _OPEN_QUOTE.search(before)
    in_code = before.endswith("`") and not before.endswith("```")
    return in_code or before[-1:] in ("'", '"') or bool(goes_on and is_open)


@dataclass(frozen=True)
class Block:
    """
    A fenced block of a reply.

    Attributes:
        text (`str`): What is between the fences, without the indentation and the marks of quotes that all its lines share.
        language (`str`): Language of the fence, in lower case; `""` if it has none.
        closed (`bool`): Whether a fence follows it.
    """

    text: str
    language: str
    closed: bool

    @property
    def is_foreign(self) -> bool:
        """Whether its fence names a language other than Python."""
        return bool(self.language) and "py" not in self.language


_FENCE = r"(?:(?<!`)`{3,}+|(?<!~)~{3,}+)"
_TAG = r"(?:code|pre|answer|solution|python)\b[^<>\n]{0,80}>"
_OPENER = re.compile(
    rf"(?P<fence>(?<![\"'`\\])(?<!\\n)`{{3,}}+(?![\"'`])|^[ \t>]*~{{3,}}+)|<{_TAG}|\[(?:PYTHON|CODE|ANSWER)\]",
    re.MULTILINE,
)
_TEXT = r"""(?P<triple>\"{3}|'{3})|"(?:\\[^\n]|[^"\\\n])*"|'(?:\\[^\n]|[^'\\\n])*'|["'#][^\n]*"""
"""Strings and comments. A quote that is not closed in its line is an apostrophe, or a mistake."""
_IN_FENCE = re.compile(rf"(?P<end>^[ \t>]*{_FENCE}|{_FENCE}[ \t]*$)|{_TEXT}", re.MULTILINE)
_IN_TAG = re.compile(rf"(?P<end>^[ \t>]*{_FENCE}|</?{_TAG}|\[/?(?:PYTHON|CODE|ANSWER)\])|{_TEXT}", re.MULTILINE)
_END_OF_TRIPLE = {quote: re.compile(rf"(?:\\.|[^\\])*?{quote}", re.DOTALL) for quote in ('"""', "'''")}
_IN_LINE = re.compile(r"[^\n]*?(?<![\"'`])(?P<end>`{3,}+)(?![\"'`])")
_PYTHON = re.compile(r"[ \t]*[pP]y(?:thon)?3?[ \t]+")
_CODE = re.compile(r"[ \t]*(?:(?:async|class|def|for|from|if|import|try|while|with)\b|[@#]|\w[\w.]*\(|\w+ = )")
"""Code in the line of the fence that opens it."""
_NAME = re.compile(r"[ \t]*\{?\.?(?P<language>[\w+#-]*)[^\n]*\n?")
_NAME_ALONE = re.compile(r"[ \t]*[\w+#.-]+[ \t]*$", re.MULTILINE)
_MARGIN = re.compile(r"(?P<quotes>(?:[ \t]*>[ \t]?)*)(?P<indent>[ \t]*(?:(?:[-*+•]|\d+[.)])[ \t]+)*)")


def blocks_of(text: str) -> list[Block]:
    """
    The fenced blocks of a text: between fences of backticks or tildes (also after words or the mark of a list, and within a line), and
    in the tags `<code>`, `<pre>`, `<answer>`, `<solution>`, `<python>`, and `[PYTHON]`. A fence in a string of the code is none. A fence
    that names a language opens a block, also where another is open.

    Args:
        text (`str`): The text, as [`normalise`] returns it.

    Returns:
        `list[Block]`: In order; the last one may not be closed.
    """
    found: list[Block] = []
    endless: set[str] = set()
    opener = _OPENER.search(text)
    while opener is not None:
        language, start = _first_line(text, opener)
        inner = _IN_FENCE if opener["fence"] else _IN_TAG
        in_line = _IN_LINE.match(text, start) if opener["fence"] and "\n" not in text[opener.end() : start] else None
        end = in_line or _end_of_block(text, start, inner, endless)
        stop = len(text) if end is None else end.start("end")
        block = _without_margin(text, opener, text[start:stop])
        is_html = opener[0].startswith(("<code", "<pre"))
        found.append(Block(unescape(block) if is_html else block, language, end is not None))
        if end is None:
            break
        opens_another = inner is _IN_TAG or (end.re is _IN_FENCE and _NAME_ALONE.match(text, end.end()))
        opener = _OPENER.search(text, stop if opens_another else end.end())
    return found


def _first_line(text: str, opener: re.Match[str]) -> tuple[str, int]:
    """The language that a fence names, and where its block begins: in its line if that has code, else in the next one."""
    if not opener["fence"]:
        return "", opener.end()
    python = _PYTHON.match(text, opener.end())
    begin = opener.end() if python is None else python.end()
    if _CODE.match(text, begin) or _IN_LINE.match(text, opener.end()):
        return "", begin
    name = _NAME.match(text, opener.end())
    assert name is not None  # it matches any text
    return name["language"].lower(), name.end()


def _end_of_block(text: str, start: int, inner: re.Pattern[str], endless: set[str]) -> re.Match[str] | None:
    """The fence or tag that ends a block. Quotes of strings that no later quote ends are added to `endless`."""
    mark = inner.search(text, start)
    while mark is not None and mark["end"] is None:
        place = mark.end()
        quote = mark["triple"]
        if quote is not None:
            end = None if quote in endless else _END_OF_TRIPLE[quote].match(text, place)
            if end is None:
                endless.add(quote)
                newline = text.find("\n", place)
                place = len(text) if newline < 0 else newline
            else:
                place = end.end()
        mark = inner.search(text, place)
    return mark


def _without_margin(text: str, opener: re.Match[str], block: str) -> str:
    """A block without the marks of a quote, and without the indentation of its fence or of all its lines."""
    margin = _MARGIN.match(text, text.rfind("\n", 0, opener.end()) + 1, opener.end())
    assert margin is not None  # it matches any text
    block = block.removesuffix("\n")
    quotes, indent = min(9, margin["quotes"].count(">")), min(40, len(margin["indent"]))
    if quotes:
        block = re.sub(rf"(?m)^(?:[ \t]*>[ \t]?){{1,{quotes}}}", "", block)
    if indent and block.lstrip("\n")[:1].isspace():
        block = re.sub(rf"(?m)^[ \t]{{1,{indent}}}", "", block)
    return dedent(block)


def dedent(text: str) -> str:
    """Remove common indentation. A text without any stays as it is, blank lines in strings included."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text
