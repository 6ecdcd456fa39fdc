"""Configuration of [`MultiAgentPPOTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import NOT_NEGATIVE, UNIT, Range, check_choice
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig


@dataclass
class MultiAgentPPOConfig(MultiAgentConfig):
    """
    Configuration of [`MultiAgentPPOTrainer`].

    Args:
        > Parameters that control the critic

        critic (`str`, *optional*, defaults to `"team"`):
            `"team"`: the value head also sees the prompt states of the agents that act at the same stage or earlier
            (MAPPO). `"agent"`: it sees the agent's own row only (IPPO). `"none"`: no value head; the group's mean return
            is the baseline.
        critic_backprop (`bool`, *optional*, defaults to `False`):
            Whether the value loss reaches the policy.
        critic_learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate of the value head.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Largest step of a value away from its value at rollout, in reward units.

        > Parameters that control credit

        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`):
            GAE's bias-variance trade-off within a reply, in [0, 1]. Below 1, a critic that is off by a constant credits
            replies for being short, or for being long.
        lam_turn (`float`, *optional*):
            The same across turns. Defaults to `lam`.
        kl_penalty (`str`, *optional*, defaults to `"loss"`):
            Where the KL to the reference acts, with coefficient `beta`: `"loss"` is TRL's own term, `"reward"` takes it
            from the token rewards.
        advantage_normalization (`str`, *optional*, defaults to `"agent"`):
            Over which live tokens advantages are normalised: those of the same `"agent"`, of the whole `"batch"`, or
            `"none"`.
    """

    _ranges: ClassVar[dict[str, Range]] = {
        **MultiAgentConfig._ranges,
        **dict.fromkeys(("critic_learning_rate", "vf_coef"), NOT_NEGATIVE),
        **dict.fromkeys(("gamma", "lam", "lam_turn"), UNIT),
        "cliprange_value": Range(0, above=True, infinite=True),
    }

    # Parameters that control the critic
    critic: str = field(default="team", metadata={"help": "Value head: 'team' (MAPPO), 'agent' (IPPO) or 'none'."})
    critic_backprop: bool = field(default=False, metadata={"help": "Whether the value loss reaches the policy."})
    critic_learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of the value head."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(
        default=0.2, metadata={"help": "Largest step of a value away from its value at rollout, in reward units."}
    )

    # Parameters that control credit
    gamma: float = field(default=1.0, metadata={"help": "Discount per token, in [0, 1]."})
    lam: float = field(default=1.0, metadata={"help": "GAE's lambda within a reply, in [0, 1]."})
    lam_turn: float | None = field(default=None, metadata={"help": "GAE's lambda across turns. Default: lam."})
    kl_penalty: str = field(
        default="loss", metadata={"help": "Where the KL with coefficient beta acts: 'loss' or 'reward'."}
    )
    advantage_normalization: str = field(
        default="agent", metadata={"help": "Normalise advantages over each 'agent', the 'batch' or 'none'."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("critic", self.critic, ("team", "agent", "none"))
        check_choice("kl_penalty", self.kl_penalty, ("loss", "reward"))
        check_choice("advantage_normalization", self.advantage_normalization, ("agent", "batch", "none"))
        if self.critic == "none" and self.num_generations == 1:
            raise ValueError(
                "critic='none' takes the mean return of a problem's episodes as the baseline, but num_generations=1. Set "
                "num_generations=4, or critic='team'."
            )
