"""With `share_prompts`, each prompt of a micro-batch runs once in the update, which is that of prompts for each row."""

import pytest
import teams
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DogeConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.team.shared_prompts import in_lines
from marcog_trl.trainers.argument_checks import check_shared_prompts


def train(model, path, shares, trainer=MultiAgentGRPOTrainer, **options):
    """The gradients of each step, and the shapes that the decoder's layers had in the update."""
    watch, shapes = teams.Watch(), []
    defaults = {
        "workflow": teams.Pair(num_turns=2), "num_generations": 4, "per_device_train_batch_size": 16, "max_steps": 2,
        "callbacks": [watch],
    }  # fmt: skip
    trainer = teams.make(model, path, trainer, share_prompts=shares, **{**defaults, **options})
    teams.script(trainer)
    trainer._causal_lm.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args: shapes.append(args[0].shape[:2]) if module.training else None
    )
    trainer.train()
    return watch.gradients, shapes


CASES = {
    "defaults": {},
    "kl": {"beta": 0.1, "gradient_checkpointing": True},
    "chain": {"workflow": teams.Chain(), "loss_type": "grpo"},  # prompts that siblings do not share
    "parts": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("trainer_class", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_separate_prompts(tiny_model, tmp_path, trainer_class, case):
    options = CASES[case]
    separate, rows = train(tiny_model, tmp_path / "a", False, trainer_class, **options)
    shared, lines = train(tiny_model, tmp_path / "b", True, trainer_class, **options)
    assert sum(r * t for r, t in lines) < 0.9 * sum(r * t for r, t in rows)
    for ours, theirs in zip(shared, separate, strict=True):
        assert ours.keys() == theirs.keys() and sum(gradient.abs().sum() for gradient in theirs.values()) > 0
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_lines():
    ids = torch.tensor([[0, 5, 6, 7, 0], [8, 9, 1, 2, 3], [0, 5, 4, 0, 3]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1]]).bool()
    lines, line, place = in_lines(ids, mask, 2)
    assert lines["input_ids"].tolist() == [[0, 5, 6, 7, 4, 3], [8, 9, 1, 2, 3, 0]]
    assert lines["position_ids"].tolist() == [[0, 1, 2, 3, 2, 4], [0, 1, 2, 3, 4, 0]]
    assert lines["input_ids"][line, place][mask].tolist() == ids[mask].tolist()
    seen = [[k for k, sees in enumerate(row) if sees] for row in lines["attention_mask"][0, 0]]
    assert seen == [[0], [1], [1, 2], [1, 2, 3], [1, 4], [1, 4, 5]]


@pytest.mark.parametrize("sharing", ["latent", "separate"])
def test_agents_that_differ_are_refused(tiny_model, tmp_path, sharing):
    with pytest.raises(ValueError, match=f"parameter_sharing='{sharing}'.*weights of their own"):
        teams.make(tiny_model, tmp_path, SHPPOTrainer, share_prompts=True, parameter_sharing=sharing)


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
OTHERS = {
    "mistral": (MistralConfig(**SIZES), "sdpa", "mistral has layers of other kinds"),
    "bamba": (BambaConfig(**SIZES, mamba_n_heads=2), "sdpa", "linear_attention.*share_prompts=False"),
    "gpt2": (GPT2Config(n_embd=32, n_layer=1, n_head=2), "sdpa", "rotary positions.*gpt2 has none"),
    "alibi": (FalconConfig(**SIZES, alibi=True), "sdpa", "rotary positions.*falcon has none"),
    "window": (
        DogeConfig(**SIZES, num_key_value_heads=2),
        "sdpa",
        r"doge has layers of other kinds \(keep_window_size\)",
    ),
    "eager": (LlamaConfig(**SIZES), "eager", "attn_implementation='eager'. Set it to 'sdpa'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name):
    config, attention, match = OTHERS[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with pytest.raises(ValueError, match=match):
        check_shared_prompts(model, aux_loss=False)


@pytest.mark.parametrize("change", ["another mask", "no such mask"])
def test_layers_that_compute_something_else_are_found(change):
    """Of code that does not say so in its configuration."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="sdpa").train()
    check_shared_prompts(model, aux_loss=False)
    assert model.training

    def other(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if change == "no such mask" and mask is not None:
            raise ValueError("masks have two dimensions")
        return args, kwargs | {"attention_mask": None}

    model.get_decoder().layers[0].self_attn.register_forward_pre_hook(other, with_kwargs=True)
    with pytest.raises(ValueError, match="llama has layers that compute something else"):
        check_shared_prompts(model, aux_loss=False)


def test_experts_with_an_auxiliary_loss_are_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    check_shared_prompts(model, aux_loss=False)
    with pytest.raises(ValueError, match="auxiliary loss"):
        check_shared_prompts(model, aux_loss=True)
