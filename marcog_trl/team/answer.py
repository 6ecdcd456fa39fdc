"""What a team answers to a problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from marcog_trl.execution import Verdict


@dataclass(frozen=True)
class Answer:
    """
    A team's solution of a problem.

    Args:
        code (`str`): The solution's code. Empty if the reply has none.
        messages (`list[dict]`): Every reply in order: `agent`, `turn` (from 1), `prompt` (text or chat messages), `reply`, and for
            agents with tools `messages`, which include calls and results.
        verdict (`Verdict`, *optional*): Result of the problem's tests, if it has any.
    """

    code: str
    messages: list[dict[str, Any]] = field(repr=False)
    verdict: Verdict | None = None
