"""Ends a run whose reward model is being exploited."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence

from transformers import TrainerCallback

from marcog_trl.checks import Range, check_number


logger = logging.getLogger(__name__)


class OveroptimisationCallback(TrainerCallback):
    """
    Ends training when the reward that a reward model stands for falls while its score still rises.

    Put the true reward beside the reward model with weight 0, so that it is measured and not trained on. Both are read from the
    log and averaged over windows of logs. Training ends when, in two windows in a row, gold is more than two standard errors
    below its best window, and the proxy above what it was there.

    Example:

    ```python
    >>> args = MultiAgentGRPOConfig("outputs/team", workflow="collaboration", beta=0.02, reward_weights=[1, 0])
    >>> trainer = MultiAgentGRPOTrainer(model, [reward_model, "execution_reward"], args, problems)
    >>> trainer.add_callback(OveroptimisationCallback(gold="execution_reward"))
    ```

    Args:
        gold (`str`): Name of the true reward, as it is logged: `rewards/<gold>/mean`.
        proxy (`str`, *optional*, defaults to `"reward_model"`): Name of the reward that is trained on.
        window (`int`, *optional*, defaults to `10`): Logs that are averaged, at least 2.
    """

    def __init__(self, gold: str, proxy: str = "reward_model", window: int = 10):
        check_number("window", window, Range(2), whole=True, default=10)
        self.gold = gold
        self.proxy = proxy
        self.window = window

    def on_log(self, args, state, control, **kwargs):
        names = f"rewards/{self.proxy}/mean", f"rewards/{self.gold}/mean"
        logs = [tuple(log[name] for name in names) for log in state.log_history if names[0] in log and names[1] in log]
        found = overoptimised([proxy for proxy, _ in logs], [gold for _, gold in logs], self.window)
        if found is not None:
            logger.warning(
                "Training ends at step %d: %s fell from %.3f to %.3f while %s rose. An earlier checkpoint has the better team.",
                state.global_step, self.gold, *found, self.proxy,
            )  # fmt: skip
            control.should_training_stop = True


def overoptimised(proxy: Sequence[float], gold: Sequence[float], window: int) -> tuple[float, float] | None:
    """
    Whether gold fell below its best while the proxy rose.

    A single low window says little: the best of many noisy windows is often two standard errors above the last one. Two in a row
    rarely are.

    Args:
        proxy, gold (`Sequence[float]` of length L): The mean rewards of each log, in order.
        window (`int`): Logs that are averaged.

    Returns:
        `tuple[float, float]`, *optional*: Gold's best window and its last one, where a window has just ended and each of the last
        two is more than two standard errors (of the difference) below the best, with the proxy above what it was; else `None`.
    """
    if len(gold) % window or len(gold) < 3 * window:
        return None
    starts = range(0, len(gold), window)
    golds = [gold[start : start + window] for start in starts]
    proxies = [statistics.fmean(proxy[start : start + window]) for start in starts]
    means = [statistics.fmean(values) for values in golds]
    best = max(range(len(means) - 2), key=means.__getitem__)

    def fell(last: int) -> bool:
        error = math.sqrt((statistics.variance(golds[best]) + statistics.variance(golds[last])) / window)
        return means[best] - means[last] > 2 * error and proxies[last] > proxies[best]

    return (means[best], means[-1]) if fell(-2) and fell(-1) else None
