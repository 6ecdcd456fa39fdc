"""A saved team comes back as it was."""

import json

import pytest
import teams
import torch

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.trainers.saved import load_trainer


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

    def test_settings_can_be_replaced(self, saved):
        loaded = load_trainer(saved[1], TESTED, temperature=0.5)
        loaded.executor.close()
        assert loaded.args.temperature == 0.5

    def test_refuses_what_is_no_team_of_this_format(self, saved, tmp_path):
        with pytest.raises(ValueError, match=r"has no team\.json; a folder written by a trainer's save_model works"):
            load_trainer(tmp_path, TESTED)
        team = json.loads((saved[1] / "team.json").read_text())
        (tmp_path / "team.json").write_text(json.dumps({**team, "format_version": 9}))
        with pytest.raises(ValueError, match="format_version=9; 1 works"):
            load_trainer(tmp_path, TESTED)
