"""What a team is saved as, and that a run goes on from it as if nothing had happened."""

import json
import shutil
from pathlib import Path

import pytest
import teams
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.team.description import TeamDescription


RUNS = {
    "ppo": (MultiAgentPPOTrainer, {"beta": 0.1}),
    "no-modules": (MultiAgentPPOTrainer, {"critic": "none"}),
    "observation": (SHPPOTrainer, {}),
    "agent": (SHPPOTrainer, {"latent_scope": "agent", "policy_gradient_to_latent": True}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
    "accumulation": (SHPPOTrainer, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "several-updates": (
        SHPPOTrainer,
        {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "save_steps": 4},
    ),
    "several-rollouts": (
        SHPPOTrainer,
        {"per_device_train_batch_size": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 3},
    ),
    "evaluated": (SHPPOTrainer, {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": teams.dataset(3)}),
    "stream": (SHPPOTrainer, {"data": teams.dataset(16).to_iterable_dataset()}),
    # Epochs of 3 rollouts, whose last update accumulates one of them
    "epochs": (
        SHPPOTrainer,
        {
            "per_device_train_batch_size": 4,
            "steps_per_generation": 1,
            "gradient_accumulation_steps": 2,
            "save_strategy": "epoch",
            "data": teams.dataset(3),
            "max_steps": -1,
            "num_train_epochs": 4,
            "latent_scope": "agent",
        },
    ),
}


def make(model, path, name="observation", **options):
    trainer_class, config = RUNS[name]
    config = {
        "workflow": teams.Pair(),
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "linear",
        "shuffle_dataset": True,
        **config,
        **options,
    }
    return teams.make(model, path, trainer_class, **config)


@pytest.fixture(scope="module", params=RUNS)
def run(request, tiny_model, tmp_path_factory):
    """A finished run, with a checkpoint from its middle."""
    path = tmp_path_factory.mktemp(request.param)
    trainer = make(tiny_model, path, request.param)
    trainer.train()
    return request.param, trainer, path / "checkpoint-4"


class TestResume:
    def test_gives_the_losses_and_weights_of_the_uninterrupted_run(self, run, tiny_model, tmp_path):
        name, trainer, checkpoint = run
        resumed = make(tiny_model, tmp_path, name)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        names = {key for entry in trainer.state.log_history for key in entry if key.endswith(("loss", "reward", "kl"))}
        assert len(teams.logged(trainer, "loss")) == 8 and {"loss", "reward"} <= names
        for key in names - {"train_loss"}:
            assert teams.logged(resumed, key) == teams.logged(trainer, key), key
        weights = teams.trainable(resumed)
        for key, expected in teams.trainable(trainer).items():
            assert torch.equal(weights[key], expected), key


class TestFiles:
    def test_describe_the_team(self, run, tiny_model):
        name, trainer, checkpoint = run
        team = json.loads((checkpoint / "team.json").read_text())
        assert team["format_version"] == 2
        assert team["base_model"] == tiny_model
        assert team["agents"] == [{"name": "a", "role": "You are a."}, {"name": "b", "role": "You are b."}]
        assert team["workflow"] == "Pair" and team["num_turns"] == 1
        assert team["trainer"] == type(trainer).__name__
        assert team["modules"]["critic"] == trainer.args.critic
        if name == "agent":
            assert team["modules"]["latent_scope"] == "agent" and team["modules"]["latent_size"] == 8
        assert {"marcog-trl", "trl", "transformers", "peft", "torch"} <= set(team["versions"])
        assert (checkpoint / "team_modules.safetensors").exists() == bool(trainer.modules.state_dict())
        assert not list(checkpoint.glob("*.partial"))

    def test_an_ordinary_adapter_is_among_them(self, run, tiny_model, tmp_path):
        _, trainer, _ = run
        trainer.save_model(str(tmp_path))
        adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path)
        ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
        trainer.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(trainer.model(ids).logits, adapter.eval()(ids).logits)
        assert AutoTokenizer.from_pretrained(tmp_path).chat_template


class TestBestModel:
    def test_is_loaded_with_its_modules(self, tiny_model, tmp_path):
        def reward(completions, trainer_state, **kwargs):
            return [-float(abs(trainer_state.global_step - 2)) + 0.01 * r for r in teams.letters(completions)]

        trainer = make(
            tiny_model,
            tmp_path,
            reward=reward,
            max_steps=4,
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            eval_dataset=teams.dataset(3),
            load_best_model_at_end=True,
            metric_for_best_model="eval_reward",
        )
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        best = load_file(tmp_path / "checkpoint-2" / "team_modules.safetensors")
        last = load_file(tmp_path / "checkpoint-4" / "team_modules.safetensors")
        for name, tensor in trainer.modules.state_dict().items():
            assert torch.equal(tensor, best[name]), name
            assert not torch.equal(tensor, last[name]), name
        adapter = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
        for name, tensor in teams.trainable(trainer).items():
            if "lora" in name:
                assert torch.equal(tensor, adapter[name.replace(".default", "")])


class TestWrongCheckpoint:
    @pytest.fixture(scope="class")
    def checkpoint(self, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp("run")
        trainer = make(tiny_model, path, max_steps=4)
        teams.script(trainer)
        trainer.train()
        return path / "checkpoint-4"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"workflow": teams.Pair("ac")}, "has another team: agents is .*'b'.*, but .*'c'.* in this run"),
            ({"workflow": teams.Chain()}, "workflow is 'Pair', but .*'Chain'.* in this run"),
            ({"workflow": teams.Pair(num_turns=2)}, "num_turns is 1, but .*2.* in this run"),
            ({"critic": "none"}, "modules is .*'team'.*, but .*'none'.* in this run"),
            ({"latent_size": 4}, "modules is .*8.*, but .*4.* in this run"),
            ({"latent_scope": "agent"}, "modules is .*'observation'.*, but .*'agent'.* in this run"),
            ({"parameter_sharing": "shared"}, "modules is .*'latent'.*, but .*'shared'.* in this run"),
            ({"name": "ppo"}, "trainer is 'SHPPOTrainer', but .*'MultiAgentPPOTrainer'.* in this run"),
        ],
    )
    def test_of_another_team_is_refused_before_any_work(self, tiny_model, tmp_path, checkpoint, options, message):
        self.refused(make(tiny_model, tmp_path, **options), checkpoint, message)

    def test_of_another_base_model_is_refused(self, tiny_model, tmp_path, checkpoint):
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
        trainer = make(str(tmp_path / "other"), tmp_path / "run")
        self.refused(trainer, checkpoint, "base_model is '.*tiny', but .*'.*other'.* in this run")

    def test_of_format_1_is_read(self, checkpoint, tmp_path):
        """There, `visible_tests=0` showed all tests."""
        team = json.loads((checkpoint / "team.json").read_text())
        old = {**team, "format_version": 1, "settings": {**team["settings"], "visible_tests": 0}}
        (tmp_path / "team.json").write_text(json.dumps(old))
        read = TeamDescription.read(tmp_path / "team.json")
        assert (read.format_version, read.settings["visible_tests"]) == (2, None)

    def test_of_another_format_is_refused(self, tiny_model, tmp_path, checkpoint):
        copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-4")
        team = json.loads((checkpoint / "team.json").read_text())
        (copy / "team.json").write_text(json.dumps({**team, "format_version": 3}, indent=2) + "\n")
        self.refused(make(tiny_model, tmp_path / "run"), copy, r"has format_version=3\. This version reads 1 and 2")

    @staticmethod
    def refused(trainer, checkpoint: Path, message: str):
        calls = teams.script(trainer)
        with pytest.raises(ValueError, match=message) as error:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert "\n" not in str(error.value) and not calls

    def test_the_last_checkpoint_is_found(self, tiny_model, checkpoint):
        trainer = make(tiny_model, checkpoint.parent, max_steps=5)
        teams.script(trainer)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 5
