"""A saved team comes back as it was."""

import json
import shutil

import pytest
import teams
import torch

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.evaluation.baselines import single_agent
from marcog_trl.team.team import Team


TEAMS = {
    "ppo": (MultiAgentPPOTrainer, {"critic": "agent"}),
    "latent": (SHPPOTrainer, {"latent_scope": "agent"}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
    "shared": (SHPPOTrainer, {"parameter_sharing": "shared", "critic": "none"}),
}
TESTED = teams.dataset(2, test=[["assert f(1)"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)


@pytest.fixture(scope="module", params=TEAMS)
def saved(request, tiny_model, tmp_path_factory):
    """A trained team and the folder where it lies."""
    trainer_class, options = TEAMS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    trainer = teams.make(
        tiny_model, path, trainer_class, workflow="collaboration", data=TESTED, reward="execution_reward",
        isolation="best_effort", num_workers=1, per_device_train_batch_size=4, **options,
    )  # fmt: skip
    teams.randomize(trainer.model.get_base_model().marcog_team)
    trainer.save_model()
    trainer.executor.close()
    return trainer, path


class TestFromPretrained:
    def test_gives_the_same_adapter_and_modules(self, saved):
        trainer, path = saved
        loaded = Team.from_pretrained(path)
        assert loaded.workflow.agents == trainer.workflow.agents
        weights, trained = loaded.own_weights(), trainer.team.own_weights()
        assert weights
        for name, tensor in weights.items():
            assert torch.equal(trained[name], tensor), name
        # What no reply depends on stays on disk
        assert {name.split(".")[1] for name in trained.keys() - weights.keys()} <= {"value_head", "inference_net"}
        for name in ("parameter_sharing", "latent_scope", "max_completion_length"):
            if name in trainer.args.to_dict():
                assert getattr(loaded.settings, name) == getattr(trainer.args, name)

    def test_replies_are_those_of_the_trainer(self, saved):
        trainer, path = saved
        problems = [
            {"prompt": "def f(x):", "entry_point": "f"},
            {"prompt": "def aux(x): # twice", "entry_point": "aux"},
        ]
        trainer.model.get_base_model().eval()
        expected = [answer.messages for answer in trainer.team.solve(problems)]
        assert [answer.messages for answer in Team.from_pretrained(path).solve(problems)] == expected

    def test_speaks_as_it_was_trained_to(self, tiny_model, tmp_path):
        """Its prompts, its ends of replies, and when its episodes end."""
        options = {
            "chat_template_kwargs": {"enable_thinking": False},
            "generation_kwargs": {"eos_token_id": [1, 7]},
            "early_termination_threshold": 0.5,
        }
        trainer = teams.make(tiny_model, tmp_path, workflow="collaboration", data=TESTED, num_turns=2, **options)
        trainer.save_model()
        loaded = Team.from_pretrained(tmp_path)
        assert {name: getattr(loaded.settings, name) for name in options} == options
        assert loaded.generation_config.eos_token_id == [1, 7]

    def test_the_base_model_has_the_dtype_of_the_training(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, model_init_kwargs={"dtype": "bfloat16"})
        trainer.save_model()
        assert not {"use_cpu", "bf16"} & json.loads((tmp_path / "team.json").read_text())["settings"].keys()
        expected = [answer.messages for answer in trainer.team.solve(["def f(x):"])]
        loaded = Team.from_pretrained(tmp_path)
        assert loaded.model.dtype == single_agent(tmp_path).model.dtype == torch.bfloat16
        assert [answer.messages for answer in loaded.solve(["def f(x):"])] == expected
        assert Team.from_pretrained(tmp_path, model_init_kwargs={"dtype": "float32"}).model.dtype == torch.float32

    def test_turns_can_be_added(self, saved):
        loaded = Team.from_pretrained(saved[1], num_turns=2)
        assert loaded.workflow.num_turns == 2

    def test_settings_that_make_another_team_are_named(self, saved):
        if saved[0].args.to_dict().get("parameter_sharing") == "latent":
            with pytest.raises(ValueError, match=r"was saved with modules=.*'latent_size': 3"):
                Team.from_pretrained(saved[1], latent_size=3)
            with pytest.raises(ValueError, match=r"was saved with agents=.*'planner'"):
                Team.from_pretrained(saved[1], workflow="pipeline")


class TestOtherAgents:
    def test_a_team_from_before_the_default_texts_changed_keeps_its_own(self, saved, tmp_path):
        shutil.copytree(saved[1], tmp_path / "team")
        team = json.loads((tmp_path / "team" / "team.json").read_text())
        assert team["workflow"] == "Collaboration" and team["settings"]["roles"] is None
        team["agents"][0]["role"] = "Write aux."
        (tmp_path / "team" / "team.json").write_text(json.dumps(team))
        loaded = Team.from_pretrained(tmp_path / "team", isolation="best_effort")
        assert loaded.workflow.agents[0].role == loaded.settings.roles["helper"] == "Write aux."
        loaded.close()

    def test_agents_keep_the_texts_that_they_were_trained_with(self, tiny_model, tmp_path):
        trained = {"helper": "Trained helper.", "helper2": "Trained helper2."}
        trainer = teams.make(
            tiny_model, tmp_path, workflow="collaboration", data=TESTED, reward="execution_reward", num_agents=3,
            roles=trained, isolation="best_effort", num_workers=1, per_device_train_batch_size=6,
        )  # fmt: skip
        trainer.save_model()
        trainer.executor.close()

        def texts(**settings):
            loaded = Team.from_pretrained(tmp_path, isolation="best_effort", **settings)
            return [agent.role.partition(". ")[0].rstrip(".") for agent in loaded.workflow.agents]

        main = "{problem}\n\nWrite {entry_point}"
        assert texts() == ["Trained helper", "Trained helper2", main]
        assert texts(roles={"main": "Other."}) == ["Trained helper", "Trained helper2", "Other"]
        assert texts(num_agents=2) == ["Trained helper", main]
        added = texts(num_agents=4, roles={"helper": "Other."})
        assert added[:2] == ["Other", "Trained helper2"] and added[2].startswith("Another agent")
