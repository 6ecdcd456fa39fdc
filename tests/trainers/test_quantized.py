"""A base model in 4 bits (QLoRA): the team trains over it, is saved, and its folded agents are the live ones."""

import pytest
import teams
import torch
from transformers import BitsAndBytesConfig

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer


Linear4bit = pytest.importorskip("bitsandbytes").nn.Linear4bit
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (MultiAgentPPOTrainer, {}),
        (SHPPOTrainer, {"latent_scope": "agent"}),
        (SHPPOTrainer, {"latent_scope": "observation"}),
        (SHPPOTrainer, {"parameter_sharing": "separate"}),
    ],
    ids=["ppo", "agent", "observation", "separate"],
)
def test_trains_over_a_frozen_base(tiny_model, tmp_path, trainer_class, options):
    trainer = teams.make(
        tiny_model, tmp_path, trainer_class, workflow=teams.Pair(), max_steps=3, learning_rate=1e-2,
        quantization_config=BitsAndBytesConfig(**FOUR_BITS), **options,
    )  # fmt: skip
    base = {name: module for name, module in trainer.model.named_modules() if type(module) is Linear4bit}
    assert len(base) == 14  # seven in each of two layers
    frozen = {name: module.weight.data.clone() for name, module in base.items()}
    before = teams.trainable(trainer)
    trainer.train()
    still = [name for name, tensor in teams.trainable(trainer).items() if torch.equal(before[name], tensor)]
    assert not still
    assert all(torch.equal(module.weight.data, frozen[name]) for name, module in base.items())
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file() and (tmp_path / "team.json").is_file()
