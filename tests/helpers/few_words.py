"""A model with a vocabulary of 32 words, which learns in seconds."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
PROBLEMS = Dataset.from_dict({"prompt": ["w0 w1 w2"] * 4})


@pytest.fixture(scope="module")
def tokenizer():
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def base_model(folder):
    """Writes the model to a folder, as the base of a team must be, and loads it from there."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,  # embeddings are the classifier too: their size bounds its certainty
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder)
