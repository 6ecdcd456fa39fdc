"""Episodes in which the agents say what an expert would: what a team's own episodes can be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from marcog_trl.evaluation.evaluate import make_scorer
from marcog_trl.preferences.candidates import Candidate, candidates_of_lines
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.team import Team


EXPERT_COLUMN = "expert"


def expert_candidates(
    team: Team, problems: Dataset, reward_funcs: Any = None, gamma_turn: float = 1.0
) -> dict[str, list[Candidate]]:
    """
    Plays and scores the replies of experts. All processes play all of them.

    Args:
        team ([`Team`]): The team whose agents speak.
        problems (`Dataset`): Problems with a column `expert`: a mapping from the name of each agent to its reply, the same in
            every turn, or `None` where there is none.
        reward_funcs (`str`, `Callable` or `list`, *optional*): As in [`collect_preferences`].
        gamma_turn (`float`, *optional*, defaults to `1.0`): Discount per turn.

    Returns:
        `dict[str, list[Candidate]]`: One candidate by `task_id`. A reply ends with the end-of-sequence token.

    Raises:
        ValueError: If there is no such column, or an expert's reply of an agent is missing.
    """
    check_experts(problems, team.agents)
    scorer, _ = make_scorer(team, None, reward_funcs)
    check_dataset("problems", problems, team.workflow, scorer.reward_funcs)
    rows = [(i, dict(row)) for i, row in enumerate(problems) if row[EXPERT_COLUMN] is not None]
    if not rows:
        return {}

    def reply(stage: list[Row]) -> list[list[int]]:
        texts = [rows[row.episode][1][EXPERT_COLUMN][row.slot.agent] for row in stage]
        return [
            [*team.tokenizer.encode(text, add_special_tokens=False), team.tokenizer.eos_token_id] for text in texts
        ]

    def end_turn(episodes: list[Episode], turn: int) -> None:
        turns = [(episode, episode.turns[turn]) for episode in episodes if len(episode.turns) > turn]
        scorer.score(episodes, turn, scorer.execute(turns) if scorer.runs_tests else None)

    with team.evaluating():
        episodes = team.play([row for _, row in rows], end_turn, reply=reply)
    candidates = candidates_of_lines(episodes, team.agents, gamma_turn)
    return {str(row.get("task_id", i)): [own] for (i, row), own in zip(rows, candidates, strict=True)}


def check_experts(problems: Dataset, agents: list[str]) -> None:
    """
    Checks that problems have replies of experts.

    Raises:
        ValueError: If there is no such column, or the reply of an agent is missing.
    """
    if EXPERT_COLUMN not in problems.column_names:
        raise ValueError(
            f"comparator='expert' needs a column {EXPERT_COLUMN!r}, a mapping from agents to replies, but the problems have "
            f"{problems.column_names}. Add the column, or set comparator='self'."
        )
    for i, replies in enumerate(problems[EXPERT_COLUMN]):
        given: Mapping[str, Any] = replies or dict.fromkeys(agents, "")
        missing = [agent for agent in agents if not isinstance(given.get(agent), str)]
        if missing:
            raise ValueError(
                f"The column {EXPERT_COLUMN!r} has no reply of {missing[0]!r} in problem {i}. Give all of {agents}, or None for "
                "the problem."
            )
