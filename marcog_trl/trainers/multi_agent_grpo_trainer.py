"""Group-relative policy optimisation for teams: MAGRPO, MARLOO, MAReMax and MAREINFORCE."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from datasets import Dataset

from marcog_trl.agents import Slot
from marcog_trl.algorithms.advantages import tree_returns
from marcog_trl.rollout.engine import play_tree, replay
from marcog_trl.rollout.records import Row
from marcog_trl.trainers.layout import Rollout
from marcog_trl.trainers.multi_agent_grpo_config import MultiAgentGRPOConfig
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.scoring import is_over


class MultiAgentGRPOTrainer(MultiAgentTrainer):
    """
    GRPO for a team of LLM agents that share one model and one adapter.

    Extends [`~trl.GRPOTrainer`] by episodes of a workflow instead of single completions, returns over turns, four baselines
    per slot (`args.advantage`), all combinations of the agents' replies (`args.joint_mode`), trees of turns
    (`args.turn_tree`), and loss weights by agent and turn. There is no critic.

    With the workflow `"single"`, `advantage="mean"` and `scale_rewards="group"`, the algorithm is GRPO. With
    `scale_rewards="none"` and `loss_type="dr_grpo"`, it is Dr. GRPO.

    Example:

    ```python
    >>> from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, load_problems

    >>> trainer = MultiAgentGRPOTrainer(
    ...     model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ...     reward_funcs="collaboration_reward",
    ...     args=MultiAgentGRPOConfig("team", workflow="collaboration", advantage="rloo"),
    ...     train_dataset=load_problems("humaneval"),
    ... )
    >>> trainer.train()
    ```

    Args: see [`MultiAgentTrainer`].

    Source: MAGRPO (https://huggingface.co/papers/2508.04652), GRPO (https://huggingface.co/papers/2402.03300), RLOO
    (https://huggingface.co/papers/2402.14740) and ReMax (https://huggingface.co/papers/2310.10505).
    """

    _tag_names = ["trl", "marcog-trl", "magrpo"]
    _name = "MAGRPO"
    _paper = {
        "title": "LLM Collaboration With Multi-Agent Reinforcement Learning",
        "id": "2508.04652",
        # docstyle-ignore
        "citation": """\
@article{liu2025llm,
    title        = {{LLM Collaboration With Multi-Agent Reinforcement Learning}},
    author       = {Shuo Liu and Zeyu Liang and Xueguang Lyu and Christopher Amato},
    year         = 2025,
    eprint       = {arXiv:2508.04652},
}""",
    }
    _config_class = MultiAgentGRPOConfig
    args: MultiAgentGRPOConfig

    # Joint actions that share replies, and turns that branch

    @property
    def _branches(self) -> bool:
        """Whether training plays trees, including trees of one turn."""
        return self.args.joint_mode == "cross" or (self.args.turn_tree and self.workflow.num_turns > 1)

    def _slots_of_turn(self, turn: int) -> list[Slot]:
        return [slot for slot in self.workflow.slots if slot.turn == turn]

    @property
    def _num_children(self) -> int:
        """J, the number of joint actions at a node."""
        return self.args.num_generations ** (len(self._slots_of_turn(0)) if self.args.joint_mode == "cross" else 1)

    def _groups(self) -> list[tuple[int, int, Slot]]:
        """Returns the sibling groups of a problem: turn, index of the node within its turn, slot."""
        return [
            (turn, node, slot)
            for turn in range(self.workflow.num_turns)
            for node in range(self._num_children**turn)
            for slot in self._slots_of_turn(turn)
        ]

    def _splits_groups(self, training: bool) -> bool:
        return super()._splits_groups(training) and not (training and self._branches)

    def _num_groups(self, training: bool) -> int:
        return len(self._groups()) if training and self._branches else super()._num_groups(training)

    def _check_joint_actions(self, train_dataset: Any) -> None:
        args, num_turns = self.args, self.workflow.num_turns
        if not self._branches:
            return
        title = type(self.workflow).__name__
        if args.joint_mode == "cross":
            if len(self.agents) > 4:
                raise ValueError(
                    f"joint_mode='cross' supports at most 4 agents, but {title} has {len(self.agents)}. Set joint_mode='align'."
                )
            first = self._slots_of_turn(0)
            for turn in range(num_turns):
                if [slot.agent for slot in self._slots_of_turn(turn)] != [slot.agent for slot in first]:
                    raise ValueError(
                        f"joint_mode='cross' needs the same agents in every turn, but {title}.slots differ between turns 0 "
                        f"and {turn}. Set joint_mode='align'."
                    )
            if isinstance(train_dataset, Dataset):
                [asked] = replay(self.workflow, train_dataset[0], ())
                if isinstance(asked, dict) and len(asked) != len(first):
                    raise ValueError(
                        f"joint_mode='cross' needs agents that reply at the same time, but {title} asks {list(asked)} first "
                        "and others later. Set joint_mode='align'."
                    )
        evaluations = sum(self._num_children ** (turn + 1) for turn in range(num_turns))
        if evaluations > args.max_joint_actions:
            raise ValueError(
                f"max_joint_actions={args.max_joint_actions} is below the {evaluations} joint actions per problem of "
                f"joint_mode={args.joint_mode!r} with num_generations={args.num_generations}, {len(self.agents)} agents and "
                f"num_turns={num_turns}. Set max_joint_actions={evaluations}, or a smaller num_generations."
            )

    def _play_rows(self, num_rows: int) -> Rollout:
        if not (self._branches and self.model.training):
            return super()._play_rows(num_rows)
        num_generations, children, groups = self._group_size, self._num_children, self._groups()
        block = num_generations * len(groups)
        problems = self._inputs[:num_rows:block]
        num_turns, threshold = self.workflow.num_turns, self.args.early_termination_threshold
        levels = play_tree(
            self.workflow,
            problems,
            num_generations=num_generations,
            joint_mode=self.args.joint_mode,
            score=self._end_turn,
            ends=None if threshold is None else lambda episodes: is_over(episodes, threshold),
            **self.team.playing(**self._playing()),
        )
        # Node ids are consecutive within a turn, and increase over turns
        place_of = {group: place for place, group in enumerate(groups)}
        first_id = [len(problems) * sum(children**k for k in range(turn)) for turn in range(num_turns)]
        rows: list[Row | None] = [None] * num_rows
        for level in levels:
            for row in (row for episode in level for row in episode.rows):
                turn = row.slot.turn
                problem, node = divmod(row.node - first_id[turn], children**turn)
                place = place_of[turn, node, row.slot]
                rows[problem * block + place * num_generations + row.sibling] = row
        of_slot = [slot for _ in problems for _, _, slot in groups for _ in range(num_generations)]
        holders = self._holders()
        episodes_of_row = [
            [(problem * children**turn + node) * children + child for child in holders[slot, sibling]]
            for problem in range(len(problems))
            for turn, node, slot in groups
            for sibling in range(num_generations)
        ]
        return self._lay_out(levels, rows, of_slot, torch.tensor(episodes_of_row))

    def _holders(self) -> dict[tuple[Slot, int], list[int]]:
        """Maps (slot, g) to the indices of the joint actions at a node that contain the g-th reply of the slot."""
        siblings = range(self.args.num_generations)
        if self.args.joint_mode == "align":
            return {(slot, g): [g] for slot in self.workflow.slots for g in siblings}
        holders: dict[tuple[Slot, int], list[int]] = {}
        for turn in range(self.workflow.num_turns):
            slots = self._slots_of_turn(turn)
            for child, replies in enumerate(itertools.product(siblings, repeat=len(slots))):
                for slot, g in zip(slots, replies, strict=True):
                    holders.setdefault((slot, g), []).append(child)
        return holders

    def _set_returns(self, rollout: Rollout, played: torch.Tensor) -> None:
        if not (self._branches and self.model.training):
            super()._set_returns(rollout, played)
            return
        rollout.returns, rollout.counted = tree_returns(
            rollout.rewards, played, rollout.counted, self._num_children, self.args.gamma_turn
        )

    def _group_advantages(self, rollout: Rollout) -> torch.Tensor:
        return self._over_siblings(rollout, kind=self.args.advantage, scale=self.args.scale_rewards)
