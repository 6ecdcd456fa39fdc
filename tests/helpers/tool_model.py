"""A tiny model whose chat template knows tools, some tools, and replies that call them."""

import json
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from marcog_trl import Single
from marcog_trl.agents import Slot
from marcog_trl.rollout.records import Row
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.tools import ToolLoop


TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {i} * 4?"}] for i in range(4)]})


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def call(name="multiply", **arguments):
    """A reply that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def build_tool_model(path) -> str:
    """Saves a random Qwen3 (2 layers, hidden 32) with Qwen3's chat template to a folder."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TEMPLATE] * 2,
        trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    raw.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
        padding_side="left",
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def recite_texts(trainer, *calls):
    """
    Makes the model reply with the given texts: one list of texts per generate call.

    Returns the list to which every generate call adds the texts of its prompts.
    """
    asked, remaining = [], iter(calls)

    def generate(prompt_ids, *rest, **options):
        asked.append([trainer._tokenizer.decode(ids) for ids in prompt_ids])
        texts = next(remaining)
        assert len(texts) == len(prompt_ids)
        return [trainer._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], None

    trainer._generate_single_turn = generate
    return asked


def dialogue(i):
    """What a taught model says to the i-th of `CHATS`: a call, and the answer to its result."""
    return call(a=i, b=4), f"It is {4 * i}.<|im_end|>"


def teach(model_path, path) -> str:
    """Teaches the model to call `multiply` for each of `CHATS`, and to answer with the result."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    loop = ToolLoop(model, tokenizer, Single(), TeamSettings(), int)
    examples = []
    for i, row in enumerate(CHATS):
        said, answer = (tokenizer(text)["input_ids"] for text in dialogue(i))
        asked = Row(0, Slot("solver"), 0, row["prompt"], [])
        loop.encode([asked], lambda row: [multiply])
        result = loop._get_tool_suffix_ids([{"role": "tool", "name": "multiply", "content": str(4 * i)}])
        labels = [-100] * len(asked.prompt_ids) + said + [-100] * len(result) + answer
        examples.append({"input_ids": [*asked.prompt_ids, *said, *result, *answer], "labels": labels})
    batch = DataCollatorForSeq2Seq(tokenizer)(examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(**batch).loss
        if loss < 0.005:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
