"""Learning from preferences: pairs of episodes, what is trained on them, and rounds of both."""

from marcog_trl.preferences.iterative_config import IterativeMADPOConfig
from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.marlhf_config import IterativeMARLHFConfig
from marcog_trl.preferences.pairs import collect_preferences
from marcog_trl.preferences.reward_config import TeamRewardConfig
from marcog_trl.preferences.reward_model import TeamRewardModel
from marcog_trl.preferences.reward_report import reward_model_report
from marcog_trl.preferences.reward_trainer import TeamRewardTrainer, hold_out_problems
from marcog_trl.preferences.rounds import Round, Rounds, RoundsSettings
from marcog_trl.preferences.untrained import save_untrained_team


__all__ = [
    "IterativeMADPOConfig",
    "IterativeMARLHFConfig",
    "MADPOConfig",
    "MADPOTrainer",
    "Round",
    "Rounds",
    "RoundsSettings",
    "TeamRewardConfig",
    "TeamRewardModel",
    "TeamRewardTrainer",
    "collect_preferences",
    "hold_out_problems",
    "reward_model_report",
    "save_untrained_team",
]
