"""Default settings on models with experts and with Mamba layers: tiny random ones of transformers' own classes."""

import pytest
import teams
import torch
from peft import LoraConfig, get_peft_model
from tiny_hub import add_code
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MODELS = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4}, ATTENTION),
    "qwen2_moe": (Qwen2MoeConfig, {"num_experts": 4, "shared_expert_intermediate_size": 32}, ATTENTION),
    "glm4_moe": (Glm4MoeConfig, {**EXPERTS, "first_k_dense_replace": 1}, ATTENTION),
    "nemotron_h": (
        NemotronHConfig,
        {
            **EXPERTS, "layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3, "mamba_num_heads": 4,
            "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
        ATTENTION | {"in_proj"},
    ),
}  # fmt: skip


def make_model(name, tiny_model, path):
    """Saves a model with the tokenizer of the tiny one, and returns its path."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config_class, options, _ = MODELS[name]
    torch.manual_seed(0)
    config = config_class(
        **{**SIZES, **options}, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_default_adapter_trains(tiny_model, tmp_path, name):
    model = make_model(name, tiny_model, tmp_path / "model")
    trainer = teams.make(model, tmp_path / "run", SHPPOTrainer, workflow=teams.Pair(), peft_config=None, max_steps=2)
    config = trainer.model.peft_config["default"]
    assert set(config.target_modules) == MODELS[name][2] and not config.target_parameters
    before = teams.trainable(trainer)
    trainer.train()
    after = teams.trainable(trainer)
    assert not [key for key in before if torch.equal(before[key], after[key])]


def test_mamba_layers_are_adapted_as_far_as_peft_can(tiny_model, tmp_path):
    """Also with an adapter that was given, and without latents, where the experts' block has linear layers for all tokens."""
    given = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = make_model("nemotron_h", tiny_model, tmp_path / "model")
    trainer = teams.make(model, tmp_path / "run", MultiAgentPPOTrainer, workflow=teams.Pair(), peft_config=given)
    names = {"in_proj", "up_proj", "down_proj"} | ATTENTION
    assert {name.rpartition(".")[2] for name in trainer.model.peft_config["default"].target_modules} == names
    assert given.target_modules == "all-linear"
    trainer.train()


def test_code_of_the_model_is_run_if_it_is_trusted(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = {
        name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    add_code(tmp_path / "model")
    options = {"workflow": teams.Pair(), "peft_config": None}
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        teams.make(str(tmp_path / "model"), tmp_path / "run", SHPPOTrainer, **options)
    trainer = teams.make(
        str(tmp_path / "model"), tmp_path / "run", SHPPOTrainer, **options, trust_remote_code=True, max_steps=1
    )
    assert type(trainer.model.get_base_model()).__name__ == "RemoteForCausalLM"
    trainer.train()


def test_an_error_names_what_was_given(tiny_model, tmp_path):
    """PEFT turns names of layers into names of expert parameters, which nobody wrote."""
    path = make_model("qwen3_moe", tiny_model, tmp_path / "model")
    given = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    with pytest.raises(
        ValueError, match=r"expert parameters \['down_proj', .*Name other linear layers in target_modules"
    ):
        teams.make(path, tmp_path / "run", SHPPOTrainer, workflow=teams.Pair(), peft_config=given)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), given)
    with pytest.raises(
        ValueError, match=r"expert parameters \['down_proj', .*Name other linear layers in target_modules"
    ):
        teams.make(
            model, tmp_path / "run", SHPPOTrainer, workflow=teams.Pair(), peft_config=None,
            processing_class=AutoTokenizer.from_pretrained(path),
        )  # fmt: skip
