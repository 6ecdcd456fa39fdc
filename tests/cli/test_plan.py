"""`marcog-trl plan`: what it prints."""

import json
from pathlib import Path

import pytest

from marcog_trl.cli.main import main


CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
SHAPE = {
    "model_type": "qwen2", "vocab_size": 3000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def shape(tmp_path):
    """Folder with the configuration of a model, and nothing else."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return str(folder)


def small(shape, *flags):
    """The 1.5B model's file with a small model."""
    return ["plan", "--config", str(CONFIGS / "qwen2.5-coder-1.5b.yaml"), "--model_name_or_path", shape, *flags]


def test_from_a_configuration_alone(shape, capsys):
    assert main(small(shape, "--prompt-tokens", "400", "--gpu-memory", "24")) == 0
    printed = capsys.readouterr().out
    assert "A rollout has 2 problems, 32 rows, at most 20,992 tokens and 16 evaluator calls." in printed
    for part in ("base weights", "adapter", "optimizer", "activations", "KV cache", "logits", "sum"):
        assert part in printed
    assert "fits 24 GiB." in printed and "Computed, not measured." in printed


def test_all_weights(shape, capsys):
    flags = small(shape, "--trainer", "ppo", "--prompt-tokens", "400", "--full_finetuning", "true", "--beta", "0.1")
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert "│ reference model" in printed.out and "│ adapter" not in printed.out
    assert "lora_alpha, lora_r have no effect with full_finetuning=True" in printed.err


def test_what_to_change(shape, capsys):
    large = ("--per_device_train_batch_size", "64", "--gradient_checkpointing", "false")
    assert main(small(shape, "--prompt-tokens", "2000", "--gpu-memory", "2", *large)) == 1
    printed = capsys.readouterr().out
    assert "does not fit 2 GiB." in printed and "--gradient_checkpointing True: " in printed


def test_prompts_of_the_data(tiny_model, capsys):
    flags = ["--model_name_or_path", tiny_model, "--reward", "collaboration_reward", "--trainer", "magrpo"]
    assert main(["plan", *flags, "--dataset_train_split", "train[:4]"]) == 0
    printed = capsys.readouterr().out
    assert "100 M" not in printed and "critic" not in printed
    tokens = int(printed.split("at most ")[1].split(" tokens")[0].replace(",", ""))
    assert tokens > 8 * 512  # the prompts have some, too


def test_the_process_on_a_cpu(shape, capsys):
    """Also of a machine that has a GPU, if the run does not use it."""
    assert main(small(shape, "--prompt-tokens", "400", "--use_cpu", "true")) == 0
    printed = capsys.readouterr().out
    sums = next(line for line in printed.splitlines() if line.startswith("│ sum"))
    tensors = max(float(cell) for cell in sums.strip("│").split("│")[1:])
    assert float(printed.split("a process takes ")[1].split(" GiB")[0]) == pytest.approx(tensors + 0.65, abs=0.06)


def test_several_processes(shape, capsys):
    several = ("--num-processes", "4", "--zero-stage", "2", "--generation_batch_size", "128")
    assert main(small(shape, "--prompt-tokens", "100", "--gradient_accumulation_steps", "1", *several)) == 0
    printed = capsys.readouterr().out
    assert "8 problems, 128 rows" in printed and "used for 4 optimizer steps" in printed
    assert "each of 4 processes" in printed and "reduce bucket" in printed
