"""
An external model that suggests edits to the code of agents, for the feedback mode `expert_edits`.

Any OpenAI-compatible chat-completions endpoint can be used.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from marcog_trl.parsing.prompts import messages_of


if TYPE_CHECKING:
    import openai


def expert_question(problem: Mapping[str, Any], role: str, reply: str, results: str) -> list[dict[str, str]]:
    """
    Make the question for the expert about one agent.

    Args:
        problem (`Mapping`): One dataset row.
        role (`str`): The agent's role text.
        reply (`str`): The whole reply of the agent.
        results (`str`): Results of the visible tests of the team's solution.

    Returns:
        `list[dict[str, str]]`: Chat messages: one user message, because some chat templates do not allow system messages.
    """
    task = "\n\n".join(message["content"] for message in messages_of(problem["prompt"]))
    text = (
        "You review the code of one agent of a team that solves a Python problem together.\n\n"
        f"The agent's task:\n{role}\n\n{task}\n\n"
        f"The agent's answer:\n{reply.strip() or '(empty)'}\n\n"
        f"Results of the team's solution:\n{results}\n\n"
        "Suggest edits to this agent's answer, in at most five short lines: what to change, where and why. Stay within "
        "the agent's task and leave the other agents' code alone. Do not write the whole solution. If nothing needs to "
        "change, say so."
    )
    return [{"role": "user", "content": text}]


class ExpertEdits:
    """
    Asks an external model for suggestions. Use it as the `expert` of a workflow.

    If all questions that are sent first fail with a connection error, a timeout or a server error, the endpoint counts as
    down: the other questions are not sent, and the next call tries a single question first, without retries.

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
        concurrency (`int`, *optional*, defaults to `8`): Questions that this process sends at the same time.
        max_tokens (`int`, *optional*, defaults to `512`): Maximum length of an answer, in tokens.
        temperature (`float`, *optional*, defaults to `0.0`): Sampling temperature of the expert.

    Attributes:
        asked (`int`): Number of different questions so far.
        failed (`int`): Number of questions without an answer. The first call with failures emits a warning.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 60.0,
        max_retries: int = 3,
        concurrency: int = 8,
        max_tokens: int = 512,
        temperature: float = 0.0,
    ):
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.max_retries = max_retries
        self.concurrency = concurrency
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.asked = 0
        self.failed = 0
        self._is_down = False

    def check(self) -> None:
        """
        Check the settings and the environment, without sending anything.

        Raises:
            ImportError: If `openai` is not installed.
            ValueError: If `model` or the environment variable of the key is empty, the key or `base_url` is invalid, or
                a number is out of range.
        """
        for name, is_valid, example in (
            ("model", bool(self.model.strip()), "'gpt-4o-mini'"),
            ("timeout", 0 < self.timeout < math.inf, "60.0 (seconds)"),
            ("max_retries", self.max_retries >= 0, "3"),
            ("concurrency", self.concurrency >= 1, "8"),
            ("max_tokens", self.max_tokens >= 1, "512"),
            ("temperature", 0 <= self.temperature < math.inf, "0.0"),
        ):
            if not is_valid:
                raise ValueError(f"ExpertEdits.{name}={vars(self)[name]!r} is invalid. Use {example}.")
        url = self._client.base_url
        if url.userinfo:
            raise ValueError(f"ExpertEdits.base_url contains a user or password. Put the key into {self.api_key_env}.")
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"ExpertEdits.base_url='{url}' is not a URL. Use 'http://localhost:8000/v1', for example."
            )

    def __call__(self, questions: Sequence[list[dict[str, str]]]) -> list[str | None]:
        """
        Ask questions in parallel. Equal questions are sent once.

        Args:
            questions (`Sequence[list[dict[str, str]]]`): Chat messages, see [`expert_question`].

        Returns:
            `list[str | None]`: One answer per question, in order; `None` if there is none.
        """
        if not questions:
            return []
        keys = [json.dumps(question) for question in questions]
        different = dict(zip(keys, questions, strict=True))
        outcomes = dict(zip(different, self._ask_all(list(different.values())), strict=True))
        failures = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
        if failures and not self.failed:
            warnings.warn(self._describe(failures, len(outcomes)), RuntimeWarning, stacklevel=2)
        self.asked += len(outcomes)
        self.failed += len(failures)
        answers = (outcomes[key] for key in keys)
        return [answer if isinstance(answer, str) else None for answer in answers]

    def _ask_all(self, questions: list[list[dict[str, str]]]) -> list[str | Exception]:
        """The answer to each question, or the error."""
        import openai

        # A few questions go first, so that not all of them wait for an endpoint that is down
        client, n_first = self._client, self.concurrency
        if self._is_down:
            client, n_first = client.with_options(max_retries=0), 1
        first, others = questions[:n_first], questions[n_first:]
        with ThreadPoolExecutor(self.concurrency) as pool:
            outcomes = list(pool.map(partial(self._ask, client), first))
            down = openai.APIConnectionError, openai.InternalServerError  # a timeout is a connection error
            self._is_down = all(isinstance(outcome, down) for outcome in outcomes)
            if self._is_down:
                return outcomes + outcomes[:1] * len(others)
            return outcomes + list(pool.map(partial(self._ask, self._client), others))

    def _ask(self, client: openai.OpenAI, question: list[dict[str, str]]) -> str | Exception:
        try:
            response = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=question,  # type: ignore[arg-type]
                max_tokens=self.max_tokens,
                temperature=self.temperature,
            )
        except Exception as error:  # an error of the expert must not end the run: the caller counts and reports it
            return error
        try:
            # Read the raw body: how `openai` handles a body that is not a chat completion depends on its version
            answer = json.loads(response.text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return ValueError(f"the response of the endpoint is not a chat completion: {response.text}")
        if not isinstance(answer, str) or not answer.strip():
            return ValueError("the expert's answer is empty")
        return answer.strip()

    def _describe(self, failures: list[Exception], asked: int) -> str:
        """Text of the warning, without the key, which endpoints may repeat in their answers."""
        reasons = (f"{type(error).__name__}: {error}" for error in (failures[0], failures[0].__cause__) if error)
        cause = " ".join(" from ".join(reasons).replace(self._client.api_key, "***").split())
        return (
            f"The expert (model={self.model!r}, base_url='{self._client.base_url}') did not answer {len(failures)} of "
            f"{asked} questions. Later failures are counted without a warning. The first error: {cause:.500}"
        )

    @cached_property
    def _client(self) -> openai.OpenAI:
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                "feedback='expert_edits' needs the package openai. Run `pip install marcog-trl[expert]`."
            ) from error
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ValueError(
                f"The environment variable {self.api_key_env} with the expert's key is empty. Run `export "
                f"{self.api_key_env}=...`, with any text if the endpoint needs no key."
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"The environment variable {self.api_key_env} contains white space or characters that HTTP headers do not "
                "allow. Set it to the key alone."
            )
        return openai.OpenAI(api_key=key, base_url=self.base_url, timeout=self.timeout, max_retries=self.max_retries)
