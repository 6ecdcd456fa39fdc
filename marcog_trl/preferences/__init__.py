"""Learning from preferences: pairs of episodes, and what is trained on them."""

from marcog_trl.preferences.madpo_config import MADPOConfig
from marcog_trl.preferences.madpo_trainer import MADPOTrainer
from marcog_trl.preferences.pairs import collect_preferences
from marcog_trl.preferences.untrained import save_untrained_team


__all__ = ["MADPOConfig", "MADPOTrainer", "collect_preferences", "save_untrained_team"]
