"""Configuration of [`MultiAgentGRPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.trainers.multi_agent_config import MultiAgentConfig, _choice


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
        metadata={"help": "Standard deviation that divides advantages: 'none', 'group', 'batch' or 'agent'."},
    )

    def __post_init__(self):
        super().__post_init__()
        _choice("advantage", self.advantage, ("mean", "rloo", "max", "none"))
        _choice("scale_rewards", self.scale_rewards, ("none", "group", "batch", "agent"))
        if self.num_generations == 1 and (self.advantage != "none" or self.scale_rewards == "group"):
            raise ValueError(
                f"num_generations=1 leaves advantage={self.advantage!r} with scale_rewards={self.scale_rewards!r} without "
                "siblings; num_generations=4 works"
            )
