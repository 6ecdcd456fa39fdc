"""All weights are trained in place of an adapter: as TRL would, and with what is saved, loaded, exported and planned."""

import json
import warnings

import pytest
import teams
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from marcog_trl import MultiAgentPPOTrainer
from marcog_trl.preferences.rounds import IterativeMARLHFConfig
from marcog_trl.team.export import export_team
from marcog_trl.team.hub import push_team
from marcog_trl.team.team import Team


FULL = {"full_finetuning": True, "peft_config": None, "learning_rate": 1e-3}


def make(model, path, trainer=MultiAgentPPOTrainer, **options):
    return teams.make(model, path, trainer, **FULL | {"workflow": teams.Pair()} | options)


class TestTraining:
    def test_moves_the_reference(self, tiny_model, tmp_path):
        moving = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
        trainer = make(tiny_model, tmp_path, max_steps=2, beta=0.1, **moving)
        trainer.train()
        weights = dict(trainer.model.named_parameters())
        assert all(torch.equal(p, weights[name]) for name, p in trainer.ref_model.named_parameters())

    def test_loads_the_best_model(self, tiny_model, tmp_path):
        def worse(completions, trainer_state, **kwargs):
            return [-float(trainer_state.global_step)] * len(completions)

        every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
        options = {"reward": worse, "eval_dataset": teams.dataset(1), "max_steps": 2} | every | best
        trainer = make(tiny_model, tmp_path, **options)
        trainer.train()
        first = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
        assert all(torch.equal(p, trainer.model.get_parameter(name)) for name, p in first.named_parameters())

    def test_refuses_a_checkpoint_that_lacks_weights(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path)
        trainer.save_model()
        trainer.model.add_module("more", torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"lacks 2 weights of the model, such as more\."):
            trainer.load_team(tmp_path)


class TestSaved:
    @pytest.fixture(scope="class")
    def saved(self, tiny_model, tmp_path_factory):
        path = tmp_path_factory.mktemp("full")
        trainer = make(tiny_model, path, workflow="discussion", max_steps=1)
        trainer.train()
        trainer.save_model()
        trainer.create_model_card("team")
        return trainer, path

    def test_is_an_ordinary_model(self, saved):
        trainer, path = saved
        with safe_open(path / "model.safetensors", "pt") as weights:
            assert not [name for name in weights.keys() if "marcog_team" in name]
        with safe_open(path / "team_modules.safetensors", "pt") as modules:
            assert {name.partition(".")[0] for name in modules.keys()} == {"value_head"}
        assert not (path / "adapter_config.json").exists()
        loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert all(torch.equal(p, trainer.model.get_parameter(name)) for name, p in loaded.named_parameters())

    def test_is_loaded_as_a_team(self, saved):
        trainer, path = saved
        trainer.model.eval()
        problems = [{"prompt": "def f(x):"}, {"prompt": "def aux(x): # twice"}]
        team = Team.from_pretrained(path)
        assert team.description.full_finetuning and team.description.base_model == trainer.team.description.base_model
        assert [a.messages for a in team.solve(problems)] == [a.messages for a in trainer.team.solve(problems)]
        weights = trainer.team.own_weights()
        assert all(torch.equal(weights[name], tensor) for name, tensor in team.own_weights().items())

    def test_no_trainer_of_an_adapter_can_begin_from_it(self, saved, tiny_model, tmp_path):
        _, path = saved
        other = teams.make(tiny_model, tmp_path, MultiAgentPPOTrainer, workflow="discussion")
        with pytest.raises(ValueError, match=r"has another team: full_finetuning is True, but False in this run"):
            other.load_team(path)

    def test_export_is_the_model(self, saved, tmp_path):
        trainer, _ = saved
        for _ in range(2):  # an earlier export is replaced
            report = trainer.export_agents(tmp_path / "agents")
        assert set(report) == set(trainer.agents)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "agents")
        assert all(torch.equal(p, trainer.model.get_parameter(name)) for name, p in loaded.named_parameters())
        assert (tmp_path / "agents" / "tokenizer.json").is_file()
        assert json.loads((tmp_path / "agents" / "export.json").read_text())["full_finetuning"]

    def test_team_and_card(self, saved, tmp_path):
        _, path = saved
        team = Team.from_pretrained(path)
        assert export_team(team, path, tmp_path / "export") == {}
        assert not (tmp_path / "export" / "agents").exists()
        assert Team.from_pretrained(tmp_path / "export").agents == team.agents
        card = ModelCard.load(tmp_path / "export" / "README.md")
        assert "All weights were trained" in card.text and "PeftModel" not in card.text
        (tmp_path / "export" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            Team.from_pretrained(tmp_path / "export")
        with pytest.raises(ValueError, match=r"has no model\.safetensors"):
            push_team(tmp_path / "export", "user/team")

    def test_has_no_other_base(self, saved, tiny_model):
        with pytest.raises(ValueError, match=r"has all weights of its model\. Leave it out"):
            Team.from_pretrained(saved[1], base_model=tiny_model)


class TestRefusals:
    def test_warns_of_weights_with_few_bits(self, tiny_model, tmp_path):
        with pytest.warns(UserWarning, match=r"weights in bfloat16 loses updates .* Leave dtype at float32"):
            make(tiny_model, tmp_path, model_init_kwargs={"dtype": "bfloat16"})

    @pytest.mark.parametrize("bits", [{"bf16": True}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {}])
    @pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
    def test_warns_of_slow_bfloat16(self, tiny_model, tmp_path, monkeypatch, bits, capability):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(tiny_model, tmp_path, **bits)
        told = any("Set dtype='float32' and bf16=False" in str(warning.message) for warning in caught)
        assert told == (capability == "AVX2" and bits != {})

    def test_rounds(self):
        with pytest.raises(ValueError, match="full_finetuning=True is not supported in rounds"):
            IterativeMARLHFConfig("team", full_finetuning=True)
