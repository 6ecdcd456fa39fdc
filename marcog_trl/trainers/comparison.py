"""Which rows SHPPO compares: what an agent does, with what it would do with the latent of another agent."""

import math
from typing import Any

import torch

from marcog_trl.heterogeneity import behaviour_distance
from marcog_trl.trainers.batch import TeamBatch


ROWS_PER_COMPARED_ROW = 8


def num_compared(rows: int, index: int = 0) -> int:
    """
    Number of rows of a micro-batch that are compared: one of eight rows of the generation batch, and the first in any case.

    Args:
        rows (`int`): Rows of each micro-batch.
        index (`int`, *optional*, defaults to `0`): Index of the micro-batch in the generation batch.

    Returns:
        `int`: The number.
    """
    before, after = (math.ceil(rows * i / ROWS_PER_COMPARED_ROW) for i in (index, index + 1))
    return after - before


def rows_to_compare_with(batch: TeamBatch, team: torch.Tensor) -> torch.Tensor:
    """
    Finds other agents that read the same prompt. With several, episodes take turns.

    Args:
        batch ([`TeamBatch`]): The batch.
        team (`torch.Tensor` of shape `(B, N)`): Index of every agent's row in the turn of each row, or -1.

    Returns:
        `torch.Tensor` of shape `(B,)`: Index of a row of another agent with the same prompt, or of the row itself.
    """
    known: dict[tuple[int, ...], int] = {}
    numbers = [-1 if row is None else known.setdefault(tuple(row.prompt_ids), len(known)) for row in batch.rows]
    prompt = torch.tensor(numbers, device=team.device)
    own = torch.arange(len(team), device=team.device)
    others = (team >= 0) & (team != own[:, None]) & (prompt[team.clamp(min=0)] == prompt[:, None])
    place = batch.episodes_of_row[:, 0] % others.sum(1).clamp(min=1)
    chosen = others & (others.cumsum(1) - 1 == place[:, None])
    return torch.where(others.any(1), (team * chosen).sum(1), own)


def behaviour_distances(
    inputs: dict[str, Any], logps: torch.Tensor, other_logps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Distances of the first rows of a micro-batch, token by token, so that short replies do not count more than long ones.

    Args:
        inputs (`dict`): The micro-batch.
        logps, other_logps (`torch.Tensor` of shape `(K, T)`): See [`behaviour_distance`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The sum of the distances over the live tokens, 0 for rows without another agent, and
        the number of live tokens of other rows.
    """
    rows = len(logps)
    mask = (inputs["completion_mask"] * inputs["tool_mask"])[:rows]
    different = (inputs["z"] != inputs["other_z"])[:rows].any(1)
    return (behaviour_distance(logps, other_logps) * mask).sum(), (mask * different[:, None]).sum()
