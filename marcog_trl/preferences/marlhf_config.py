"""Configuration of MARLHF in rounds, for its recipe."""

from dataclasses import dataclass, field
from typing import ClassVar

from marcog_trl.checks import COUNT, POSITIVE, Range, check_numbers
from marcog_trl.preferences.rounds import RoundsSettings
from marcog_trl.trainers.config import MultiAgentGRPOConfig


@dataclass
class IterativeMARLHFConfig(RoundsSettings, MultiAgentGRPOConfig):
    """
    Configuration of rounds of MARLHF: [`MultiAgentGRPOConfig`] for the reinforcement learning of a round, [`RoundsSettings`], and
    what the reward model of a round is trained with.

    Args:
        start_team (`str`, *optional*):
            Folder or Hub repository of a saved team that the first round begins with. By default the team is untrained.
        reward_model (`str`, *optional*):
            Folder of a saved [`TeamRewardModel`] to use in all rounds. By default every round trains its own, on its pairs.
        reward_learning_rate (`float`, *optional*, defaults to `1e-4`): Learning rate of the reward model.
        reward_num_train_epochs (`float`, *optional*, defaults to `1.0`): Passes over the pairs.
        reward_batch_size (`int`, *optional*, defaults to `8`): Pairs per optimizer step of the reward model and process.
        reward_max_length (`int`, *optional*, defaults to `2048`): Tokens of the longest transcript; pairs with a longer one are
            left out, and their number is reported.
        held_out_problems (`float`, *optional*, defaults to `0.1`): Share of the problems, between 0 and 1, whose pairs measure the
            reward model and do not train it.
        beta (`float`, *optional*, defaults to `0.02`): Coefficient of the KL divergence from the initial team.
    """

    marlhf_ranges: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("reward_learning_rate", "reward_num_train_epochs"), POSITIVE),
        **dict.fromkeys(("reward_batch_size", "reward_max_length"), COUNT),
        "held_out_problems": Range(0, 1, above=True, below=True),
    }
    _ranges: ClassVar[dict[str, Range]] = {
        **MultiAgentGRPOConfig._ranges, **RoundsSettings.rounds_ranges, **marlhf_ranges
    }  # fmt: skip
    init_core_scale: ClassVar[float] = 1.0  # an untrained team without latents has no cores

    beta: float = field(default=0.02, metadata={"help": "Coefficient of the KL divergence from the initial team."})
    start_team: str | None = field(
        default=None, metadata={"help": "Saved team that the first round begins with. Default: an untrained one."}
    )
    reward_model: str | None = field(
        default=None, metadata={"help": "Saved reward model for all rounds. Default: each round trains its own."}
    )
    reward_learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of the reward model."})
    reward_num_train_epochs: float = field(default=1.0, metadata={"help": "Its passes over the pairs."})
    reward_batch_size: int = field(default=8, metadata={"help": "Pairs per optimizer step and process."})
    reward_max_length: int = field(default=2048, metadata={"help": "Tokens of the longest transcript."})
    held_out_problems: float = field(
        default=0.1, metadata={"help": "Share of the problems whose pairs measure the reward model."}
    )

    def __post_init__(self):
        MultiAgentGRPOConfig.__post_init__(self)
        self.check_rounds()
        check_numbers(self, self._ranges)
        if self.full_finetuning:
            raise ValueError(
                "full_finetuning=True is not supported in rounds: each continues the adapter of the one before. Set it to False."
            )
        for name in ("eval_strategy", "push_to_hub"):
            value = getattr(self, name)
            if value not in ("no", False):
                raise ValueError(
                    f"{name}={value!r} is not supported in rounds: the team is evaluated after every round, and "
                    f"recipes/export.py pushes it. Remove {name}."
                )
