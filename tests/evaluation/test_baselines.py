"""Baselines: the base model as a team, and as one agent with the budget of a team."""

import pytest
import teams

from marcog_trl import MultiAgentPPOTrainer
from marcog_trl.evaluation.baselines import single_agent, untrained_team


TESTED = teams.dataset(2, test=[["assert f"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)
EXECUTION = {"isolation": "best_effort", "num_workers": 1}


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """Two agents, two turns, six tokens a reply, and a reward that needs both."""
    path = tmp_path_factory.mktemp("saved")
    trainer = teams.make(
        tiny_model, path, MultiAgentPPOTrainer, workflow="collaboration", num_turns=2, feedback="passed", data=TESTED,
        reward="collaboration_reward", temperature=0.6, per_device_train_batch_size=8, **EXECUTION,
    )  # fmt: skip
    trainer.save_model()
    trainer.executor.close()
    return path


class TestSingleAgent:
    def test_may_write_what_the_team_may(self, saved):
        trainer = single_agent(saved, TESTED, **EXECUTION)
        assert trainer.agents == ["solver"] and trainer.workflow.num_turns == 2
        assert trainer.args.max_completion_length == 2 * 6
        assert len(trainer.workflow.slots) * trainer.args.max_completion_length == 2 * 2 * 6
        assert trainer.args.temperature == 0.6 and trainer.args.feedback == "passed"
        assert trainer.reward_func_names == ["execution_reward"]

    def test_is_untrained(self, saved):
        trainer = single_agent(saved, TESTED, **EXECUTION)
        changes = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert changes and not any(p.any() for p in changes)

    def test_settings_are_those_of_the_team(self, saved):
        trainer = single_agent(saved, TESTED, max_completion_length=9, num_turns=1, **EXECUTION)
        assert trainer.workflow.num_turns == 1 and trainer.args.max_completion_length == 2 * 9

    def test_refuses_what_is_no_team(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no team\.json"):
            single_agent(tmp_path, TESTED)


def test_an_untrained_team_has_a_new_adapter_that_changes_nothing(tiny_model):
    trainer = untrained_team(tiny_model, TESTED, workflow="collaboration", **EXECUTION)
    assert trainer.agents == ["helper", "main"]
    assert not any(p.any() for name, p in trainer.model.named_parameters() if "lora_B" in name)
