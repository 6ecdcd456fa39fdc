"""Runs that fail are explained: one warning each, once, with the setting to change; runs that learn are not disturbed."""

import re
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import teams

from marcog_trl import MultiAgentGRPOTrainer, SHPPOConfig
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.report.diagnosis import CHECKS, CRITIC_LOGS, LOGS, Diagnosis
from marcog_trl.rewards.failures import FAILURES


HEALTHY = {
    "reward": 0.3, "advantages/zero": 0.4, "latent/distance": 0.2, "critic/explained_variance": 0.1,
    "agents/a/clipped_ratio": 0.1, "agents/b/clipped_ratio": 0.0, "failures/tests": 0.7, "failures/no_code": 0.0,
}  # fmt: skip
FAILING = {
    "reward": {"reward": 0.0},
    "groups": {"advantages/zero": 1.0},
    "latents": {"latent/distance": 1e-4},
    "critic": {"critic/explained_variance": 0.01},
    "length": {"agents/b/clipped_ratio": 0.9},
}


ARGS = SHPPOConfig("out", use_cpu=True, bf16=False, report_to="none")


def play(entries, main=True):
    """The warnings of a run with these logs, and its diagnosis."""
    diagnosis, history = Diagnosis(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, entry in enumerate(entries):
            history.append({"step": step, **entry})
            state = SimpleNamespace(log_history=history, is_world_process_zero=main)
            diagnosis.on_log(ARGS, state, None)
    return [str(warning.message) for warning in caught], diagnosis


@pytest.mark.parametrize("name", CHECKS)
class TestChecks:
    def test_one_warning_with_the_setting_to_change(self, name):
        messages, diagnosis = play([HEALTHY | FAILING[name]] * 60)
        (message,) = messages
        assert diagnosis.found == {name: message}
        settings = set(re.findall(r"\w+", message))
        assert settings & ({f.name for f in fields(SHPPOConfig)} | {f.name for f in fields(TeamArguments)})

    def test_not_before_it_lasts_and_not_once_it_ends(self, name):
        logs = CRITIC_LOGS if name == "critic" else LOGS
        wrong = HEALTHY | FAILING[name]
        assert play([wrong] * (logs - 1))[0] == []
        assert len(play([wrong] * logs)[0]) == 1
        better = HEALTHY | ({"agents/b/clipped_ratio": 0.0} if name == "length" else {})
        assert play([wrong] * (2 if name == "length" else logs - 1) + [better] * 60)[0] == []


@pytest.mark.parametrize("kind", FAILURES)
def test_a_reward_of_0_says_which_check_fails_most(kind):
    shares = dict.fromkeys((f"failures/{other}" for other in FAILURES), 0.05) | {f"failures/{kind}": 0.75}
    (message,) = play([{"reward": 0.0, **shares}] * LOGS)[0]
    assert f"What fails most: {FAILURES[kind]}, in 75% of the episodes." in message
    assert "(steps 0 to 4)" in message


@pytest.mark.parametrize(("kind", "is_cause"), [("no_code", True), ("syntax", True), ("tests", False)])
def test_code_that_is_cut_off_is_a_matter_of_length(kind, is_cause):
    log = {"reward": 0.0, f"failures/{kind}": 1.0, "agents/a/clipped_ratio": 0.8}
    found = play([log] * LOGS)[1].found
    assert ("raise max_completion_length" in found["reward"]) == is_cause and "80% of the replies" in found["length"]


def test_a_reward_of_0_without_tests_points_to_the_function():
    (message,) = play([{"reward": 0.0}] * LOGS)[0]
    assert "Check the reward function" in message and "log_completions=True" in message


def test_equal_rewards_are_equal_siblings(tiny_model, tmp_path):
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, reward=lambda completions, **_: [0.7] * len(completions),
        workflow=teams.Pair(), num_generations=4, max_steps=LOGS,
    )  # fmt: skip
    teams.script(trainer)
    with pytest.warns(UserWarning, match=r"All episodes of a problem earned the same .*num_generations \(now 4\)"):
        trainer.train()
    assert teams.logged(trainer, "advantages/zero") == [1.0] * LOGS
