"""The text of prompts, which may be plain text or chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.syntax import Function, find, parse


Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages with the keys `role` and `content`."""


class ChatRequest(list):
    """
    Chat messages of a program, and what else it asks for.

    Args:
        messages (`list[dict]`): The messages.
        tools (`list[dict]`, *optional*): JSON schemas of tools that the program runs, as chat templates describe them.
        max_tokens (`int`, *optional*): Tokens after which the reply is cut off.
    """

    def __init__(
        self,
        messages: Iterable[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
    ):
        super().__init__(messages)
        self.tools = tools
        self.max_tokens = max_tokens

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.tools} {self.max_tokens}"


class ChatReply(str):
    """
    The text of a reply to a program, and what else it is told.

    Args:
        text (`str`): The text beside calls of tools.
        calls (`Sequence[dict]`, *optional*): The calls, in the format of chat templates.
        prompt_tokens, completion_tokens (`int`, *optional*, defaults to `0`): What the model read and wrote.
        truncated (`bool`, *optional*, defaults to `False`): Whether the reply was cut off.
        reasoning (`str`, *optional*): What the model thought before the text, if the two are told apart.
    """

    calls: Sequence[dict[str, Any]]
    prompt_tokens: int
    completion_tokens: int
    truncated: bool
    reasoning: str | None

    def __new__(
        cls,
        text: str,
        calls: Sequence[dict[str, Any]] = (),
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        truncated: bool = False,
        reasoning: str | None = None,
    ) -> ChatReply:
        made = super().__new__(cls, text)
        made.calls, made.truncated, made.reasoning = calls, truncated, reasoning
        made.prompt_tokens, made.completion_tokens = prompt_tokens, completion_tokens
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return str(self), self.calls, self.prompt_tokens, self.completion_tokens, self.truncated, self.reasoning


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
