"""Teams under DDP, ZeRO-2 and ZeRO-3 with two processes on CPU, launched as a user would, against one process."""

import functools
from pathlib import Path

import pytest
import torch
from launched import launched
from safetensors.torch import load_file


SCRIPT = Path(__file__).with_name("train_team.py")
# In every suite, and in the slow one
FEW = ("ppo", "observation", "siblings", "tree", "ties", "resumed")
MORE = "agent separate single some tools counterfactual full checkpointing unclipped resumed_full best madpo reward_model".split()
ABSENT = {  # on one process, trainers' own tests resume; under ZeRO, runs need what it does not support, or take long
    "one": ("checkpointing", "resumed", "resumed_full"),
    "ddp": ("checkpointing", "unclipped", "separate", "resumed_full"),
    "zero2": "siblings tree ties separate single some tools counterfactual checkpointing unclipped resumed_full best".split(),
    "zero3": "siblings ties single tools counterfactual unclipped best".split(),
}
MODES = {
    "one": (1, "NO", None),
    "ddp": (2, "MULTI_CPU", None),
    "zero2": (2, "DEEPSPEED", 2),
    "zero3": (2, "DEEPSPEED", 3),
}
RUNS = {mode: [run for run in (*FEW, *MORE) if run not in ABSENT[mode]] for mode in MODES}
# Gradient checkpointing changes nothing
SAME_AS = {"checkpointing": "unclipped"}
OTHERS = ("resumed", "resumed_full", "best")


def cases(*names, modes=MODES):
    """The modes and runs of these names, or of all that are recorded; most of them are slow."""
    return [
        pytest.param(mode, run, marks=[] if run in FEW and mode != "zero3" else pytest.mark.slow)
        for mode in modes
        for run in RUNS[mode]
        if (run in names if names else run not in OTHERS)
    ]


# Metrics of the whole generation batch, which does not depend on how it is split into micro-batches
GLOBAL = ("loss", "grad_norm", "reward", "reward_std", "episodes/masked", "latent/sigma", "latent/core_norm")
GLOBAL += ("critic/return_mean", "critic/explained_variance", "agents/critic/reward", "agents/writer/return")
GLOBAL += ("episodes/turns", "agents/writer/turn_2/reward", "rewards/margins", "agents/writer/margin", "num_tokens")
GLOBAL += ("agents/writer/tools/call_frequency", "tools/call_frequency")
GLOBAL += ("accuracy", "margin", "mean_reward")
GLOBAL += ("critic/baseline_share", "agents/critic/advantage_variance")
GLOBAL += ("advantages/zero",)
GLOBAL += ("ledger/generated_tokens", "ledger/evaluations")


@pytest.fixture(scope="session")
def results(tiny_model, tmp_path_factory):
    """`results(mode, run)`: folder with what the run wrote; those of a mode that are slow, or are not, are launched together."""
    folder = tmp_path_factory.mktemp("modes")

    @functools.cache
    def launch(mode: str, few: bool) -> Path:
        out = folder / f"{mode}-{'few' if few else 'more'}"
        out.mkdir()
        launched(mode, SCRIPT, tiny_model, out, *(run for run in RUNS[mode] if (run in FEW) == few), timeout=600)
        return out

    return lambda mode, run: launch(mode, run in FEW)


def load(results, mode: str, run: str) -> dict:
    return torch.load(results(mode, run) / f"{run}.pt")


def difference(weights: dict, others: dict) -> float:
    assert weights.keys() == others.keys()
    return max((tensor - others[name]).abs().max().item() for name, tensor in weights.items())


@pytest.mark.parametrize(("mode", "run"), cases())
def test_every_trainable_tensor_moves(results, mode, run):
    result = load(results, mode, run)
    assert result["mode"] == MODES[mode]
    still = [name for name, distance in result["moved"].items() if distance < 1e-5]
    assert not still


