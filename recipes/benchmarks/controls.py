"""
A control of the quickstart: with rewards that are shuffled across the episodes of a batch, nothing can be learned.

    python recipes/train_magrpo.py --advantage none --reward recipes/benchmarks/controls.py:shuffled_execution_reward
"""

import random

from marcog_trl import execution_reward
from marcog_trl.rewards import needs_tests


_rng = random.Random(0)


@needs_tests
def shuffled_execution_reward(prompts, completions, **kwargs):
    rewards = execution_reward(prompts, completions, **kwargs)
    _rng.shuffle(rewards)
    return rewards
