"""Teams under DDP, ZeRO-2 and ZeRO-3 with two processes on CPU, launched as a user would, against one process."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_team.py")
RUNS = {
    "one": tuple(
        "ppo agent observation separate single siblings some tree tools counterfactual full resumed best".split()
    ),
    "ddp": tuple("ppo agent observation single siblings some tree tools counterfactual full resumed best".split()),
    "zero2": ("ppo", "agent", "observation", "full", "resumed"),
    "zero3": tuple("ppo agent observation checkpointing separate some tree full resumed resumed_full".split()),
}
MODES = {
    "one": (1, "NO", None),
    "ddp": (2, "MULTI_CPU", None),
    "zero2": (2, "DEEPSPEED", 2),
    "zero3": (2, "DEEPSPEED", 3),
}
# Gradient checkpointing changes nothing
SAME_AS = {"checkpointing": "unclipped"}
RUNS["one"] += ("unclipped",)
RUNS = {mode: (*runs, "madpo", "reward_model") for mode, runs in RUNS.items()}
OTHERS = ("resumed", "resumed_full", "best")
RECORDED = [(mode, run) for mode, runs in RUNS.items() for run in runs if run not in OTHERS]
# Metrics of the whole generation batch, which does not depend on how it is split into micro-batches
GLOBAL = ("loss", "grad_norm", "reward", "reward_std", "episodes/masked", "latent/sigma", "latent/core_norm")
GLOBAL += ("critic/return_mean", "critic/explained_variance", "agents/critic/reward", "agents/writer/return")
GLOBAL += ("episodes/turns", "agents/writer/turn_2/reward", "rewards/margins", "agents/writer/margin", "num_tokens")
GLOBAL += ("agents/writer/tools/call_frequency", "tools/call_frequency")
GLOBAL += ("accuracy", "margin", "mean_reward")
GLOBAL += ("critic/baseline_share", "agents/critic/advantage_variance")
GLOBAL += ("ledger/generated_tokens", "ledger/evaluations")


@pytest.fixture(scope="session")
def results(tiny_model, tmp_path_factory):
    """`results(mode)`: folder with what the runs of a mode wrote; every mode is launched once."""
    folder = tmp_path_factory.mktemp("modes")

    @functools.cache
    def launch(mode: str) -> Path:
        out = folder / mode
        out.mkdir()
        command = [sys.executable]
        if mode != "one":
            command += ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / f"{mode}.yaml")]
            command += ["--num_processes", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with open(out / "log.txt", "w") as log:
            process = subprocess.Popen(
                [*command, str(SCRIPT), tiny_model, str(out), *RUNS[mode]],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=600)
            except subprocess.TimeoutExpired:
                code = "a hang"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert code == 0, f"{mode} ended with {code}:\n{(out / 'log.txt').read_text()[-5000:]}"
        return out

    return launch


def load(folder: Path, run: str) -> dict:
    return torch.load(folder / f"{run}.pt")


def difference(weights: dict, others: dict) -> float:
    assert weights.keys() == others.keys()
    return max((tensor - others[name]).abs().max().item() for name, tensor in weights.items())


@pytest.mark.parametrize(("mode", "run"), RECORDED)
def test_every_trainable_tensor_moves(results, mode, run):
    result = load(results(mode), run)
    assert result["mode"] == MODES[mode]
    still = [name for name, distance in result["moved"].items() if distance < 1e-5]
    assert not still


@pytest.mark.parametrize(("mode", "run"), [case for case in RECORDED if case[0] != "one"])
def test_processes_together_do_what_one_does(results, mode, run):
    one, several = load(results("one"), SAME_AS.get(run, run)), load(results(mode), run)
    # Adam enlarges rounding where a weight has hardly any gradient, as most rows of the embeddings
    assert difference(one["weights"], several["weights"]) < (5e-5 if run == "full" else 1e-5)
    assert len(one["logs"]) == len(several["logs"]) >= 3
    for expected, logged in zip(one["logs"], several["logs"], strict=True):
        for name in GLOBAL:
            if expected.get(name) is not None:
                assert logged[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name


@pytest.mark.parametrize(("mode", "run"), [*((mode, "resumed") for mode in RUNS), ("zero3", "resumed_full")])
def test_resumed_run_continues_the_uninterrupted_one(results, mode, run):
    result = load(results(mode), run)
    whole, resumed = result["whole"], result["resumed"]
    losses, again = ([log["loss"] for log in run["logs"] if "loss" in log] for run in (whole, resumed))
    assert len(losses) == len(again) == 4
    assert again == pytest.approx(losses, abs=1e-6)
    assert losses[2] != losses[3]
    assert difference(whole["weights"], resumed["weights"]) < 1e-6


@pytest.mark.parametrize("mode", RUNS)
def test_madpo_resumes_and_saves_whole_tensors(results, mode):
    folder, result = results(mode), load(results(mode), "madpo")
    assert difference(result["weights"], result["resumed"]["weights"]) < 1e-6
    saved = load_file(folder / "madpo" / "adapter_model.safetensors")
    expected = {n.replace(".default", ""): x for n, x in result["weights"].items() if "marcog_team" not in n}
    assert difference(expected, saved) < 1e-6
    modules = load_file(folder / "madpo" / "team_modules.safetensors")
    start = load_file(folder / "madpo" / "start" / "team_modules.safetensors")
    assert modules.keys() == start.keys()
    for name, tensor in modules.items():
        assert torch.equal(tensor, start[name]) == name.startswith("latent_net"), name


@pytest.mark.parametrize("mode", RUNS)
def test_a_reward_model_scores_as_it_did_in_training(results, mode):
    one, result = load(results("one"), "reward_model"), load(results(mode), "reward_model")
    assert len(set(result["scores"])) == 8
    assert result["saved"] == pytest.approx(result["scores"], abs=1e-6)
    for name in ("scores", "mean", "std"):
        assert result[name] == pytest.approx(one[name], abs=1e-5)


@pytest.mark.parametrize("mode", RUNS)
def test_saved_tensors_are_whole(results, mode):
    folder = results(mode)
    weights = load(folder, "observation")["weights"]
    adapter = load_file(folder / "observation" / "adapter_model.safetensors")
    modules = load_file(folder / "observation" / "team_modules.safetensors")
    buffers = {name: modules.pop(name) for name in list(modules) if name.endswith((".batches", ".mean", ".square"))}
    assert len(buffers) == 6 and all(tensor.any() for tensor in buffers.values())
    expected = {name.replace(".default", ""): tensor for name, tensor in weights.items() if "marcog_team" not in name}
    assert difference(expected, adapter) == 0
    expected = {name.partition("marcog_team.")[2]: x for name, x in weights.items() if "marcog_team" in name}
    assert difference(expected, modules) == 0
    assert {name.split(".")[0] for name in modules} == {"value_head", "core_decoder", "latent_net", "inference_net"}


@pytest.mark.parametrize("mode", RUNS)
def test_all_weights_are_saved_whole(results, mode):
    folder = results(mode)
    weights = {name: x for name, x in load(folder, "full")["weights"].items() if "marcog_team" not in name}
    assert "model.embed_tokens.weight" in weights
    saved = load_file(folder / "full" / "model.safetensors")
    saved.pop("lm_head.weight", None)  # the embeddings, which ZeRO-2 saves twice
    assert difference(weights, saved) == 0


@pytest.mark.parametrize("mode", ["one", "zero3"])
def test_separate_adapters_are_saved_whole(results, mode):
    folder = results(mode)
    stacked = load_file(folder / "separate" / "adapter_model.safetensors")
    for index, agent in enumerate(("writer", "critic")):
        own = load_file(folder / "separate" / "agents" / agent / "adapter_model.safetensors")
        assert own.keys() == stacked.keys()
        for name, tensor in own.items():
            block = stacked[name].chunk(2, dim=0 if "lora_A" in name else 1)[index]
            assert torch.equal(tensor, block)


@pytest.mark.parametrize("mode", ["one", "ddp"])
def test_best_model_is_loaded_at_the_end(results, mode):
    folder = results(mode)
    result = load(folder, "best")
    rewards = [log["eval_reward"] for log in result["logs"] if "eval_reward" in log]
    assert rewards == [-1.0, -2.0, -3.0]
    checkpoint = folder / "best" / "checkpoint-1"
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    modules = load_file(checkpoint / "team_modules.safetensors")
    for name, tensor in result["weights"].items():
        team = name.partition("marcog_team.")[2]
        assert torch.equal(tensor, modules[team] if team else adapter[name.replace(".default", "")]), name
    last = load_file(folder / "best" / "checkpoint-3" / "team_modules.safetensors")
    assert difference(last, modules) > 0
