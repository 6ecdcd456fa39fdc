"""Stages of a workflow, and how many replies each of them has in the same context."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marcog_trl.agents import Slot, Workflow
from marcog_trl.rollout.rehearsal import stages_of
from marcog_trl.rollout.tree import Tree


PROBLEMS_TO_PLAY = 32


def fanout_of(args: Any, stages: Sequence[tuple[Slot, ...]]) -> list[int]:
    """Returns the number of replies in the same context, by stage: `args.fanout`, or all at the first stage."""
    return list(args.fanout or [args.num_generations] + [1] * (len(stages) - 1))


def find_stages(workflow: Workflow, args: Any, problems: Iterable[Mapping[str, Any]] | None) -> list[tuple[Slot, ...]]:
    """
    Returns the slots of each stage, from the first problems.

    Raises:
        ValueError: If there are no problems, agents speak in another order than that of the slots, `args.fanout` does not fit
            the stages, or there are more than `args.max_joint_actions`.
    """
    if problems is None:
        raise ValueError(
            "credit='counterfactual' needs problems to find out who speaks when. Leave out --prompt-tokens."
        )
    stages = stages_of(workflow, list(itertools.islice(problems, PROBLEMS_TO_PLAY)))
    fanout, title = fanout_of(args, stages), type(workflow).__name__
    names = [" and ".join(slot.agent for slot in stage) for stage in stages]
    if len(fanout) != len(stages):
        raise ValueError(
            f"fanout={fanout} has {len(fanout)} entries, but an episode of {title} has {len(stages)} stages: {', '.join(names)}. "
            f"Set fanout={[2] * len(stages)} and num_generations={2 ** len(stages)}, for example."
        )
    alone = [name for name, replies in zip(names, fanout, strict=True) if replies == 1]
    if alone and len(stages) > 1 and args.critic_share == 0:
        warnings.warn(
            f"fanout={fanout} gives {', '.join(alone)} one reply in each context, which has nothing to be compared with: these "
            "stages are not trained. Give them at least 2, or set critic_mix in trainers with a critic.",
            stacklevel=2,
        )
    evaluations = sum(Tree.of_stages(stages, fanout).joint_actions)
    if evaluations > args.max_joint_actions:
        raise ValueError(
            f"max_joint_actions={args.max_joint_actions} is below the {evaluations} joint actions per problem of fanout={fanout}. "
            f"Set max_joint_actions={evaluations}, or a smaller fanout."
        )
    return stages
