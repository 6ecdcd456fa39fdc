"""Runs in which a reward model is exploited end; others go on."""

import random

import pytest
from transformers import TrainerControl, TrainerState

from marcog_trl.preferences import OveroptimisationCallback
from marcog_trl.preferences.overoptimisation import overoptimised


UP, DOWN = [0.1 * i for i in range(12)], [1 - 0.05 * i for i in range(12)]


def test_gold_has_to_fall_in_two_windows_while_the_proxy_rises():
    best, now = overoptimised(UP, DOWN, 4)
    assert best == pytest.approx(sum(DOWN[:4]) / 4) and now == pytest.approx(sum(DOWN[8:]) / 4)
    assert overoptimised(UP, UP, 4) is None
    assert overoptimised(DOWN, DOWN, 4) is None  # both fall: nothing is exploited
    assert overoptimised(UP[:8], DOWN[:8], 4) is None  # one window below the best
    assert overoptimised(UP[:11], DOWN[:11], 4) is None  # the window has not ended
    assert overoptimised(UP, [1] * 4 + [0] * 4 + [1] * 4, 4) is None  # recovered


def test_noise_rarely_ends_a_run():
    rng = random.Random(0)

    def ends(drop):
        gold = [rng.gauss(0.5 - drop * i, 0.1) for i in range(100)]
        proxy = [rng.gauss(0.5 + abs(drop) * i, 0.1) for i in range(100)]
        return any(overoptimised(proxy[:t], gold[:t], 10) for t in range(1, 101))

    assert sum(ends(0.0) for _ in range(100)) <= 10
    assert sum(ends(0.003) for _ in range(100)) >= 90


def test_callback_reads_the_log_and_stops_training(caplog):
    callback = OveroptimisationCallback("execution_reward", window=4)
    state, control = TrainerState(global_step=12), TrainerControl()
    for proxy, gold in zip(UP, DOWN, strict=True):
        assert not control.should_training_stop
        state.log_history += [
            {"rewards/reward_model/mean": proxy, "rewards/execution_reward/mean": gold},
            {"eval_rewards/execution_reward/mean": 1.0},
        ]
        callback.on_log(None, state, control)
    assert control.should_training_stop
    assert "at step 12: execution_reward fell from 0.925 to 0.525 while reward_model rose" in caplog.text
    with pytest.raises(ValueError, match=r"window=1 must be at least 2\. Set window=10\."):
        OveroptimisationCallback("execution_reward", window=1)
