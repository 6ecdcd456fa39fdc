"""A tiny random language model with LoRA, in float64, for the tests of this folder."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM


def make_base(dtype=torch.float64):
    """A random two-layer Qwen2, equal at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        return Qwen2ForCausalLM(config).to(dtype).eval()


def make_model(dtype=torch.float64, **lora):
    """The same with a random LoRA whose B is not zero."""
    base = make_base(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **lora}
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def random_cores(ranks, rows, dtype=torch.float64, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, r, r, generator=generator, dtype=torch.float64).to(dtype) for r in ranks]


def make_batch():
    """Three rows, two of them padded on the left."""
    ids = torch.randint(1, 128, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
