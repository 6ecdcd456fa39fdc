"""Configuration of [`MultiAgentGRPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import check_choice
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig


@dataclass
class MultiAgentGRPOConfig(MultiAgentConfig):
    """
    Configuration of [`MultiAgentGRPOTrainer`].

    Args:
        > Parameters that control credit

        advantage (`str`, *optional*, defaults to `"mean"`):
            Baseline of a return: the `"mean"` of its siblings (MAGRPO), the mean of its other siblings (`"rloo"`, MARLOO),
            the `"max"` of its siblings (MAReMax), or no baseline (`"none"`, MAREINFORCE). Siblings are the replies of the
            same slot to the same problem. With `credit="counterfactual"`, the baseline is always the mean of the other
            siblings.
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            Divides the advantages by the standard deviation of the siblings (`"group"`), of all rows of the generation
            batch (`"batch"`), or of the rows of the same agent in it (`"agent"`). `"none"` does not scale. Does not change
            the mean.
        multi_objective_aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`):
            As in [`~trl.GRPOConfig`]. `"normalize_then_sum"` normalises the rewards of each function over siblings before they
            are weighted and summed. It needs one turn, `credit="group"`, `joint_mode="align"` and `advantage="mean"`, and does
            not read `scale_rewards`.

        > Parameters that control joint actions

        joint_mode (`str`, *optional*, defaults to `"align"`):
            `"align"` evaluates the g-th replies of all agents together. `"cross"` evaluates every combination of their
            replies. The return of a reply is then the mean over the combinations that contain it. `"cross"` needs agents
            that reply at the same time, and supports at most 4 agents.
        turn_tree (`bool`, *optional*, defaults to `False`):
            Whether every joint action branches into `num_generations` joint actions of the next turn. Siblings are then the
            replies at the same node. Evaluation never branches.
    """

    _scales_rewards: ClassVar[bool] = True

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
        metadata={"help": "Standard deviation to divide advantages by: 'none', 'group', 'batch' or 'agent'."},
    )

    # Parameters that control joint actions
    joint_mode: str = field(
        default="align",
        metadata={
            "help": "'align': evaluate the g-th replies of all agents together. 'cross': evaluate all combinations."
        },
    )
    turn_tree: bool = field(
        default=False,
        metadata={"help": "Whether every joint action branches into num_generations joint actions of the next turn."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("joint_mode", self.joint_mode, ("align", "cross"))
        if self.joint_mode == "cross" and self.num_turns > 1 and not self.turn_tree:
            raise ValueError(
                f"joint_mode='cross' with num_turns={self.num_turns} needs turn_tree=True, because every joint action has its "
                "own next turn. Set turn_tree=True, or num_turns=1."
            )
        check_choice("advantage", self.advantage, ("mean", "rloo", "max", "none"))
        check_choice("scale_rewards", self.scale_rewards, ("none", "group", "batch", "agent"))
        if self.credit == "counterfactual":
            for name, value, accepted in (
                ("joint_mode", self.joint_mode, ("align",)),
                ("turn_tree", self.turn_tree, (False,)),
                ("advantage", self.advantage, ("mean", "rloo")),
            ):
                if value not in accepted:
                    raise ValueError(
                        f"{name}={value!r} does not support credit='counterfactual', which has its own branches and baseline. "
                        f"Set {name}={accepted[0]!r}, or credit='group'."
                    )
        if self.multi_objective_aggregation == "normalize_then_sum":
            for name, value, accepted in (
                ("credit", self.credit, ("group",)),
                ("joint_mode", self.joint_mode, ("align",)),
                ("advantage", self.advantage, ("mean",)),
                ("scale_rewards", self.scale_rewards, ("none", "group", "batch")),
            ):
                if value not in accepted:
                    raise ValueError(
                        f"{name}={value!r} does not support multi_objective_aggregation='normalize_then_sum', which has its own "
                        f"baseline and scale. Set {name}={accepted[0]!r}, or multi_objective_aggregation='sum_then_normalize'."
                    )
        if self.num_generations == 1 and (self.advantage != "none" or self.scale_rewards == "group"):
            raise ValueError(
                f"advantage={self.advantage!r} with scale_rewards={self.scale_rewards!r} compares the replies of a group, but "
                "num_generations=1. Set num_generations=4, for example."
            )
