"""Group-relative policy optimisation for teams: MAGRPO, MARLOO, MAReMax and MAREINFORCE."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from datasets import Dataset

from marcog_trl.rollout.engine import replay
from marcog_trl.rollout.tree import Tree
from marcog_trl.trainers.algorithm import Algorithm
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.config import MultiAgentGRPOConfig
from marcog_trl.trainers.credit import normalized_by_function, over_siblings
from marcog_trl.trainers.trainer import MultiAgentTrainer


class GroupRelative(Algorithm):
    """
    Compares the return of a reply with those of its siblings: with four baselines, in joint actions that share replies, and in turns
    that branch.

    Args:
        args ([`MultiAgentGRPOConfig`]): Configuration.
        workflow ([`Workflow`]): The team's workflow.

    Source: MAGRPO (https://huggingface.co/papers/2508.04652), GRPO (https://huggingface.co/papers/2402.03300), RLOO
    (https://huggingface.co/papers/2402.14740) and ReMax (https://huggingface.co/papers/2310.10505).
    """

    skips_rows = True
    args: MultiAgentGRPOConfig

    def group_advantages(self, batch: TeamBatch) -> torch.Tensor:
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            weights = list(self.args.reward_weights or ())
            # Rewards of environments come last, with a weight of 1
            return normalized_by_function(batch, weights + [1.0] * (batch.scores.size(2) - len(weights)))
        return over_siblings(batch, kind=self.args.advantage, scale=self.args.scale_rewards)

    def tree(self, training: bool) -> Tree:
        args, num_turns = self.args, self.workflow.num_turns
        if training and (args.turn_tree or args.joint_mode == "cross"):
            return Tree.of_turns(self.workflow, [args.num_generations] * num_turns, args.joint_mode == "cross")
        return super().tree(training)

    def check(self, problems: Any) -> None:
        super().check(problems)
        args, num_turns, title = self.args, self.workflow.num_turns, type(self.workflow).__name__
        by_length = "mask_truncated_completions=True" if args.mask_truncated_completions else None
        if args.loss_type in ("grpo", "sapo"):
            by_length = f"loss_type={args.loss_type!r}"
        if by_length and args.advantage in ("none", "max") and args.credit == "group":
            favoured = "short" if args.advantage == "none" else "long"
            warnings.warn(
                f"advantage={args.advantage!r} with {by_length} favours {favoured} replies, whatever they say: its advantages have "
                "one sign, and rows count by their length. Set advantage='mean' or 'rloo', or loss_type='dapo' and "
                "mask_truncated_completions=False.",
                stacklevel=4,
            )
        if args.multi_objective_aggregation == "normalize_then_sum" and num_turns > 1:
            raise ValueError(
                f"multi_objective_aggregation='normalize_then_sum' needs episodes of one turn, but {title} has "
                f"num_turns={num_turns}. Set multi_objective_aggregation='sum_then_normalize', or num_turns=1."
            )
        if args.joint_mode == "cross":
            if len(self.agents) > 4:
                raise ValueError(
                    f"joint_mode='cross' supports at most 4 agents, but {title} has {len(self.agents)}. Set joint_mode='align'."
                )
            first, *later = [
                [slot.agent for slot in self.workflow.slots if slot.turn == turn] for turn in range(num_turns)
            ]
            for turn, agents in enumerate(later, 1):
                if agents != first:
                    raise ValueError(
                        f"joint_mode='cross' needs the same agents in every turn, but {title}.slots differ between turns 0 "
                        f"and {turn}. Set joint_mode='align'."
                    )
            if isinstance(problems, Dataset):
                [asked] = replay(self.workflow, problems[0], ())
                if isinstance(asked, dict) and len(asked) != len(first):
                    raise ValueError(
                        f"joint_mode='cross' needs agents that reply at the same time, but {title} asks {list(asked)} first "
                        "and others later. Set joint_mode='align'."
                    )
        evaluations = sum(self.tree(training=True).joint_actions)
        if (args.turn_tree or args.joint_mode == "cross") and evaluations > args.max_joint_actions:
            raise ValueError(
                f"max_joint_actions={args.max_joint_actions} is below the {evaluations} joint actions per problem of "
                f"joint_mode={args.joint_mode!r} with num_generations={args.num_generations}, {len(self.agents)} agents and "
                f"num_turns={num_turns}. Set max_joint_actions={evaluations}, or a smaller num_generations."
            )


class MultiAgentGRPOTrainer(MultiAgentTrainer):
    """
    GRPO for a team of LLM agents that share one model and one adapter.

    Extends [`~trl.GRPOTrainer`] by episodes of a workflow instead of single completions, returns over turns, four baselines
    per slot (`args.advantage`), counterfactual credit (`args.credit`), all combinations of the agents' replies
    (`args.joint_mode`), trees of turns (`args.turn_tree`), and loss weights by agent and turn. There is no critic.

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
    algorithm_class = GroupRelative
    args: MultiAgentGRPOConfig

    @property
    def _name(self) -> str:  # type: ignore[override]
        """Name of the algorithm, in model cards and reports."""
        return {"mean": "MAGRPO", "rloo": "MARLOO", "max": "MAReMax", "none": "MAREINFORCE"}[self.args.advantage]