@pytest.mark.parametrize(("mode", "run"), cases(modes=("ddp", "zero2", "zero3")))
def test_processes_together_do_what_one_does(results, mode, run):
    one, several = load(results, "one", SAME_AS.get(run, run)), load(results, mode, run)
    assert difference(one["weights"], several["weights"]) < 1e-5
    assert len(one["logs"]) == len(several["logs"]) >= 3
    for expected, logged in zip(one["logs"], several["logs"], strict=True):
        for name in GLOBAL:
            if expected.get(name) is not None:
                assert logged[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name


@pytest.mark.parametrize(("mode", "run"), cases("resumed", "resumed_full"))
def test_resumed_run_continues_the_uninterrupted_one(results, mode, run):
    result = load(results, mode, run)
    whole, resumed = result["whole"], result["resumed"]
    losses, again = ([log["loss"] for log in run["logs"] if "loss" in log] for run in (whole, resumed))
    assert len(losses) == len(again) == 4
    assert again == pytest.approx(losses, abs=1e-6)
    assert losses[2] != losses[3]
    assert difference(whole["weights"], resumed["weights"]) < 1e-6


@pytest.mark.parametrize(("mode", "run"), cases("madpo"))
def test_madpo_resumes_and_saves_whole_tensors(results, mode, run):
    folder, result = results(mode, run) / run, load(results, mode, run)
    assert difference(result["weights"], result["resumed"]["weights"]) < 1e-6
    saved = load_file(folder / "adapter_model.safetensors")
    expected = {n.replace(".default", ""): x for n, x in result["weights"].items() if "marcog_team" not in n}
    assert difference(expected, saved) < 1e-6
    modules = load_file(folder / "team_modules.safetensors")
    start = load_file(folder / "start" / "team_modules.safetensors")
    assert modules.keys() == start.keys()
    for name, tensor in modules.items():
        assert torch.equal(tensor, start[name]) == name.startswith("latent_net"), name


@pytest.mark.parametrize(("mode", "run"), cases("reward_model"))
def test_a_reward_model_scores_as_it_did_in_training(results, mode, run):
    one, result = load(results, "one", run), load(results, mode, run)
    assert len(set(result["scores"])) == 8
    assert result["saved"] == pytest.approx(result["scores"], abs=1e-6)
    for name in ("scores", "mean", "std"):
        assert result[name] == pytest.approx(one[name], abs=1e-5)


@pytest.mark.parametrize(("mode", "run"), cases("observation"))
def test_saved_tensors_are_whole(results, mode, run):
    folder, weights = results(mode, run) / run, load(results, mode, run)["weights"]
    adapter = load_file(folder / "adapter_model.safetensors")
    modules = load_file(folder / "team_modules.safetensors")
    buffers = {name: modules.pop(name) for name in list(modules) if name.endswith((".batches", ".mean", ".square"))}
    assert len(buffers) == 9 and all(tensor.any() for tensor in buffers.values())
    expected = {name.replace(".default", ""): tensor for name, tensor in weights.items() if "marcog_team" not in name}
    assert difference(expected, adapter) == 0
    expected = {name.partition("marcog_team.")[2]: x for name, x in weights.items() if "marcog_team" in name}
    assert difference(expected, modules) == 0
    assert {name.split(".")[0] for name in modules} == {"value_head", "core_decoder", "latent_net", "inference_net"}


@pytest.mark.parametrize(("mode", "run"), cases("full"))
def test_all_weights_are_saved_whole(results, mode, run):
    weights = {name: x for name, x in load(results, mode, run)["weights"].items() if "marcog_team" not in name}
    assert "model.embed_tokens.weight" in weights
    saved = load_file(results(mode, run) / run / "model.safetensors")
    saved.pop("lm_head.weight", None)  # the embeddings, which ZeRO-2 saves twice
    assert difference(weights, saved) == 0


@pytest.mark.parametrize(("mode", "run"), cases("separate"))
def test_separate_adapters_are_saved_whole(results, mode, run):
    folder = results(mode, run) / run
    stacked = load_file(folder / "adapter_model.safetensors")
    for index, agent in enumerate(("writer", "critic")):
        own = load_file(folder / "agents" / agent / "adapter_model.safetensors")
        assert own.keys() == stacked.keys()
        for name, tensor in own.items():
            block = stacked[name].chunk(2, dim=0 if "lora_A" in name else 1)[index]
            assert torch.equal(tensor, block)


@pytest.mark.parametrize(("mode", "run"), cases("best"))
def test_best_model_is_loaded_at_the_end(results, mode, run):
    folder, result = results(mode, run) / run, load(results, mode, run)
    rewards = [log["eval_reward"] for log in result["logs"] if "eval_reward" in log]
    assert rewards == [-1.0, -2.0, -3.0]
    adapter = load_file(folder / "checkpoint-1" / "adapter_model.safetensors")
    modules = load_file(folder / "checkpoint-1" / "team_modules.safetensors")
    for name, tensor in result["weights"].items():
        team = name.partition("marcog_team.")[2]
        assert torch.equal(tensor, modules[team] if team else adapter[name.replace(".default", "")]), name
    last = load_file(folder / "checkpoint-3" / "team_modules.safetensors")
    assert difference(last, modules) > 0
