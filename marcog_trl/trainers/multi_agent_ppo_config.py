"""Configuration of [`MultiAgentPPOTrainer`]."""

import math
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
            `"team"`: the value head also gets the prompt states of the agents that act at the same stage or earlier
            (MAPPO). `"agent"`: it gets only the agent's own row (IPPO). `"group"`: the baseline mixes the value of the team
            with the mean return of the problem's other episodes, in the share that had the smallest error in earlier
            batches. `"none"`: there is no value head, and the mean return of the problem's episodes is the baseline.
        critic_backprop (`bool`, *optional*, defaults to `False`):
            Whether to backpropagate the value loss into the policy.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the value head. Defaults to 0.256 divided by its width, the hidden size of the model but at most
            1024, since wider heads learn faster.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss, which is that of standardised returns.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Maximum distance of a value from its value at rollout, in standard deviations of the returns.

        > Parameters that control credit

        counterfactual_critic (`float` or `str`, *optional*, defaults to `0.0`):
            With `credit="counterfactual"`, share α of the critic in the baseline, in [0, 1]: `(1 − α)` times the mean of the other
            siblings plus `α` times the critic's value. `"auto"` estimates the best α from earlier batches. A reply without
            live siblings has the critic's value as its baseline, or with 0 no advantage.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`):
            GAE's lambda within a reply, in [0, 1]. Below 1, a constant error of the critic favours short or long replies.
        lam_turn (`float`, *optional*):
            GAE's lambda across turns, in [0, 1]. Defaults to `lam`.
        kl_penalty (`str`, *optional*, defaults to `"loss"`):
            How to apply the KL divergence to the reference model, with coefficient `beta`: as TRL's term of the `"loss"`, or
            subtracted from the token rewards (`"reward"`).
        advantage_normalization (`str`, *optional*, defaults to `"agent"`):
            Normalise advantages over the live tokens of each `"agent"`, of the whole `"batch"`, or not at all (`"none"`).
    """

    _ranges: ClassVar[dict[str, Range]] = {
        **MultiAgentConfig._ranges,
        **dict.fromkeys(("critic_learning_rate", "vf_coef"), NOT_NEGATIVE),
        **dict.fromkeys(("gamma", "lam", "lam_turn"), UNIT),
        "cliprange_value": Range(0, above=True, infinite=True),
    }

    # Parameters that control the critic
    critic: str = field(
        default="team",
        metadata={"help": "Baseline: 'team' (MAPPO), 'agent' (IPPO), 'group' (mixed with siblings), 'none'."},
    )
    critic_backprop: bool = field(
        default=False, metadata={"help": "Whether to backpropagate the value loss into the policy."}
    )
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the value head. Default: 0.256 / min(hidden size, 1024)."}
    )
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(
        default=0.2,
        metadata={
            "help": "Maximum distance of a value from its value at rollout, in standard deviations of the returns."
        },
    )

    # Parameters that control credit
    counterfactual_critic: str = field(  # a number in text, because the command line has no type for both
        default="0.0",
        metadata={"help": "Share of the critic in the baseline with credit='counterfactual': a number, or 'auto'."},
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per token, in [0, 1]."})
    lam: float = field(default=1.0, metadata={"help": "GAE's lambda within a reply, in [0, 1]."})
    lam_turn: float | None = field(default=None, metadata={"help": "GAE's lambda across turns. Default: lam."})
    kl_penalty: str = field(
        default="loss",
        metadata={"help": "Where to apply the KL divergence with coefficient beta: 'loss' or 'reward'."},
    )
    advantage_normalization: str = field(
        default="agent",
        metadata={"help": "Normalise advantages over each 'agent', the 'batch', or not at all ('none')."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("critic", self.critic, ("team", "agent", "group", "none"))
        self._check_counterfactual()
        check_choice("kl_penalty", self.kl_penalty, ("loss", "reward"))
        check_choice("advantage_normalization", self.advantage_normalization, ("agent", "batch", "none"))
        if self.critic in ("none", "group") and self.num_generations == 1:
            raise ValueError(
                f"critic={self.critic!r} compares the episodes of a problem, but num_generations=1. Set num_generations=4, or "
                "critic='team'."
            )

    @property
    def critic_share(self) -> float | None:
        """Share of the critic in a baseline that it is mixed into, or `None` to estimate it."""
        return (
            None
            if self.critic == "group" or self.counterfactual_critic == "auto"
            else float(self.counterfactual_critic)
        )

    def _check_counterfactual(self) -> None:
        value = self.counterfactual_critic
        try:
            share = 1.0 if value == "auto" else float(value)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 <= share <= 1:
            raise ValueError(f"counterfactual_critic={value!r} must be a number in [0, 1], or 'auto'.")
        if share == 0:
            if self.credit == "counterfactual" and self.num_generations == 1:
                raise ValueError(
                    "credit='counterfactual' compares replies, but num_generations=1. Set num_generations=4, or "
                    "counterfactual_critic=1.0."
                )
            return
        for name, given, needed in (("credit", self.credit, "counterfactual"), ("critic", self.critic, "team")):
            if given in ("group", "none"):
                raise ValueError(
                    f"counterfactual_critic={value!r} does not support {name}={given!r}. Set {name}={needed!r}, or "
                    "counterfactual_critic=0.0."
                )
