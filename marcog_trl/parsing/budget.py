"""Parses a text piece by piece within a budget, so that a hostile reply cannot take long to read."""

import ast
import itertools
import re
from bisect import bisect_right
from functools import lru_cache

from marcog_trl.parsing.syntax import parse_or_error


_BUDGET = 40_000
"""Tokens that may be parsed in order to read one reply. A reply of 64 KiB has 10,000 to 20,000 tokens of code."""
_COST_PER_PARSE = 30
_COST_PER_SCOPE = 40
_CHARACTERS_PER_TOKEN = 32
"""An attempt to parse has a cost even if it fails early, because Python looks at every character."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_SCOPE = re.compile(r"\b(?:def|class|lambda|for)\b")
_AT_ITS_PLACE = ("invalid syntax", "unexpected indent", "unindent does not match any outer indentation level")
"""Errors that Python reports at the token where it stopped reading. Other errors may point to an earlier place."""
_PROBE = 16
"""Number of lines of a long text that are parsed first."""


@lru_cache(maxsize=4096)
def _cost_of(line: str) -> int:
    return 1 + len(_TOKEN.findall(line)) + _COST_PER_SCOPE * len(_SCOPE.findall(line))


class Budget:
    """How many more tokens may be parsed to read one reply. All parts of a reply share one budget."""

    def __init__(self) -> None:
        self.left = _BUDGET


class Lines:
    """
    A text that is parsed piece by piece, until the budget is spent.

    Args:
        text (`str`): The text.
        budget ([`Budget`]): Budget of the reply that the text belongs to.
    """

    def __init__(self, text: str, budget: Budget):
        self.lines = text.split("\n")
        self.budget = budget
        self._before = [0, *itertools.accumulate(map(_cost_of, self.lines))]
        self._characters = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, start: int, end: int, head: str = "") -> str:
        """Lines `start` to `end`, after `head`, which must end with a newline."""
        return head + "\n".join(self.lines[start:end])

    def _cost(self, start: int, end: int, read: int) -> int:
        """Cost of parsing `lines[start:end]` if Python stops reading at line `read`."""
        characters = self._characters[end] - self._characters[start]
        return _COST_PER_PARSE + characters // _CHARACTERS_PER_TOKEN + self._before[read] - self._before[start]

    def parse(self, start: int, end: int, head: str = "") -> tuple[ast.Module | None, Exception | None]:
        """[`parse_or_error`] of `lines[start:end]`; `(None, None)` if the budget does not allow it."""
        if self._cost(start, end, end) > self.budget.left:
            return None, None
        tree, error = parse_or_error(self.text(start, end, head))
        read = end
        if isinstance(error, SyntaxError) and error.msg in _AT_ITS_PLACE and error.lineno is not None:
            read = min(end, start + max(0, error.lineno - head.count("\n")))
        self.budget.left -= self._cost(start, end, read)
        return tree, error

    def longest_end(self, start: int, head: str = "") -> int:
        """
        The last `end` such that `lines[start:end]` parses. If a text has an error at some line, then no longer text parses
        either, so each attempt ends at the line before the error. If the text is nested too deeply, its first half is tried.
        """
        end = len(self)
        if end - start > _PROBE:
            error = self.parse(start, start + _PROBE, head)[1]
            if isinstance(error, SyntaxError) and error.msg in _AT_ITS_PLACE and error.lineno is not None:
                line = error.lineno - head.count("\n")
                end = start + line - 1 if line < _PROBE else end
        while end > start:
            reach = range(start, end + 1)
            end = start + bisect_right(reach, self.budget.left, key=lambda line: self._cost(start, line, line)) - 1
            if end <= start:  # the budget does not even allow one line
                self.budget.left = 0
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
