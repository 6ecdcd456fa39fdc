"""Reads replies to a problem: the problem says what to look for, and may hold code that the reply continues or uses."""

from collections.abc import Mapping
from typing import Any

from marcog_trl.parsing.extract import extract_code, syntax_error
from marcog_trl.parsing.prompts import context_of


def code_in(problem: Mapping[str, Any], reply: str, name: str | None = None, names: tuple[str, ...] = ()) -> str:
    """
    Extract the code of a reply with [`~marcog_trl.parsing.extract.extract_code`].

    Args:
        problem (`Mapping`): One dataset row.
        reply (`str`): The reply.
        name (`str`, *optional*): Function or class to look for; a program if `""`. Defaults to the problem's `entry_point`.
        names (`tuple[str, ...]`, *optional*): Other names that the tests use.

    Returns:
        `str`: Code that parses, or `""`.
    """
    return extract_code(reply, problem.get("entry_point") if name is None else name, context_of(problem), names)


def error_in(problem: Mapping[str, Any], reply: str, name: str | None = None) -> str | None:
    """
    Find the syntax error in the code of a reply with [`~marcog_trl.parsing.extract.syntax_error`].

    Args:
        problem, reply, name: See [`code_in`].

    Returns:
        `str` or `None`: The error with its line and column; `None` if there is none.
    """
    return syntax_error(reply, problem.get("entry_point") if name is None else name, context_of(problem))
