"""Turns chat messages into the text that a model reads, whatever its chat template accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from marcog_trl.parsing.prompts import ChatRequest, Prompt


_PROBE = "ec2c7a1f"  # occurs in no chat template


def with_system_prompt(prompt: Prompt, system_prompt: str | None) -> Prompt:
    """
    Begin a chat with a system message, unless it has one. Plain text has no messages, and stays as it is.

    Args:
        prompt (`str` or `list[dict[str, str]]`): The prompt.
        system_prompt (`str`, *optional*): The content of the message.

    Returns:
        `str` or `list[dict[str, str]]`: The prompt.
    """
    if system_prompt is None or isinstance(prompt, str) or any(message["role"] == "system" for message in prompt):
        return prompt
    chat = [{"role": "system", "content": system_prompt}, *prompt]
    return ChatRequest(chat, prompt.tools, prompt.max_tokens) if isinstance(prompt, ChatRequest) else chat


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """
    Join chat messages to plain text that a model without a chat template continues with a reply.

    Args:
        messages (`list[dict]`): Chat messages.

    Returns:
        `str`: The contents with blank lines between. Replies begin with `Answer:`, and so does the one to come.
    """
    begins = {"assistant": "Answer:\n"}
    parts = [begins.get(message["role"], "") + message["content"] for message in messages]
    return "\n\n".join([*parts, begins["assistant"]])


def render(processing_class: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """
    Apply a chat template. If it refuses or drops system messages, the first message of the user begins with their text.

    Args:
        processing_class (`PreTrainedTokenizerBase`): A tokenizer with a chat template.
        messages (`list[dict]`): Chat messages.
        options: Arguments of `apply_chat_template`.

    Returns:
        `str`: The text.

    Raises:
        ValueError: If the template refuses the messages.
    """
    if any(message["role"] == "system" for message in messages) and not _takes_system(processing_class, options):
        messages = _without_system(messages)
    try:
        return processing_class.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"the chat template of the tokenizer refuses messages with the roles {roles}: {str(error).rstrip('.!')}. Use roles "
            "that it accepts, such as 'user' and 'assistant' in turn, and put neighbouring messages of one role into one message"
        ) from error


def _takes_system(processing_class: Any, options: Mapping[str, Any]) -> bool:
    chat = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}]
    try:
        return _PROBE in processing_class.apply_chat_template(chat, tokenize=False, **options)
    except TemplateError:
        return False


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Moves the text of system messages to the beginning of the user's first message."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    first = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [*messages]
    told = "\n\n".join([*system, others[first]["content"]])
    return [*others[:first], {**others[first], "content": told}, *others[first + 1 :]]


def end_of_turn(processing_class: Any, options: Mapping[str, Any]) -> int | None:
    """
    The special token that the chat template puts after a reply.

    Args:
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        options (`Mapping`): Arguments of the chat template.

    Returns:
        `int`, *optional*: The token's id. `None` without a chat template, or if it puts no special token there.
    """
    if not processing_class.chat_template:
        return None
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = processing_class.apply_chat_template(chat, tokenize=False, **options)
    except TemplateError:  # a template for one question
        return None
    after = text.partition(_PROBE)[2].lstrip()
    special = {token.content: i for i, token in processing_class.added_tokens_decoder.items() if token.special}
    return special.get(max(filter(after.startswith, special), key=len, default=""))
