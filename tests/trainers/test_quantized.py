"""A base model in 4 bits (QLoRA): the team trains over it, is saved, and its folded agents are the live ones."""

import json
import warnings

import pytest
import teams
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from marcog_trl import SHPPOTrainer
from marcog_trl.team.team import Team


Linear4bit = pytest.importorskip("bitsandbytes").nn.Linear4bit
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def in_float32(model):
    """In evaluation mode, bitsandbytes computes in bfloat16 on CPUs that can."""
    for module in model.modules():
        if type(module) is Linear4bit:
            module.support_avx512bf16_for_cpu = False


def test_an_exported_agent_is_the_live_one(tiny_model, tmp_path):
    """On the same base in 4 bits; in float32, since TRL's bfloat16 rounds the live agent and the folded one differently."""
    trainer = teams.make(
        tiny_model, tmp_path / "run", SHPPOTrainer, workflow=teams.Pair(), latent_scope="agent",
        quantization_config=BitsAndBytesConfig(**FOUR_BITS),
    )  # fmt: skip
    teams.randomize(trainer.modules, scale=0.1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    in_float32(trainer.model)
    trainer.export_agents(tmp_path / "agents")
    live = {agent: teams.live_logits(trainer, agent) for agent in "ab"}
    assert (live["a"] - live["b"]).abs().max() > 0.1
    for agent, expected in live.items():
        base = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=BitsAndBytesConfig(**FOUR_BITS))
        exported = PeftModel.from_pretrained(base, tmp_path / "agents" / agent).eval()
        in_float32(exported)
        with torch.no_grad():
            found = exported(input_ids=torch.tensor([teams.PROMPT])).logits
        assert (found - expected).abs().max() < 1e-5


def test_a_saved_team_says_how_its_base_was_quantised(tiny_model, tmp_path):
    """And it is loaded so where that is asked for."""
    quantised = BitsAndBytesConfig(**FOUR_BITS)
    trainer = teams.make(tiny_model, tmp_path, SHPPOTrainer, workflow=teams.Pair(), quantization_config=quantised)
    trainer.save_model()
    assert json.loads((tmp_path / "team.json").read_text())["quantization_config"]["load_in_4bit"]
    with pytest.warns(UserWarning, match="trained on a quantised base model .*, but is loaded without quantisation"):
        unquantised = Team.from_pretrained(tmp_path, workflow=teams.Pair()).model.get_base_model()
    assert not getattr(unquantised, "is_quantized", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*quantised base model")
        loaded = Team.from_pretrained(tmp_path, workflow=teams.Pair(), quantization_config=quantised)
    assert loaded.model.get_base_model().is_quantized
