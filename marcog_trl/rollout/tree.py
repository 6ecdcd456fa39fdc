"""The branches of episodes, and the layout of their replies as rows. Lines are trees that branch once, at the root."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from marcog_trl.agents import Slot, Workflow


@dataclass(frozen=True)
class Level:
    """
    Slots that are played after every episode branches.

    Args:
        turn (`int`): Turn of the slots.
        slots (`tuple[Slot, ...]`): The slots.
        replies (`int`): Number of replies of each slot in the same context.
        siblings (`int`): Number of rows of each slot that lie side by side, to be compared with each other.
        cross (`bool`, *optional*, defaults to `False`): Whether every combination of the slots' replies is a branch, instead
            of their g-th replies together.
        is_stage (`bool`, *optional*, defaults to `False`): Whether the slots are one stage. Otherwise they may be several.
    """

    turn: int
    slots: tuple[Slot, ...]
    replies: int
    siblings: int
    cross: bool = False
    is_stage: bool = False

    @property
    def branches(self) -> int:
        """Number of joint actions that follow an episode."""
        return self.replies ** len(self.slots) if self.cross else self.replies

    def reply_of(self, slot: int, branch: int) -> int:
        """Number of the reply that a branch contains, among those of the slot with this index."""
        return branch // self.replies ** (len(self.slots) - 1 - slot) % self.replies if self.cross else branch


@dataclass(frozen=True)
class Tree:
    """
    The episodes of a problem.

    Rows are sorted by level, then by node, slot and sibling.

    Args:
        levels (`tuple[Level, ...]`): Where the episodes branch, in order.
    """

    levels: tuple[Level, ...]

    @classmethod
    def of_turns(cls, workflow: Workflow, replies: Sequence[int], cross: bool = False) -> Tree:
        """
        Branches at the beginning of turns.

        Args:
            workflow ([`Workflow`]): The workflow.
            replies (`Sequence[int]` of length K): Replies of each slot in the same context, by turn: `[G, 1, 1]` for lines,
                `[G, G, G]` for trees of turns.
            cross (`bool`, *optional*, defaults to `False`): See [`Level`].
        """
        of_turn = [tuple(slot for slot in workflow.slots if slot.turn == k) for k in range(workflow.num_turns)]
        return cls(tuple(Level(k, of_turn[k], count, replies[0], cross) for k, count in enumerate(replies)))

    @classmethod
    def of_stages(cls, stages: Sequence[tuple[Slot, ...]], replies: Sequence[int]) -> Tree:
        """
        Branches at every stage.

        Args:
            stages (`Sequence[tuple[Slot, ...]]` of length L): The slots of each stage, in order.
            replies (`Sequence[int]` of length L): Replies of each slot in the same context, by stage.
        """
        levels = zip(stages, replies, strict=True)
        return cls(tuple(Level(slots[0].turn, slots, count, count, is_stage=True) for slots, count in levels))

    def levels_of(self, turn: int) -> list[Level]:
        """The levels of a turn."""
        return [level for level in self.levels if level.turn == turn]

    @property
    def without_root(self) -> Tree:
        """The rest of the tree, for episodes that have branched at the beginning."""
        first, *others = self.levels
        return Tree((replace(first, replies=1), *others))

    @property
    def branches_later(self) -> bool:
        """Whether episodes branch after their first requests, or need several replies to the same one."""
        return self.by_stage or any(level.branches > 1 and (level.cross or level.turn > 0) for level in self.levels)

    @property
    def by_stage(self) -> bool:
        """Whether episodes branch at every stage, so that siblings are replies in exactly the same context."""
        return self.levels[0].is_stage

    @cached_property
    def branches(self) -> list[int]:
        """Number of joint actions of each turn that follow the same history."""
        turns = range(self.levels[-1].turn + 1)
        return [math.prod(level.branches for level in self.levels_of(turn)) for turn in turns]

    @cached_property
    def joint_actions(self) -> list[int]:
        """Number of episodes at the end of each turn."""
        return list(itertools.accumulate(self.branches, operator.mul))

    @cached_property
    def rows_of_slot(self) -> list[int]:
        """Number of rows of each slot, by level."""
        counts, nodes = [], 1
        for level in self.levels:
            counts.append(nodes * level.replies)
            nodes *= level.branches
        return counts

    @cached_property
    def siblings(self) -> list[int]:
        """Sizes of the groups of siblings, in the order of the rows."""
        groups = zip(self.levels, self.rows_of_slot, strict=True)
        return [level.siblings for level, rows in groups for _ in range(rows * len(level.slots) // level.siblings)]

    @cached_property
    def slots(self) -> list[Slot]:
        """The slot of every row."""
        groups = zip(self.levels, self.rows_of_slot, strict=True)
        return [
            slot
            for level, rows in groups
            for _ in range(rows // level.siblings)
            for slot in level.slots
            for _ in range(level.siblings)
        ]

    @cached_property
    def places(self) -> dict[Slot, list[int]]:
        """Maps slots to the index of their row in every episode at the end of their turn."""
        places: dict[Slot, list[int]] = {}
        nodes, before = 1, 0
        for level, rows in zip(self.levels, self.rows_of_slot, strict=True):
            nodes *= level.branches
            episodes, width = self.joint_actions[level.turn], level.siblings
            for i, slot in enumerate(level.slots):
                places[slot] = []
                for e in range(episodes):
                    node, branch = divmod(e * nodes // episodes, level.branches)
                    group, sibling = divmod(node * level.replies + level.reply_of(i, branch), width)
                    places[slot].append(before + (group * len(level.slots) + i) * width + sibling)
            before += rows * len(level.slots)
        return places

    @cached_property
    def episodes_of_row(self) -> list[list[int]]:
        """Episodes at the end of the row's turn that contain the row. Shorter lists are repeated to the same length."""
        episodes: list[list[int]] = [[] for _ in self.slots]
        for places in self.places.values():
            for e, place in enumerate(places):
                episodes[place].append(e)
        length = math.lcm(*map(len, episodes))
        return [found * (length // len(found)) for found in episodes]

    def path(self, slots: Sequence[Slot]) -> list[list[int]]:
        """The row of each of these slots in every episode of the last turn."""
        last = self.joint_actions[-1]
        return [[self.places[slot][e * len(self.places[slot]) // last] for slot in slots] for e in range(last)]
