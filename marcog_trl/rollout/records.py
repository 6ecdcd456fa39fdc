"""The records of a rollout: rows, turns and episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from marcog_trl.agents import Consult, Execute, Prompt, Slot
from marcog_trl.endpoints import Completion
from marcog_trl.execution import Job, Verdict
from marcog_trl.parsing.prompts import ChatReply, ChatRequest


Request = dict[str | Slot, Prompt] | Execute | Consult
"""What a workflow yields."""
Response = dict[str | Slot, str] | list[Verdict] | list[str | None]
"""What a workflow receives for a request: agent → reply, one verdict per job, or one answer per question."""


class AsGiven(str):
    """
    A text prompt taken from the dataset without any change. The user may have applied a chat template to it, so it may
    contain special tokens.
    """


@dataclass
class Row:
    """
    One reply of one agent: the unit of a batch and of the loss.

    Args:
        episode (`int`): Index of the episode among those of its turn; the first one if several episodes share the reply.
        slot (`Slot`): Agent, turn and act of the reply.
        stage (`int`): Number of the generate call of the batch that produced the reply, from 0.
        prompt (`str` or `list[dict]`): Prompt of the agent, before tokenization.
        prompt_ids (`list[int]`): Token ids of the prompt.
        completion_ids (`list[int]`): Token ids of the reply, including the EOS at its end.
        logprobs (`list[float]`, *optional*): Log-probability of each completion token, if the backend returns it.
        text (`str`): The decoded reply. If the agent has tools, the content of its last message.
        messages (`list[dict]`, *optional*): What the agent wrote and its tools returned, as chat messages, if it has tools.
        tool_mask (`list[int]`, *optional*): 1 for each completion token that the model wrote, 0 for those of results of
            tools. `None` if the model wrote all of them.
        completion (`Completion`, *optional*): What the endpoint returned, if the agent speaks through one. The row then has no
            tokens of the team's model.
        prompt_state (`torch.Tensor` of shape `(H,)`, *optional*): State of the base model at the end of the prompt.
        observation (`torch.Tensor` of shape `(2H,)`, *optional*): What the agent's latent depends on.
        noise, latent (`torch.Tensor` of shape `(d,)`, *optional*): The latent z = μ + σ · noise, and its noise.
        token_states (`torch.Tensor` of shape `(T, H)`, *optional*): The last hidden state before each token of the reply.
    """

    episode: int
    slot: Slot
    stage: int
    prompt: Prompt
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    text: str = ""
    completion: Completion | None = None
    messages: list[dict[str, Any]] | None = None
    tool_mask: list[int] | None = None
    prompt_state: Any = field(default=None, repr=False, compare=False)
    observation: Any = field(default=None, repr=False, compare=False)
    noise: Any = field(default=None, repr=False, compare=False)
    latent: Any = field(default=None, repr=False, compare=False)
    token_states: Any = field(default=None, repr=False, compare=False)

    @property
    def unanswered(self) -> bool:
        """Whether the reply is missing, because the agent's endpoint failed."""
        return self.completion is not None and self.completion.error is not None

    @property
    def num_tokens(self) -> int:
        """Length of the reply, in tokens of the model that wrote it."""
        return sum(self.mask) if self.completion is None else self.completion.completion_tokens

    @property
    def mask(self) -> list[int]:
        """1 for each completion token that the model wrote, else 0."""
        return [1] * len(self.completion_ids) if self.tool_mask is None else self.tool_mask

    @property
    def tool_calls(self) -> tuple[int, int]:
        """Number of calls of tools, and how many of them failed: their tool raised an error, or their result is not in the row."""
        messages = self.messages or []
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        if isinstance(self.prompt, ChatRequest):
            return calls, 0
        # TRL shows errors as `str({"error": message})`
        results = [not str(m["content"]).startswith("{'error': ") for m in messages if m["role"] == "tool"]
        return calls, calls - sum(results)

    @property
    def last_message(self) -> str:
        """The content of the last message that the model wrote. Empty if it ends with calls of the agent's own tools."""
        written = [message for message in self.messages or () if message["role"] == "assistant"]
        return written[-1]["content"] if written else ""

    def reply_to_program(self, end_tokens: Collection[int]) -> ChatReply:
        """What a program that asked is told. `end_tokens`: tokens that end a reply."""
        message = self.messages[-1] if self.messages else {}
        if self.completion is not None:
            read, truncated = self.completion.prompt_tokens, self.completion.truncated
        else:
            read, truncated = len(self.prompt_ids), not set(self.completion_ids[-1:]) & set(end_tokens)
        calls, reasoning = message.get("tool_calls") or [], message.get("reasoning_content")
        return ChatReply(self.text, calls, read, self.num_tokens, truncated, reasoning)


@dataclass(frozen=True)
class Score:
    """
    Results of the reward functions for one turn of one episode.

    Args:
        values (`tuple[float, ...]`): One value per reward function, in reward units, averaged over agents; NaN if it gave none.
        columns (`Mapping[str, Any]`): Values that they logged for this episode with `log_extra`.
        metrics (`Mapping[str, float]`): Values that they logged with `log_metric`, under names without the turn. The value
            of this episode if the function logged an [`~marcog_trl.rewards.EpisodeMean`], else that of the whole call.
        failed (`bool`): Whether a function failed, so that the episode is masked.
        by_agent (`Mapping[str, tuple[float, ...]]`): `values` before they are averaged over agents.
    """

    values: tuple[float, ...]
    columns: Mapping[str, Any]
    metrics: Mapping[str, float]
    failed: bool = False
    by_agent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Turn:
    """
    One turn of an episode.

    Args:
        replies (`Mapping[str, str]`): The last reply of each agent that spoke in this turn, as `Workflow.parts` gives it.
        solution (`str`): The text that is scored: code, or the reply of a single agent.
        verdicts (`list[tuple[Job, Verdict]]`): What the workflow executed in the turn; after scoring also `tested`.
        rewards (`dict[str, float]`, *optional*): Reward of each agent, in reward units; `None` before scoring, or if the
            episode is masked.
        tested (`tuple[Job, Verdict]`, *optional*): The job that runs all tests on the solution, and its verdict; `None`
            before scoring, or if no reward needs it.
        score ([`Score`], *optional*): Results of the reward functions; `None` before scoring.
    """

    replies: Mapping[str, str]
    solution: str
    verdicts: list[tuple[Job, Verdict]]
    rewards: dict[str, float] | None = None
    tested: tuple[Job, Verdict] | None = None
    score: Score | None = None


@dataclass
class Episode:
    """
    One play of a workflow on one problem.

    Args:
        problem (`Mapping`): The dataset row: a read-only copy for this episode.
        rows (`list[Row]`): Replies, in order.
        turns (`list[Turn]`): Turns that were played, in order.
        responses (`list`): Everything that the workflow received, in order, as [`~marcog_trl.rollout.engine.replay`] needs it.
        masked (`bool`): Whether the episode is left out of all losses, because a reward function, the infrastructure or the
            endpoint of an agent failed, or no reward function applies to one of its turns.
        advice (`list[str | None]`): Answers of advisors, in order; `None` where an advisor had no answer.
        failure (`str`, *optional*): Why `play` ended the episode with [`~marcog_trl.agents.EpisodeFailed`].
    """

    problem: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    masked: bool = False
    advice: list[Any] = field(default_factory=list)
    failure: str | None = None

    @property
    def unanswered(self) -> bool:
        """Whether a reply is missing, because the endpoint of an agent failed."""
        return any(row.unanswered for row in self.rows)
