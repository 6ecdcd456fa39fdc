"""Adapters that are not LoRA train, and come back, as they are; others are refused before any work."""

import peft
import pytest
import teams
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from marcog_trl import Team
from marcog_trl.trainers import MultiAgentGRPOTrainer, MultiAgentPPOTrainer


LAYERS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]}
TOKENS = [20, 100, 101]
TYPES = {
    "LoRA of rank 4": peft.LoraConfig(r=4, trainable_token_indices=TOKENS, **LAYERS),
    "IA3": peft.IA3Config(feedforward_modules=["down_proj"], **LAYERS),
    "LNTuning": peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "LoHa of rank 4": peft.LoHaConfig(r=4, **LAYERS),
    "LoKr of rank 4": peft.LoKrConfig(r=4, **LAYERS),
    "VeRA of rank 4": peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(oft_block_size=4, **LAYERS),
    "BOFT": peft.BOFTConfig(boft_block_size=4, **LAYERS),
    "HRA of rank 4": peft.HRAConfig(r=4, **LAYERS),
}
REFUSED = [
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
    peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[5], cpt_mask=[1], cpt_tokens_type_mask=[1]),
    peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1),
    peft.AdaLoraConfig(total_step=10, **LAYERS),
    peft.PolyConfig(r=4, n_tasks=1, n_skills=2, **LAYERS),
    peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters={"0": "missing"}),
]


@torch.no_grad()
def logits(model):
    model.eval()
    return model(input_ids=torch.arange(20, 40)[None]).logits


@pytest.mark.parametrize("name", TYPES)
def test_an_adapter_trains_and_comes_back(tiny_model, tmp_path, capsys, name):
    options = {"peft_config": TYPES[name], "max_steps": 2, "beta": 0.01}
    trainer = teams.make(tiny_model, tmp_path / "team", MultiAgentPPOTrainer, **options)
    before = teams.trainable(trainer)
    trainer.train()
    assert capsys.readouterr().out.startswith(f"Training {name} on ")
    moved = teams.trainable(trainer)
    assert any(not torch.equal(tensor, moved[key]) for key, tensor in before.items() if "marcog" not in key)
    expected = logits(trainer.model)
    trainer.save_model()
    trainer.export_agents(tmp_path / "agents")
    assert torch.equal(logits(Team.from_pretrained(tmp_path / "team").model), expected)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "agents" / "solver")), expected)


@pytest.mark.parametrize("config", REFUSED, ids=lambda config: type(config).__name__)
def test_others_are_refused_before_any_work(tmp_path, config):
    with pytest.raises(
        ValueError, match=f"peft_config is a {type(config).__name__}, which .* Use an adapter of layers"
    ):
        teams.make(str(tmp_path / "no-model"), tmp_path, MultiAgentGRPOTrainer, peft_config=config)


def test_a_model_that_has_such_an_adapter_is_refused(tiny_model, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), REFUSED[0])
    with pytest.raises(ValueError, match="peft_config is a PromptTuningConfig"):
        teams.make(model, tmp_path, MultiAgentGRPOTrainer, peft_config=None)


def test_trainable_tokens_of_a_tied_head_have_the_whole_gradient(tiny_model, tmp_path):
    """The gradient of the loss through the embedding and the head, which share their weights."""
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, peft_config=TYPES["LoRA of rank 4"])
    ids = torch.tensor([[5, 20, 100, 101, 7, 100]])
    delta = next(p for name, p in trainer.model.named_parameters() if "trainable_tokens_delta" in name)
    mask = torch.ones_like(ids)
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5)[0].sum().backward()
    found = delta.grad.clone()
    delta.grad = None
    trainer.model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    torch.testing.assert_close(found, delta.grad)
    assert found.abs().min() > 0
