"""Baselines: the base model as a team, and as one agent with the budget of a team."""

import pytest
import teams
import torch

from marcog_trl import MultiAgentPPOTrainer
from marcog_trl.evaluation.baselines import single_agent, untrained_team
from marcog_trl.team.settings import TeamSettings


TESTED = teams.dataset(2, test=[["assert f(1)"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)
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
        team = single_agent(saved, **EXECUTION)
        assert team.agents == ["solver"] and team.workflow.num_turns == 2
        assert team.settings.max_completion_length == 2 * 6
        assert len(team.workflow.slots) * team.settings.max_completion_length == 2 * 2 * 6
        assert team.settings.temperature == 0.6 and team.settings.feedback == "passed"
        assert team.description.rewards == ["execution_reward"]

    def test_is_untrained(self, saved):
        assert not single_agent(saved, **EXECUTION).own_weights()

    def test_settings_are_those_of_the_team(self, saved):
        team = single_agent(saved, max_completion_length=9, num_turns=1, **EXECUTION)
        assert team.workflow.num_turns == 1 and team.settings.max_completion_length == 2 * 9

    def test_its_model_is_loaded_as_asked_for(self, saved):
        team = single_agent(saved, model_init_kwargs={"dtype": "bfloat16"}, **EXECUTION)
        assert team.model.dtype == torch.bfloat16

    def test_is_asked_for_the_code_unless_it_has_another_text(self, saved):
        problem = dict(TESTED[0])
        [agent] = single_agent(saved, **EXECUTION).workflow.agents
        for roles, text in (
            (None, agent.role),
            ({"solver": "{problem}\n\nWrite f.", "main": "Write."}, "{problem}\n\nWrite f."),
            ({"solver": ""}, ""),
        ):
            team = single_agent(saved, roles=roles, num_turns=1, **EXECUTION)
            [episode] = team.play([problem])
            asked = [{"role": "user", "content": text.replace("{problem}", problem["prompt"].rstrip())}]
            asked = asked if text else problem["prompt"]
            assert agent.role and episode.rows[0].prompt == asked
        with pytest.raises(ValueError, match="roles has a text for 'nobody'"):
            single_agent(saved, roles={"nobody": "Write f."}, **EXECUTION)

    def test_refuses_what_is_no_team(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no team\.json"):
            single_agent(tmp_path)


def test_an_untrained_team_is_the_model_as_it_is(tiny_model):
    team = untrained_team(tiny_model, TeamSettings(workflow="collaboration", **EXECUTION))
    assert team.agents == ["helper", "main"] and not team.own_weights()
