"""A saved team comes back as it was."""

import json
import shutil

import pytest
import teams
import torch

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.evaluation.baselines import single_agent
from marcog_trl.trainers.saved import agent_settings, load_trainer


TEAMS = {
    "ppo": (MultiAgentPPOTrainer, {"critic": "agent"}),
    "latent": (SHPPOTrainer, {"latent_scope": "agent"}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
    "shared": (SHPPOTrainer, {"parameter_sharing": "shared", "critic": "none"}),
}
TESTED = teams.dataset(2, test=[["assert f"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)


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


class TestLoadTrainer:
    def test_gives_the_same_adapter_and_modules(self, saved):
        trainer, path = saved
        loaded = load_trainer(path, TESTED)
        loaded.executor.close()
        assert type(loaded) is type(trainer)
        assert loaded.workflow.agents == trainer.workflow.agents
        weights = teams.trainable(loaded)
        for name, tensor in teams.trainable(trainer).items():
            assert torch.equal(weights[name], tensor), name
        for name in ("parameter_sharing", "latent_scope", "critic", "max_completion_length"):
            if name in trainer.args.to_dict():
                assert getattr(loaded.args, name) == getattr(trainer.args, name)

    def test_speaks_as_it_was_trained_to(self, tiny_model, tmp_path):
        """Its prompts, its ends of replies, and when its episodes end."""
        options = {
            "chat_template_kwargs": {"enable_thinking": False},
            "generation_kwargs": {"eos_token_id": [1, 7]},
            "early_termination_threshold": 0.5,
        }
        trainer = teams.make(tiny_model, tmp_path, workflow="collaboration", data=TESTED, num_turns=2, **options)
        trainer.save_model()
        loaded = load_trainer(tmp_path, TESTED, reward_funcs=[teams.letters])
        loaded.close_executor()
        assert {name: getattr(loaded.args, name) for name in options} == options
        assert loaded.chat_template_kwargs == trainer.chat_template_kwargs
        assert loaded.generation_config.eos_token_id == [1, 7]

    def test_the_machine_is_not_a_property_of_the_team(self, saved, tmp_path):
        """Teams that older versions saved have settings of it, which say nothing of the machine they are loaded on."""
        folder = shutil.copytree(saved[1], tmp_path / "team")
        team = json.loads((folder / "team.json").read_text())
        assert not {"use_cpu", "bf16"} & team["settings"].keys()
        usual = saved[0]._config_class(str(tmp_path), report_to="none")
        team["settings"] |= {"use_cpu": not usual.use_cpu, "bf16": not usual.bf16}
        (folder / "team.json").write_text(json.dumps(team))
        loaded = load_trainer(folder, TESTED)
        loaded.executor.close()
        assert (loaded.args.use_cpu, loaded.args.bf16) == (usual.use_cpu, usual.bf16)
        baseline = single_agent(folder, TESTED)
        baseline.executor.close()
        assert (baseline.args.use_cpu, baseline.args.bf16) == (usual.use_cpu, usual.bf16)
        replaced = load_trainer(folder, TESTED, use_cpu=True, bf16=False)
        replaced.executor.close()
        assert (replaced.args.use_cpu, replaced.args.bf16) == (True, False)

    def test_settings_can_be_replaced(self, saved):
        loaded = load_trainer(saved[1], TESTED, temperature=0.5)
        loaded.executor.close()
        assert loaded.args.temperature == 0.5

    def test_turns_can_be_added(self, saved):
        loaded = load_trainer(saved[1], TESTED, num_turns=2)
        loaded.executor.close()
        assert loaded.workflow.num_turns == 2

    def test_settings_that_make_another_team_are_named(self, saved):
        if saved[0].args.to_dict().get("critic") == "agent":
            with pytest.raises(
                ValueError, match=r"was saved with modules=.* With critic='none' it would be .* Leave these"
            ):
                load_trainer(saved[1], TESTED, critic="none")
            message = r"the given workflow has the agents .*, but the team of .* has \['helper', 'main'\]\. Use the"
            with pytest.raises(ValueError, match=message):
                load_trainer(saved[1], TESTED, workflow="pipeline")

    def test_refuses_what_is_no_team_of_this_format(self, saved, tmp_path):
        with pytest.raises(ValueError, match=r"has no team\.json\. Use a folder that a trainer's save_model wrote\."):
            load_trainer(tmp_path, TESTED)
        team = json.loads((saved[1] / "team.json").read_text())
        (tmp_path / "team.json").write_text(json.dumps({**team, "format_version": 9}))
        with pytest.raises(ValueError, match=r"format_version=9\. This version reads 1\."):
            load_trainer(tmp_path, TESTED)


class TestOtherAgents:
    def test_agents_keep_the_texts_that_they_were_trained_with(self, tiny_model, tmp_path):
        trained = {"helper": "Trained helper.", "helper2": "Trained helper2."}
        trainer = teams.make(
            tiny_model, tmp_path, workflow="collaboration", data=TESTED, reward="execution_reward", num_agents=3,
            roles=trained, isolation="best_effort", num_workers=1, per_device_train_batch_size=6,
        )  # fmt: skip
        trainer.save_model()
        trainer.close_executor()

        def texts(**settings):
            loaded = load_trainer(tmp_path, TESTED, isolation="best_effort", **settings)
            loaded.close_executor()
            return [agent.role.partition(".")[0] for agent in loaded.workflow.agents]

        main = "Write the Python function asked for below"
        assert texts() == ["Trained helper", "Trained helper2", main]
        assert texts(roles={"main": "Other."}) == ["Trained helper", "Trained helper2", "Other"]
        assert texts(num_agents=2) == ["Trained helper", main]
        added = texts(num_agents=4, roles={"helper": "Other."})
        assert added[:2] == ["Other", "Trained helper2"] and "named aux3" in added[2]


class TestAgentSettings:
    def read(self, tmp_path, text, num_agents=None):
        (tmp_path / "agents.yaml").write_text(text)
        return agent_settings(num_agents, tmp_path / "agents.yaml")

    def test_a_list_is_the_team_and_a_mapping_replaces_texts(self, tmp_path):
        roles = {"helper": "Help.", "main": "Do: it."}
        team = "- {name: helper, role: Help.}\n- name: main\n  role: 'Do: it.'\n"
        assert self.read(tmp_path, team) == self.read(tmp_path, team, 2) == {"num_agents": 2, "roles": roles}
        assert self.read(tmp_path, "helper: Help.\nmain: 'Do: it.'") == {"roles": roles}
        assert self.read(tmp_path, "helper: Help.", 4) == {"num_agents": 4, "roles": {"helper": "Help."}}
        assert agent_settings(3) == {"num_agents": 3} and agent_settings() == {}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"has no agents\. Write \[\{name: helper, role: Write aux\.\}, .* for example\."),
            ("helper", "has no agents"),
            ("[]", "has no agents"),
            ("[helper, main]", "has 'helper' at 0, but needs the keys name and role. Write"),
            ("- {name: helper}", r"has the keys \['name'\] at 0, but needs the keys name and role"),
            ("- {name: a, role: A.}\n- {name: b, role: B., model: c}", r"the keys \['name', 'role', 'model'\] at 1"),
            ("- {name: a, role: A.}\n- {name: a, role: B.}", "has 'a' 2 times. Rename one of them, such as to 'a2'."),
            ("helper: A.\nhelper: B.", "has 'helper' 2 times. Rename one of them, such as to 'helper2'."),
            ("- {name: a, name: b, role: A.}", "has 'name' 2 times"),
            ("helper: ''", "has role='' for agent 'helper', which must be a text"),
            ("helper: 3", "has role=3 for agent 'helper', which must be a text"),
            ("3: Help.", "has name=3 for agent 3, which must be a text"),
            ("helper: {role: Help.}", r"has role=\{'role': 'Help\.'\} for agent 'helper', which must be a text"),
            ("helper: [", "cannot be read: while parsing"),
        ],
    )
    def test_what_is_no_team_is_refused(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=rf"^agents='.*agents\.yaml' (has )?{message}"):
            self.read(tmp_path, text)

    def test_the_number_must_agree_and_the_file_exist(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"lists 1 agents, but num_agents=3\. Set num_agents=1, or write a mapping"
        ):
            self.read(tmp_path, "- {name: a, role: A.}", 3)
        with pytest.raises(ValueError, match=r"agents='.*/none\.yaml' cannot be read: .*No such file"):
            agent_settings(agents=tmp_path / "none.yaml")
