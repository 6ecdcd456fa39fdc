"""What a team is saved as, and that no run goes on from another team."""

import json
import shutil
from pathlib import Path

import pytest
import teams
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.files import write_json
from marcog_trl.trainers.checkpointing import mark_complete


MODES = {
    "ppo": (MultiAgentPPOTrainer, {"beta": 0.1}),
    "no-modules": (MultiAgentPPOTrainer, {"critic": "none"}),
    "observation": (SHPPOTrainer, {}),
    "agent": (SHPPOTrainer, {"latent_scope": "agent"}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
}


def make(model, path, mode="observation", **options):
    trainer_class, config = MODES[mode]
    return teams.make(model, path, trainer_class, **{"workflow": teams.Pair(), **config, **options})


def changed_copy(model, folder):
    """Saves a model and its tokenizer with one matrix changed, as a small merged adapter would."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    changed.model.layers[1].self_attn.v_proj.weight.data += 1e-3
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


class TestFiles:
    @pytest.fixture(scope="class", params=MODES)
    def saved(self, request, tiny_model, tmp_path_factory):
        """A trainer, and the folder to which it saved its team."""
        path = tmp_path_factory.mktemp(request.param)
        trainer = make(tiny_model, path, request.param)
        trainer.save_model()
        return request.param, trainer, path

    def test_describe_the_team(self, saved, tiny_model):
        mode, trainer, path = saved
        team = json.loads((path / "team.json").read_text())
        assert team["format_version"] == 4
        assert team["base_model"] == tiny_model
        assert team["agents"] == [{"name": "a", "role": "You are a."}, {"name": "b", "role": "You are b."}]
        assert team["workflow"] == "Pair" and team["num_turns"] == 1
        assert team["trainer"] == type(trainer).__name__
        assert team["modules"]["critic"] == trainer.args.critic
        if mode == "agent":
            assert team["modules"]["latent_scope"] == "agent" and team["modules"]["latent_size"] == 8
        assert {"marcog-trl", "trl", "transformers", "peft", "torch"} <= set(team["versions"])
        assert (path / "team_modules.safetensors").exists() == bool(trainer.modules.state_dict())
        assert not list(path.glob("*.partial"))

    def test_an_ordinary_adapter_is_among_them(self, saved, tiny_model):
        _, trainer, path = saved
        adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), path)
        ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
        trainer.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(trainer.model(ids).logits, adapter.eval()(ids).logits)
        assert AutoTokenizer.from_pretrained(path).chat_template


class TestWrongCheckpoint:
    @pytest.fixture(scope="class")
    def checkpoint(self, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp("run")
        trainer = make(tiny_model, path, save_strategy="steps", save_steps=1)
        teams.script(trainer)
        trainer.train()
        return path / "checkpoint-1"

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
            ({"mode": "ppo"}, "trainer is 'SHPPOTrainer', but .*'MultiAgentPPOTrainer'.* in this run"),
        ],
    )
    def test_of_another_team_is_refused_before_any_work(self, tiny_model, tmp_path, checkpoint, options, message):
        self.refused(make(tiny_model, tmp_path, **options), checkpoint, message)

    def test_of_another_base_model_is_refused(self, tiny_model, tmp_path, checkpoint):
        changed_copy(tiny_model, tmp_path / "other")
        trainer = make(str(tmp_path / "other"), tmp_path / "run")
        self.refused(trainer, checkpoint, "base_model is '.*tiny', but .*'.*other'.* in this run")

    def test_of_a_base_model_that_has_changed_is_refused(self, tiny_model, tmp_path):
        base = str(shutil.copytree(tiny_model, tmp_path / "base"))
        make(base, tmp_path / "run", save_strategy="steps", save_steps=1).train()
        changed_copy(tiny_model, tmp_path / "base")
        trainer = make(base, tmp_path / "run")
        self.refused(trainer, tmp_path / "run" / "checkpoint-1", "base_fingerprint is .*, but .* in this run")

    @pytest.mark.parametrize("name", ["tiny/", "./tiny", "copy"])
    def test_of_the_same_model_under_another_name_is_resumed(
        self, tiny_model, tmp_path, checkpoint, monkeypatch, name
    ):
        monkeypatch.chdir(Path(tiny_model).parent)
        shutil.copytree(tiny_model, Path(tiny_model).parent / "copy", dirs_exist_ok=True)
        trainer = make(name, tmp_path, max_steps=2)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 2

    def test_of_another_format_is_refused(self, tiny_model, tmp_path, checkpoint):
        copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
        team = json.loads((checkpoint / "team.json").read_text())
        (copy / "team.json").write_text(json.dumps({**team, "format_version": 5}, indent=2) + "\n")
        self.refused(make(tiny_model, tmp_path / "run"), copy, "has format_version=5, but this version reads 4")

    def test_that_does_not_know_its_base_model_s_weights_is_resumed(self, tiny_model, tmp_path, checkpoint):
        copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
        team = json.loads((checkpoint / "team.json").read_text())
        del team["base_fingerprint"], team["settings"]["optim"]
        write_json(copy / "team.json", team)
        trainer = make(tiny_model, tmp_path / "run", max_steps=2)
        mark_complete(copy)
        trainer.train(resume_from_checkpoint=str(copy))
        assert trainer.state.global_step == 2

    @staticmethod
    def refused(trainer, checkpoint: Path, message: str):
        calls = teams.script(trainer)
        with pytest.raises(ValueError, match=message) as error:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert "\n" not in str(error.value) and not calls
