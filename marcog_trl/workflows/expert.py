"""
An external model that suggests edits to the code of agents, for the feedback mode `expert_edits`.

Any OpenAI-compatible chat-completions endpoint can be used.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from marcog_trl.endpoints import Endpoint, EndpointClient
from marcog_trl.parsing.prompts import messages_of


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

    While the endpoint is down, a call sends a single question (see [`~marcog_trl.endpoints.EndpointClient`]).

    Args:
        endpoint ([`~marcog_trl.endpoints.Endpoint`]): The model's endpoint.

    Attributes:
        failed (`int`): Number of questions without an answer. The first call with failures emits a warning.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._client = EndpointClient(endpoint)
        self.failed = 0

    def __call__(self, questions: Sequence[list[dict[str, str]]]) -> list[str | None]:
        """
        Ask questions in parallel. Equal questions are sent once.

        Args:
            questions (`Sequence[list[dict[str, str]]]`): Chat messages, see [`expert_question`].

        Returns:
            `list[str | None]`: One answer per question, in order; `None` if there is none.
        """
        answers = self._client.ask(questions, share_equal=True)
        different = {json.dumps(question): answer for question, answer in zip(questions, answers, strict=True)}
        failures = [answer.error for answer in different.values() if answer.error is not None]
        if failures and not self.failed:
            then = "Later failures are counted without a warning."
            described = self._client.describe("The expert", failures, len(different), then)
            warnings.warn(described, RuntimeWarning, stacklevel=2)
        self.failed += len(failures)
        return [answer.text.strip() if answer.error is None else None for answer in answers]
