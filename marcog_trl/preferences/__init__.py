"""Learning from preferences: pairs of episodes, what is trained on them, and rounds of both."""

from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.pairs import collect_preferences
from marcog_trl.preferences.reward_model import TeamRewardModel
from marcog_trl.preferences.reward_trainer import TeamRewardConfig, TeamRewardTrainer, hold_out_problems
from marcog_trl.preferences.rounds import (
    IterativeMADPOConfig,
    IterativeMARLHFConfig,
    MADPORounds,
    MARLHFRounds,
    PreferenceRounds,
    Round,
    save_untrained_team,
)


__all__ = [
    "IterativeMADPOConfig",
    "IterativeMARLHFConfig",
    "MADPOConfig",
    "MADPORounds",
    "MADPOTrainer",
    "MARLHFRounds",
    "PreferenceRounds",
    "Round",
    "TeamRewardConfig",
    "TeamRewardModel",
    "TeamRewardTrainer",
    "collect_preferences",
    "hold_out_problems",
    "save_untrained_team",
]
