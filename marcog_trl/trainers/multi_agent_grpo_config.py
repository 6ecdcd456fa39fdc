"""Configuration of [`MultiAgentGRPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import COUNT, Range, check_choice
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig


@dataclass
class MultiAgentGRPOConfig(MultiAgentConfig):
    """
    Configuration of [`MultiAgentGRPOTrainer`].

    Args:
        > Parameters that control credit

        advantage (`str`, *optional*, defaults to `"mean"`):
            What a return is compared with: the `"mean"` of its siblings (MAGRPO), the mean of its other siblings
            (`"rloo"`, MARLOO), the `"max"` of its siblings (MAReMax), or nothing (`"none"`, MAREINFORCE). Siblings are
            the replies of the same slot to the same problem.
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            Standard deviation that divides the advantages: of the siblings (`"group"`), of all rows of the generation
            batch (`"batch"`), of all rows of the same agent in it (`"agent"`), or `"none"`. It never re-centres.

        > Parameters that control joint actions

        joint_mode (`str`, *optional*, defaults to `"align"`):
            `"align"`: the g-th replies of all agents are evaluated together. `"cross"`: every combination of their
            replies is, and the return of a reply is the mean over the combinations that hold it. Agents must then speak at
            the same moment, and may be 4 at most.
        turn_tree (`bool`, *optional*, defaults to `False`):
            Whether every joint action of a turn branches into `num_generations` of the next turn, siblings being the
            replies at the same node. Otherwise episodes are lines, and siblings the replies of the same slot. Evaluation
            plays lines.
        max_joint_actions (`int`, *optional*, defaults to `1024`):
            The most joint actions that may be evaluated per problem, in trees and in cross mode.
    """

    _scales_rewards: ClassVar[bool] = True
    _ranges: ClassVar[dict[str, Range]] = {**MultiAgentConfig._ranges, "max_joint_actions": COUNT}

    # Parameters that control credit
    advantage: str = field(
        default="mean",
        metadata={
            "help": "Baseline of a return: 'mean' of the siblings (MAGRPO), 'rloo' (MARLOO), 'max' (MAReMax) or 'none' "
            "(MAREINFORCE)."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Standard deviation that divides advantages: 'none', 'group', 'batch' or 'agent'."},
    )

    # Parameters that control joint actions
    joint_mode: str = field(
        default="align",
        metadata={
            "help": "'align': the g-th replies of all agents are evaluated together; 'cross': all combinations."
        },
    )
    turn_tree: bool = field(
        default=False,
        metadata={"help": "Whether every joint action branches into num_generations of the next turn."},
    )
    max_joint_actions: int = field(
        default=1024,
        metadata={"help": "The most joint actions per problem that may be evaluated, in trees and in cross mode."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("joint_mode", self.joint_mode, ("align", "cross"))
        if self.joint_mode == "cross" and self.num_turns > 1 and not self.turn_tree:
            raise ValueError(
                f"joint_mode='cross' with num_turns={self.num_turns} needs turn_tree=True, since every joint action has its own "
                "next turn. Set turn_tree=True, or num_turns=1."
            )
        check_choice("advantage", self.advantage, ("mean", "rloo", "max", "none"))
        check_choice("scale_rewards", self.scale_rewards, ("none", "group", "batch", "agent"))
        if self.num_generations == 1 and (self.advantage != "none" or self.scale_rewards == "group"):
            raise ValueError(
                f"advantage={self.advantage!r} with scale_rewards={self.scale_rewards!r} compares the replies of a group, but "
                "num_generations=1. Set num_generations=4, for example."
            )
