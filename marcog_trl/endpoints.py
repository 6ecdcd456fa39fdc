"""
Language models behind OpenAI-compatible chat-completions endpoints: the client of agents that are not the team's own model, and
of the expert of `feedback="expert_edits"`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from marcog_trl.checks import Count, NaturalNumber, NotNegative, Positive, check_fields


if TYPE_CHECKING:
    import openai


Chat = list[dict[str, str]]


class EndpointError(RuntimeError):
    """Raised if the endpoint of an agent does not answer."""


@dataclass(frozen=True)
class Endpoint:
    """
    A model behind an OpenAI-compatible chat-completions endpoint.

    Args:
        model (`str`): The model's name at the endpoint.
        base_url (`str`, *optional*): URL of the endpoint, such as `http://localhost:8000/v1`. Defaults to the environment
            variable `OPENAI_BASE_URL`, else to OpenAI's endpoint.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`): Environment variable that holds the key. If the
            endpoint needs no key, set it to any text.
        timeout (`float`, *optional*, defaults to `60.0`): Seconds to wait for the endpoint, per attempt.
        max_retries (`int`, *optional*, defaults to `3`): Maximum number of retries after a connection error, a timeout or
            the status 408, 409, 429 or 5xx. `openai` waits before a retry: half a second, then twice as long each time, or
            as long as `Retry-After` says.
        concurrency (`int`, *optional*, defaults to `8`): Requests that a process sends at the same time.
        max_tokens (`int`, *optional*, defaults to `512`): Maximum length of an answer, in tokens of the endpoint's model.
        temperature (`float`, *optional*, defaults to `0.0`): Sampling temperature.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: Positive = 60.0
    max_retries: NaturalNumber = 3
    concurrency: Count = 8
    max_tokens: Count = 512
    temperature: NotNegative = 0.0

    def check(self) -> None:
        """
        Check the settings and the environment, without sending anything.

        Raises:
            ImportError: If `openai` is not installed.
            ValueError: If `model` or the environment variable of the key is empty, the key or `base_url` is invalid, or
                a number is out of range.
        """
        for name, example in (("model", "gpt-4o-mini"), ("api_key_env", "OPENAI_API_KEY")):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}={value!r} is not a name. Set {name}={example!r}, for example.")
        check_fields(self)
        url = EndpointClient(self).openai.base_url
        if url.userinfo or url.query:
            raise ValueError(
                f"base_url contains a user, a password or a query. Put the key into the environment variable "
                f"{self.api_key_env}."
            )
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url='{url}' is not a URL. Set base_url='http://localhost:8000/v1', for example.")


@dataclass(frozen=True)
class Completion:
    """
    The answer of an endpoint to one prompt.

    Args:
        text (`str`): The answer; empty if there is none.
        error (`Exception`, *optional*): Why there is no answer.
        prompt_tokens, completion_tokens (`int`): Tokens that the endpoint counted; 0 if it does not say.
        truncated (`bool`): Whether the answer was cut off at `max_tokens`.
        seconds (`float`): Time until the answer, with retries.
        sent (`bool`): Whether a request was sent. Equal prompts may share one, and none is sent to an endpoint that is down.
    """

    text: str = ""
    error: Exception | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    seconds: float = 0.0
    sent: bool = True


