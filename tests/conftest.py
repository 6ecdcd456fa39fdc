"""A tiny model and tokenizer, made locally: no test needs the network."""

import functools
import gc
import os
import sys
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests start import their helpers too
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "helpers"), os.environ.get("PYTHONPATH")])
)


def pytest_collection_finish(session):
    """Has accelerate look up once, and not in every step, which packages there are."""
    imports = sys.modules.get("accelerate.utils.imports")
    if imports is not None:
        imports._is_package_available = functools.cache(imports._is_package_available)


@pytest.fixture(scope="module", autouse=True)
def older_objects():
    """Excludes existing objects from garbage collection, since accelerate runs a full one at the end of every training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_shared_executor():
    """Leaves no shared executor to the tests of another file, which may want other settings."""
    yield
    executor = sys.modules.get("marcog_trl.execution.executor")
    if executor is not None and executor._shared is not None:
        executor._shared.close()
        executor._shared = None


@pytest.fixture(scope="module")
def executor():
    """An executor for the tests of a file, wherever they run."""
    from marcog_trl.execution import CodeExecutor

    with CodeExecutor(num_workers=2, isolation="best_effort") as executor:
        yield executor


CORPUS = [
    "def f(x):\n    return aux(x) + 1\n",
    "def aux(x):\n    return x * 2\n",
    "Write only a Python function named aux that returns useful data. Code only.",
    "assert f(3) == 7",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Path of a random Qwen2 (2 layers, hidden 64, heads of 32) with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    gc.freeze()  # modules that transformers imports when they are first used
    return str(path)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory) -> str:
    """Path of a random Qwen3 whose chat template knows tools."""
    from tool_model import build_tool_model

    return build_tool_model(tmp_path_factory.mktemp("models") / "tools")


@pytest.fixture(scope="session")
def taught_model(tool_model, tmp_path_factory) -> str:
    """Path of a model that calls a tool."""
    from tool_model import teach

    return teach(tool_model, tmp_path_factory.mktemp("models") / "taught")
