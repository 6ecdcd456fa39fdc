"""The text of prompts, which may be plain text or chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.syntax import Function, find, parse


Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages with the keys `role` and `content`."""


class ToolChat(list):
    """
    Chat messages of an agent that may answer with calls of tools, which whoever asked it runs.

    Args:
        messages (`list[dict]`): The messages.
        tools (`list[dict]`): JSON schemas of the tools, as chat templates describe them.
    """

    def __init__(self, messages: Iterable[dict[str, Any]], tools: list[dict[str, Any]]):
        super().__init__(messages)
        self.tools = tools

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.tools}"


class ToolCalls(str):
    """
    The text of a reply that calls tools.

    Args:
        text (`str`): The text beside the calls.
        calls (`list[dict]`): The calls, in the format of chat templates.
    """

    calls: list[dict[str, Any]]

    def __new__(cls, text: str, calls: list[dict[str, Any]]) -> ToolCalls:
        made = super().__new__(cls, text)
        made.calls = calls
        return made

    def __getnewargs__(self) -> tuple[str, list[dict[str, Any]]]:  # type: ignore[override]
        return str(self), self.calls


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """A prompt as chat messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def context_of(problem: Mapping[str, Any]) -> str:
    """
    The text of a problem that may hold code that solutions continue or use.

    Args:
        problem (`Mapping`): One dataset row.

    Returns:
        `str`: Its `starter_code`, else the text of its prompt.
    """
    return problem.get("starter_code") or messages_of(problem["prompt"])[-1]["content"]


def fill(text: str, problem: Mapping[str, Any]) -> str:
    """
    Fill in what a text says about the function that a problem asks for.

    Args:
        text (`str`): Text with `{entry_point}` and `{arguments}`, such as `"Write {entry_point}({arguments})."`.
        problem (`Mapping`): One dataset row.

    Returns:
        `str`: The text with the name of the function, and with its arguments, without types and defaults. They are `...` if
        the problem does not declare the function.
    """
    if "{arguments}" in text:
        text = text.replace("{arguments}", _arguments(context_of(problem), problem.get("entry_point") or ""))
    return text.replace("{entry_point}", problem.get("entry_point") or "the solution")


@lru_cache(maxsize=4096)
def _arguments(context: str, name: str) -> str:
    function = find(parse(extract_code(context, name)), name)
    if not isinstance(function, Function):
        return "..."
    found = function.args
    names = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    names += [f"*{found.vararg.arg}"] if found.vararg else []
    names += [f"{argument.arg}={argument.arg}" for argument in found.kwonlyargs]
    return ", ".join(names + ([f"**{found.kwarg.arg}"] if found.kwarg else []))