class EndpointClient:
    """
    Sends requests to an endpoint, many at the same time.

    If all requests that are sent first fail with a connection error, a timeout or a server error, the endpoint counts as
    down: the other requests are not sent, and the next call tries a single one first, without retries.

    Args:
        endpoint ([`Endpoint`]): The endpoint.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._is_down = False

    def ask(self, chats: Sequence[Chat], share_equal: bool) -> list[Completion]:
        """
        Get one answer per chat.

        Args:
            chats (`Sequence[list[dict]]` of length C): Chat messages.
            share_equal (`bool`): Whether equal chats are sent once, and share the answer.

        Returns:
            `list[Completion]` of length C, in order.
        """
        if not chats:
            return []
        if not share_equal:
            return self._ask_all(chats)
        keys = [json.dumps(chat) for chat in chats]
        different = dict(zip(keys, chats, strict=True))
        answers = dict(zip(different, self._ask_all(list(different.values())), strict=True))
        completions = []
        for key in keys:
            completions.append(answers[key])
            answers[key] = replace(answers[key], sent=False)
        return completions

    def describe(self, who: str, errors: Sequence[Exception], asked: int, then: str) -> str:
        """
        Text that says what failed, without the key, which endpoints may repeat in their answers.

        Args:
            who (`str`): Who did not answer, such as `"The expert"`.
            errors (`Sequence[Exception]`): What was raised; at least one.
            asked (`int`): Number of questions.
            then (`str`): A sentence on what follows.
        """
        reasons = (f"{type(error).__name__}: {error}" for error in (errors[0], errors[0].__cause__) if error)
        cause = " ".join(" from ".join(reasons).replace(self.openai.api_key, "***").split())
        return (
            f"{who} (model={self.endpoint.model!r}, base_url='{self.openai.base_url}') did not answer {len(errors)} of "
            f"{asked} questions. {then} The first error: {cause:.500}"
        )

    def _ask_all(self, chats: Sequence[Chat]) -> list[Completion]:
        import openai

        # A few go first, so that not all of them wait for an endpoint that is down
        client, n_first = self.openai, self.endpoint.concurrency
        if self._is_down:
            client, n_first = client.with_options(max_retries=0), 1
        first, others = chats[:n_first], chats[n_first:]
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            answers = list(pool.map(partial(self._ask, client), first))
            down = openai.APIConnectionError, openai.InternalServerError  # a timeout is a connection error
            self._is_down = all(isinstance(answer.error, down) for answer in answers)
            if self._is_down:
                return answers + [Completion(error=answers[0].error, sent=False)] * len(others)
            return answers + list(pool.map(partial(self._ask, self.openai), others))

    def _ask(self, client: openai.OpenAI, chat: Chat) -> Completion:
        begin = time.perf_counter()
        try:
            response = client.chat.completions.with_raw_response.create(
                model=self.endpoint.model,
                messages=chat,  # type: ignore[arg-type]
                max_tokens=self.endpoint.max_tokens,
                temperature=self.endpoint.temperature,
            )
        except Exception as error:  # the caller decides what a missing answer means
            return Completion(error=error, seconds=time.perf_counter() - begin)
        seconds = time.perf_counter() - begin
        try:
            # Read the raw body: how `openai` handles a body that is not a chat completion depends on its version
            body = json.loads(response.text)
            choice = body["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            wrong = ValueError(f"the response of the endpoint is not a chat completion: {response.text}")
            return Completion(error=wrong, seconds=seconds)
        if not isinstance(text, str) or not text.strip():
            return Completion(error=ValueError("the endpoint's answer is empty"), seconds=seconds)
        usage = body["usage"] if isinstance(body.get("usage"), dict) else {}  # not every server counts
        return Completion(
            text,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            truncated=choice.get("finish_reason") == "length",
            seconds=seconds,
        )

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The client of the package `openai`."""
        try:
            import openai
        except ImportError as error:
            raise ImportError("Endpoints need the package openai. Run `pip install marcog-trl[expert]`.") from error
        endpoint = self.endpoint
        key = os.environ.get(endpoint.api_key_env, "")
        if not key:
            raise ValueError(
                f"The environment variable {endpoint.api_key_env} with the endpoint's key is empty. Run `export "
                f"{endpoint.api_key_env}=...`, with any text if the endpoint needs no key."
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"The environment variable {endpoint.api_key_env} contains white space or characters that HTTP headers do "
                "not allow. Set it to the key alone."
            )
        return openai.OpenAI(
            api_key=key, base_url=endpoint.base_url, timeout=endpoint.timeout, max_retries=endpoint.max_retries
        )
