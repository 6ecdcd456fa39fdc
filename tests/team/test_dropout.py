"""With `disable_dropout`, two passes in training mode are the same, wherever a model has its dropout."""

import json

import pytest
import teams
import torch
from peft import LoKrConfig, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from marcog_trl.team.dropout import disable_dropout, own_dropout
from marcog_trl.trainers import MultiAgentGRPOTrainer, MultiAgentPPOTrainer


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320, "pad_token_id": 0}
LLAMA = {**SIZES, "num_key_value_heads": 4, "intermediate_size": 32, "head_dim": 4}
BART = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "vocab_size": 320}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 320}
ATTENTION = {"attention_dropout": 0.3}
BARTS = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3, "decoder_layerdrop": 0.3}
NEOX = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
ARCHITECTURES = {
    "opt": {**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 32, "dropout": 0.3, "layerdrop": 0.3},
    "xglm": {"d_model": 16, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32, "vocab_size": 320, "layerdrop": 0.3},
    "starcoder2": {**LLAMA, "residual_dropout": 0.3, "embedding_dropout": 0.3, **ATTENTION},
    **{kind: {**LLAMA, **ATTENTION} for kind in ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "granite")},
    "mixtral": {**LLAMA, "num_local_experts": 4, "router_jitter_noise": 0.3, **ATTENTION},
    "phi": {**LLAMA, "resid_pdrop": 0.3, "embd_pdrop": 0.3, **ATTENTION},
    "persimmon": {**LLAMA, "hidden_dropout": 0.3, **ATTENTION},
    "gpt2": GPT,
    "gpt_neo": {"hidden_size": 16, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "vocab_size": 320, **ATTENTION},
    "gpt_neox": {**SIZES, "intermediate_size": 32, **NEOX},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 320, **NEOX},
    "falcon": {**SIZES, "new_decoder_architecture": False, **NEOX},
    "biogpt": {**SIZES, "intermediate_size": 32, "activation_dropout": 0.3, "layerdrop": 0.3},
    **{kind: {**BART, **BARTS} for kind in ("bart", "mbart", "pegasus", "blenderbot")},
    "prophetnet": {"hidden_size": 16, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 32, "vocab_size": 320, "dropout": 0.3},
    "ctrl": {"n_embd": 16, "n_layer": 2, "n_head": 4, "dff": 32, "vocab_size": 320},
}  # fmt: skip


def model_of(kind, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**ARCHITECTURES[kind], **options}))


@torch.no_grad()
def passes(model):
    """What five passes in training mode give."""
    model.train()
    ids = torch.arange(20, 40)[None]
    return [model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for _ in range(5)]


def agree(logits):
    return all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_two_passes_agree(kind):
    model = model_of(kind)
    before = model.config.to_json_string()
    assert not agree(passes(model))  # otherwise, this would test nothing
    disable_dropout(model)
    assert agree(passes(model))
    model.eval()
    with own_dropout(model):
        assert model.config.to_json_string() == before
    assert agree(passes(model))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(lora_dropout=0.3, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
        LoKrConfig(rank_dropout=0.3, module_dropout=0.3, target_modules=["q_proj"], init_weights=False),
    ],
)
def test_dropout_of_adapters(config):
    model = get_peft_model(model_of("llama", attention_dropout=0.0), config)
    assert not agree(passes(model))
    disable_dropout(model)
    assert agree(passes(model))


def tuned(tiny_model, path, trainer, **options):
    """A trainer whose model has dropout as numbers, and whose adapter acts."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attention_dropout=0.3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return teams.make(model, path, trainer, processing_class=tokenizer, **options)


@pytest.mark.parametrize("trainer", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
def test_ratios_are_1_without_an_update(tiny_model, tmp_path, trainer):
    options = {"max_steps": 4, "num_iterations": 2, "learning_rate": 0.0, "epsilon": 1e-6, "beta": 0.1}
    trained = tuned(tiny_model, tmp_path, trainer, **options)
    trained.train()
    assert teams.logged(trained, "clip_ratio/region_mean") == [0.0] * 4
    assert agree(passes(trained.model))


def test_dropout_that_is_wanted_stays(tiny_model, tmp_path):
    assert not agree(passes(tuned(tiny_model, tmp_path, MultiAgentGRPOTrainer, disable_dropout=False).model))


def test_a_whole_model_is_saved_with_its_dropout(tiny_model, tmp_path):
    options = {"full_finetuning": True, "peft_config": None, "beta": 0.1}
    trainer = tuned(tiny_model, tmp_path, MultiAgentGRPOTrainer, **options)
    assert agree(passes(trainer.model)) and agree(passes(trainer.ref_model))
    trainer.save_model()
    trainer.export_agents(tmp_path / "agents")
    for folder in (tmp_path, tmp_path / "agents"):
        assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.3
    assert agree(passes(trainer.model))


def test_a_model_that_is_used_again_keeps_its_dropout():
    model = model_of("qwen2")
    for _ in range(2):
        disable_dropout(model)
    with own_dropout(model):
        assert model.config.attention_dropout == 0.3
    assert model.config.attention_dropout == 0.0
