"""Learning from preferences: pairs of episodes, what is trained on them, and rounds of both."""

from marcog_trl.preferences.experts import expert_candidates
from marcog_trl.preferences.iterative_config import IterativeMADPOConfig
from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.pairs import collect_preferences
from marcog_trl.preferences.rounds import Round, Rounds, RoundsSettings
from marcog_trl.preferences.untrained import save_untrained_team


__all__ = [
    "IterativeMADPOConfig",
    "MADPOConfig",
    "MADPOTrainer",
    "Round",
    "Rounds",
    "RoundsSettings",
    "collect_preferences",
    "expert_candidates",
    "save_untrained_team",
]
