"""The fingerprint of a base model: the same for the same weights, however they are loaded, and another for others."""

import pytest
import teams
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from marcog_trl.team.base_models import fingerprint, same_weights


def load(model, **options):
    return AutoModelForCausalLM.from_pretrained(model, **options)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"bias": "all", "target_modules": ["q_proj"]},
        {"modules_to_save": ["embed_tokens"]},
        {"use_dora": True},
        {"trainable_token_indices": [3], "target_modules": ["q_proj"]},
    ],
)
def test_adapters_do_not_count(tiny_model, lora):
    base = fingerprint(load(tiny_model))
    model = get_peft_model(load(tiny_model), teams.lora_config(**lora))
    if not lora.get("bias"):  # which PEFT knows of one adapter only
        model.add_adapter("ref", model.peft_config["default"])
    teams.randomize(torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad))
    assert same_weights(base, fingerprint(model)) and {"embeddings", "layers"} <= fingerprint(model).keys()


def test_types_are_alike(tiny_model):
    single, half = fingerprint(load(tiny_model)), fingerprint(load(tiny_model, dtype=torch.bfloat16))
    assert single == half and {"vocab_size", "embeddings", "layers", "biases"} == single.keys()
    assert same_weights(single, fingerprint(load(tiny_model, dtype=torch.float16)))


def test_of_quantised_layers_the_others_are_compared(tiny_model):
    pytest.importorskip("bitsandbytes")
    quantised = load(tiny_model, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    base, found = fingerprint(load(tiny_model)), fingerprint(quantised)
    assert "embeddings" in found and "layers" not in found
    assert same_weights(base, found) and not same_weights({**base, "embeddings": 0}, found)


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "layers.1.mlp.down_proj.weight", "layers.0.self_attn.q_proj.bias", "norm.weight"]
)
def test_any_weight_counts(tiny_model, name):
    model = load(tiny_model)
    model.model.get_parameter(name).data.view(-1)[-1] += 1e-2
    assert not same_weights(fingerprint(load(tiny_model)), fingerprint(model))
