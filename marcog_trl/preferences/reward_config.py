"""Configuration of [`TeamRewardTrainer`]."""

from dataclasses import dataclass, field

from trl import RewardConfig

from marcog_trl.trainers.config import run_on_cpu, use_new_names


@dataclass
class TeamRewardConfig(RewardConfig):
    """
    Configuration of [`TeamRewardTrainer`]: that of [`~trl.RewardTrainer`] with other defaults.

    > [!NOTE]
    > These parameters have default values different from [`~trl.RewardConfig`]:
    > - `center_rewards_coefficient`: Defaults to `0.01` instead of `None`, since scores have a free constant.
    > - `max_length`: Defaults to `2048` instead of `1024`: a transcript has the replies of all agents. Pairs with a longer one
    >   are left out, and their number is reported.
    """

    center_rewards_coefficient: float | None = field(
        default=0.01,
        metadata={"help": "Weight of the squared mean score of a pair, which keeps scores near 0."},
    )
    max_length: int | None = field(
        default=2048,
        metadata={"help": "Tokens of the longest transcript. Pairs with a longer one are left out."},
    )

    def __post_init__(self):
        run_on_cpu(self)
        use_new_names(self)
        super().__post_init__()
