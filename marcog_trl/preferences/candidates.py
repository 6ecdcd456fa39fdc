"""
What can be one side of a pair, and which of them are paired.

It knows nothing about models, datasets or losses.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from marcog_trl.algorithms.advantages import tree_returns, turn_returns
from marcog_trl.rollout.records import Episode, Row


PAIRINGS = ("gap", "best_worst", "random", "all")
PairRow = dict[str, Any]
"""One reply of a side: `agent`, `turn`, `act`, `prompt_ids`, `completion_ids` and `latent` (empty without latents)."""


@dataclass(frozen=True)
class Candidate:
    """
    What can be one side of a pair: an episode, or one turn of it.

    Args:
        rows (`list[PairRow]`): Its replies, in order.
        score (`float`, *optional*): Its return, averaged over agents, in reward units; `None` if it is masked.
        agent_scores (`tuple[float, ...]`, *optional*): Return of each agent, in the order of the team.
        history (`list[PairRow]`, *optional*): Replies of the turns before, which all candidates of a pair share.
    """

    rows: list[PairRow]
    score: float | None
    agent_scores: tuple[float, ...] = ()
    history: list[PairRow] = field(default_factory=list)

    @property
    def replies(self) -> tuple:
        """What tells candidates apart: who wrote which tokens."""
        return tuple((row["agent"], row["turn"], row["act"], tuple(row["completion_ids"])) for row in self.rows)


def choose_pairs(
    candidates: Sequence[Candidate],
    pairing: str = "gap",
    pairs_per_problem: int = 4,
    min_gap: float = 0.0,
    seed: Any = 0,
) -> list[tuple[int, int]]:
    """
    Chooses pairs of candidates, the better one first.

    Masked candidates, repetitions of the same replies, and pairs whose scores differ by `min_gap` or less are left out.

    Args:
        candidates (`Sequence[Candidate]` of length C): Candidates of one problem, or of one node of a tree.
        pairing (`str`, *optional*, defaults to `"gap"`): `"gap"`: the largest gaps first; among equal gaps the candidates
            that were used least so far, then the lowest indices. `"best_worst"`: one pair, of the lowest indices where
            several are best or worst. `"random"`: any. `"all"`: all of them, whatever `pairs_per_problem`.
        pairs_per_problem (`int`, *optional*, defaults to `4`): Maximum number of pairs.
        min_gap (`float`, *optional*, defaults to `0.0`): In reward units.
        seed (*optional*, defaults to `0`): Anything whose `repr` is the seed of `"random"`.

    Returns:
        `list[tuple[int, int]]`: Index of the preferred candidate, and of the other one.
    """
    seen: set[tuple] = set()
    scores: dict[int, float] = {}
    for i, candidate in enumerate(candidates):
        if candidate.score is not None and not math.isnan(candidate.score) and candidate.replies not in seen:
            seen.add(candidate.replies)
            scores[i] = candidate.score
    gaps: dict[tuple[int, int], float] = {}
    for i, j in itertools.permutations(scores, 2):
        # Rounded, because sums of the same rewards may differ in their last digits
        gap = round(scores[i] - scores[j], 9)
        if gap > min_gap:
            gaps[i, j] = gap
    if pairing == "all":
        return sorted(gaps)
    if pairing == "random":
        pairs = sorted(gaps)
        return sorted(random.Random(repr(seed)).sample(pairs, min(pairs_per_problem, len(pairs))))
    if pairing == "best_worst":
        return sorted(gaps, key=lambda pair: (-gaps[pair], pair))[:1]
    used = dict.fromkeys(scores, 0)
    chosen: list[tuple[int, int]] = []
    while gaps and len(chosen) < pairs_per_problem:
        i, j = min(gaps, key=lambda pair: (-gaps[pair], used[pair[0]] + used[pair[1]], pair))
        chosen.append((i, j))
        del gaps[i, j]
        used[i] += 1
        used[j] += 1
    return chosen


def _pair_row(row: Row) -> PairRow:
    return {
        "agent": row.slot.agent,
        "turn": row.slot.turn,
        "act": row.slot.act,
        "prompt_ids": row.prompt_ids,
        "completion_ids": row.completion_ids,
        "latent": [] if row.latent is None else row.latent.float().tolist(),
    }


def candidates_of_lines(episodes: Sequence[Episode], agents: Sequence[str], gamma_turn: float) -> list[Candidate]:
    """The candidates that scored episodes are, with their returns from the first turn."""
    candidates = []
    for episode in episodes:
        rows = [_pair_row(row) for row in episode.rows]
        if episode.masked:
            candidates.append(Candidate(rows, None))
            continue
        rewards = torch.tensor(
            [[(turn.rewards or {})[agent] for turn in episode.turns] for agent in agents], dtype=torch.float64
        )
        returns = turn_returns(rewards, gamma_turn)[:, 0]
        candidates.append(Candidate(rows, returns.mean().item(), tuple(returns.tolist())))
    return candidates


def candidates_of_tree(
    levels: Sequence[Sequence[Episode]], agents: Sequence[str], num_children: int, gamma_turn: float
) -> list[tuple[int, list[Candidate]]]:
    """
    The candidates of every node of scored trees: the turns that follow it, with their tree returns.

    Args:
        levels (`Sequence[Sequence[Episode]]` of length K): As [`~marcog_trl.rollout.engine.play_tree`] returns them.
        agents (`Sequence[str]` of length N): Names of the agents.
        num_children (`int`): J, joint actions at a node.
        gamma_turn (`float`): Discount per turn.

    Returns:
        `list[tuple[int, list[Candidate]]]`: Index of the problem, and the J candidates of a node at which a turn was played;
        turn by turn.
    """
    size, num_turns = len(levels[-1]), len(levels)
    rewards = torch.zeros(size, len(agents), num_turns, dtype=torch.float64)
    played, counted = torch.zeros(2, size, num_turns, dtype=torch.bool)
    for k, episodes in enumerate(levels):
        for e, episode in enumerate(episodes):
            if len(episode.turns) <= k:
                continue
            of_turn = episode.turns[k].rewards
            played[e, k] = True
            counted[e, k] = of_turn is not None and not episode.masked
            if of_turn is not None:
                rewards[e, :, k] = torch.tensor([of_turn[agent] for agent in agents], dtype=torch.float64)
    returns, known = tree_returns(rewards, played, counted, [num_children] * num_turns, gamma_turn)
    nodes = []
    for k, episodes in enumerate(levels):
        for start in range(0, len(episodes), num_children):
            if not played[start : start + num_children, k].any():
                continue
            siblings = []
            for e in range(start, start + num_children):
                rows = [_pair_row(row) for row in episodes[e].rows if row.slot.turn == k]
                history = [_pair_row(row) for row in episodes[e].rows if row.slot.turn < k]
                own = returns[e, :, k]
                score = own.mean().item() if known[e, k] else None
                siblings.append(Candidate(rows, score, tuple(own.tolist()), history))
            nodes.append((start // num_children ** (k + 1), siblings))
    return nodes
