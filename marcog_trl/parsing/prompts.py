"""The text of prompts, which may be plain text or chat messages."""

from collections.abc import Mapping
from typing import Any


Prompt = str | list[dict[str, str]]
"""Plain text, or chat messages with the keys `role` and `content`."""


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
