"""Models that bring an adapter: it is trained and saved, or refused with the line that mends it."""

import shutil

import pytest
import teams
import torch
from peft import AutoPeftModelForCausalLM, EvaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import MultiAgentGRPOTrainer, SHPPOTrainer, Team
from marcog_trl.preferences.rounds import save_untrained_team


IDS = torch.tensor([teams.PROMPT])


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def base(model):
    return AutoModelForCausalLM.from_pretrained(model)


def adapted(model, **options):
    return get_peft_model(base(model), teams.lora_config(), **options)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    adapted(tiny_model).save_pretrained(path)
    return str(path)


def make(model, tiny_model, path, trainer_class=MultiAgentGRPOTrainer, **options):
    options = {"peft_config": None, "processing_class": AutoTokenizer.from_pretrained(tiny_model), **options}
    return teams.make(model, path, trainer_class, **options)


def added(model):
    model = base(model)
    model.add_adapter(teams.lora_config())
    return model


def switched(model, active):
    model = adapted(model)
    model.add_adapter("other", teams.lora_config())
    model.base_model.set_adapter(active)
    return model


def disabled(model):
    model = adapted(model)
    model.base_model.disable_adapter_layers()
    return model


def merged(model):
    model = adapted(model)
    model.merge_adapter()
    return model


def with_more(model):
    model = adapted(model)
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


REFUSED = {
    "add_adapter": (lambda tiny, folder: added(tiny), r"a Qwen2ForCausalLM, has an adapter .*is_trainable=True"),
    "from_pretrained": (
        lambda tiny, folder: AutoModelForCausalLM.from_pretrained(folder),
        r"a Qwen2ForCausalLM, has an adapter .*is_trainable=True",
    ),
    "unwrapped": (lambda tiny, folder: adapted(tiny).get_base_model(), "a Qwen2ForCausalLM, has an adapter"),
    "mixed": (lambda tiny, folder: adapted(tiny, mixed=True), "a PeftMixedModel, has an adapter"),
    "folder": (lambda tiny, folder: folder, "is an adapter of '.*tiny'.*is_trainable=True"),
    "frozen": (lambda tiny, folder: AutoPeftModelForCausalLM.from_pretrained(folder), "frozen.*is_trainable=True"),
    "other": (lambda tiny, folder: switched(tiny, "other"), r"acts with \['other'\].*set_adapter\('default'\)"),
    "both": (lambda tiny, folder: switched(tiny, ["default", "other"]), r"acts with \['default', 'other'\]"),
    "disabled": (lambda tiny, folder: disabled(tiny), r"disabled or merged.*enable_adapter_layers\(\)"),
    "merged": (lambda tiny, folder: merged(tiny), r"disabled or merged.*unmerge_adapter\(\)"),
    "more": (lambda tiny, folder: with_more(tiny), "trains '.*embed_tokens.weight' beside .*modules_to_save"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, SHPPOTrainer])
def test_an_adapter_that_would_be_lost_is_refused(tiny_model, folder, tmp_path, kind, trainer_class):
    bring, match = REFUSED[kind]
    with pytest.raises(ValueError, match=match) as error:
        make(bring(tiny_model, folder), tiny_model, tmp_path, trainer_class)
    assert "\n" not in str(error.value)


def test_an_adapter_that_transformers_added_is_no_whole_model(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="has an adapter"):
        make(added(tiny_model), tiny_model, tmp_path, full_finetuning=True)


def test_the_base_of_an_adapter_may_have_moved(tiny_model, folder, tmp_path):
    moved = str(shutil.copytree(tiny_model, tmp_path / "moved"))
    model = PeftModel.from_pretrained(base(moved), folder, is_trainable=True)
    make(model, tiny_model, tmp_path / "run").save_model()
    assert Team.from_pretrained(tmp_path / "run").description.base_model == moved


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_model_s_own_adapter_is_where_training_begins(tiny_model, folder, tmp_path, beta):
    model = PeftModel.from_pretrained(base(tiny_model), folder, is_trainable=True)
    model.add_adapter("other", teams.lora_config())
    expected = logits(model)
    assert (expected - logits(base(tiny_model))).abs().max() > 1e-3
    trainer = make(model, tiny_model, tmp_path, beta=beta)
    assert torch.equal(logits(trainer.model), expected)
    trainer.train()
    trainer.save_model()
    assert torch.equal(logits(Team.from_pretrained(tmp_path).model), logits(trainer.model))


class TestStart:
    """How LoRA begins."""

    @pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
    def test_that_changes_the_base_is_refused(self, tiny_model, tmp_path, start):
        config = teams.lora_config(r=4)
        config.init_lora_weights = start  # without the packages that PEFT asks for
        match = f"^peft_config.init_lora_weights='{start}' changes the weights of the base model.*Set init_lora_weights=True"
        with pytest.raises(ValueError, match=match):
            make("nobody/no-such-model", tiny_model, tmp_path, peft_config=config)
        with pytest.raises(ValueError, match=match):
            save_untrained_team(tmp_path / "team", tiny_model, peft_config=config)

    @pytest.mark.parametrize("start", ["pissa", "olora"])
    def test_of_a_given_model_that_changes_the_base_is_refused(self, tiny_model, tmp_path, start):
        model = get_peft_model(base(tiny_model), teams.lora_config(init_lora_weights=start))
        with pytest.raises(ValueError, match="changes the weights of the base model"):
            make(model, tiny_model, tmp_path)

    def test_that_peft_converted_is_trained(self, tiny_model, tmp_path):
        """PEFT saves PiSSA as an ordinary adapter of the original base."""
        model = get_peft_model(base(tiny_model), teams.lora_config(init_lora_weights="pissa"))
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(tmp_path / "start")
        model.peft_config["default"].init_lora_weights = "pissa"
        teams.randomize(nn.ParameterList(p for p in model.parameters() if p.requires_grad))
        first = str(tmp_path / "start")
        model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=first)
        converted = PeftModel.from_pretrained(base(tiny_model), tmp_path / "converted", is_trainable=True)
        trainer = make(converted, tiny_model, tmp_path / "run")
        assert torch.allclose(logits(trainer.model), logits(model), atol=1e-4)

    def test_that_needs_data_is_refused_without(self, tiny_model, tmp_path):
        config = teams.lora_config(init_lora_weights="eva", eva_config=EvaConfig())
        with pytest.raises(ValueError, match=r"init_lora_weights='eva' needs data.*initialize_lora_eva_weights"):
            make(tiny_model, tiny_model, tmp_path, peft_config=config)
        make(get_peft_model(base(tiny_model), config), tiny_model, tmp_path)

    @pytest.mark.parametrize("start", [True, "gaussian", "orthogonal"])
    def test_that_keeps_the_base(self, tiny_model, tmp_path, start):
        """An exported agent is an adapter of the original base, as vLLM reads it: W + alpha / r * B A."""
        trainer = make(tiny_model, tiny_model, tmp_path, peft_config=teams.lora_config(init_lora_weights=start))
        trainer.train()
        trainer.export_agents(tmp_path / "agents")
        exported = PeftModel.from_pretrained(base(tiny_model), tmp_path / "agents" / "solver")
        assert torch.allclose(logits(exported), logits(trainer.model), atol=1e-6)


def test_the_revision_of_the_base_is_in_the_adapter(tiny_model, tmp_path):
    trainer = make(tiny_model, tiny_model, tmp_path, model_init_kwargs={"revision": "v1"}, peft_config=LoraConfig())
    assert trainer.model.peft_config["default"].revision == "v1"
