"""What is recorded of a rollout: rows, turns and episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marcog_trl.agents import Consult, Execute, Prompt, Slot
from marcog_trl.execution import Job, Verdict


Request = dict[str | Slot, Prompt] | Execute | Consult
"""What a workflow yields."""
Answer = dict[str, str] | list[Verdict] | list[str | None]
"""What a workflow is sent for a request: replies by agent, verdicts by job, or an advisor's answers."""


class AsGiven(str):
    """
    A text prompt that is the dataset's own, word for word. TRL's users may have put it through a chat template themselves,
    so that the special tokens in it are meant.
    """


@dataclass
class Row:
    """
    One reply of one agent: the unit of the batch and of the loss.

    Args:
        episode (`int`): Index of the episode in its batch; of several that share the reply, the first.
        slot (`Slot`): Agent, turn and act of the reply.
        stage (`int`): Number of the generate call, within the episode's batch, that produced the reply.
        prompt (`str` or `list[dict]`): What the agent was asked, before tokenization.
        prompt_ids (`list[int]`): The prompt's token ids.
        completion_ids (`list[int]`): The reply's token ids, the terminal EOS included.
        logprobs (`list[float]`, *optional*): Log-probability of each completion token, where the backend gives it.
        text (`str`): The decoded reply.
        node (`int`): Id of the history at which the reply was given. In a tree the siblings of a group share it.
        parent (`int`): Id of the history one turn before, -1 in the first turn.
        sibling (`int`): Which of the replies of its agent at this node, from 0.
    """

    episode: int
    slot: Slot
    stage: int
    prompt: Prompt
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    text: str = ""
    node: int = -1
    parent: int = -1
    sibling: int = 0


@dataclass(frozen=True)
class Score:
    """
    What the reward functions said of one turn of one episode.

    Args:
        values (`tuple[float, ...]`): By reward function, in reward units, averaged over agents; NaN where it gave none.
        columns (`Mapping[str, Any]`): What they logged of this episode with `log_extra`.
        metrics (`Mapping[str, float]`): What they logged with `log_metric`, names without the turn: of this episode where the
            function told it (see [`~marcog_trl.rewards.EpisodeMean`]), else of all episodes that were scored with it.
        failed (`bool`): Whether a function failed, and the episode is masked for it.
    """

    values: tuple[float, ...]
    columns: Mapping[str, Any]
    metrics: Mapping[str, float]
    failed: bool = False


@dataclass
class Turn:
    """
    What one turn of an episode came to.

    Args:
        replies (`Mapping[str, str]`): The last reply of each agent that spoke in this turn, as `Workflow.parts` gives it.
        solution (`str`): The code (or, for a single agent, the reply) that is scored.
        verdicts (`list[tuple[Job, Verdict]]`): What the workflow executed during the turn, and, once it is scored, `tested`.
        tested (`tuple[Job, Verdict]`, *optional*): The solution with all tests of the problem, and what came of it; `None`
            before scoring, and where no reward needs it.
        score ([`Score`], *optional*): What the reward functions said; `None` before scoring.
        rewards (`dict[str, float]`, *optional*): Reward of each agent, in reward units; `None` if the episode is
            masked, and before scoring.
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
        problem (`Mapping`): The dataset row: a read-only copy of this episode's own.
        rows (`list[Row]`): Replies in the order in which they were given.
        turns (`list[Turn]`): One entry per turn played.
        answers (`list`): Every answer that the workflow received, in order: what [`replay`] needs.
        masked (`bool`): Whether the episode is left out of every loss: no reward function had a reward for a turn of it, a
            function failed, or the infrastructure did.
        advice (`list[str | None]`): What advisors answered, in order; `None` where they had no answer.
    """

    problem: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    masked: bool = False
    advice: list[str | None] = field(default_factory=list)
