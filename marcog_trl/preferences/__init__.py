"""Learning from preferences: pairs of episodes, and what is trained on them."""

from marcog_trl.preferences.pairs import collect_preferences


__all__ = ["collect_preferences"]
