"""Teams on two nodes under ZeRO-2 and ZeRO-3: two launchers on this machine, with one process each."""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marcog_trl.execution import available_cores


ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("node_team.py")
pytestmark = pytest.mark.slow
RUNS = {"zero2": ["shared", "uninterrupted", "killed"], "zero3": ["shared", "apart"]}
RECORDED = [("zero2", "shared"), ("zero3", "shared"), ("zero3", "apart")]
# A worker that is killed, and what a launcher returns whose process fails
KILLED, FAILED = -signal.SIGKILL, 1


def difference(weights: dict, others: dict) -> float:
    assert weights.keys() == others.keys()
    return max((tensor - others[name]).abs().max().item() for name, tensor in weights.items())


def losses(run: dict) -> list[float]:
    return [log["loss"] for log in run["logs"] if "loss" in log]


def launch(mode: str, model: str, out: Path, runs: list[str]) -> list[int]:
    """Runs both nodes, which write to `OUT/RANK.txt`, and returns their exit statuses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / f"recipes/{mode}.yaml")]
    command += ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    nodes = []
    try:
        for rank in range(2):
            with open(out / f"{rank}.txt", "w") as log:
                node = ["--main_process_port", str(port), "--machine_rank", str(rank)]
                nodes.append(
                    subprocess.Popen(
                        [*command, *node, str(SCRIPT), model, str(out), *runs],
                        cwd=ROOT,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return [node.wait(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory):
    """`results(mode)`: folder with what the runs of a mode wrote; every mode is launched once."""

    @functools.cache
    def run(mode: str) -> Path:
        out = tmp_path_factory.mktemp(mode)
        codes = launch(mode, tiny_model, out, RUNS[mode])
        assert codes == ([FAILED, KILLED] if "killed" in RUNS[mode] else [0, 0]), (out / "0.txt").read_text()[-5000:]
        return out

    return run


@pytest.fixture(scope="module")
def one(tiny_model, tmp_path_factory) -> dict:
    """The same training with one process, which is this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        import node_team

        trainer = node_team.recorded(tiny_model, tmp_path_factory.mktemp("one"))
        trainer.train()
        return node_team.result_of(trainer)


@pytest.mark.parametrize(("mode", "run"), RECORDED)
class TestTwoNodes:
    def test_do_what_one_process_does(self, one, results, mode, run):
        whole = torch.load(results(mode) / f"{run}.pt")["whole"]
        assert whole["mode"] == (2, "DEEPSPEED", int(mode[-1]))
        assert difference(one["weights"], whole["weights"]) < 1e-5
        assert losses(whole) == pytest.approx(losses(one), abs=1e-5, rel=1e-4)

    def test_resume(self, results, mode, run):
        result = torch.load(results(mode) / f"{run}.pt")
        whole, resumed = result["whole"], result["resumed"]
        assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)
        assert len(losses(whole)) == 2
        assert difference(whole["weights"], resumed["weights"]) < 1e-6


@pytest.mark.parametrize(
    ("mode", "run", "nodes"), [("zero2", "uninterrupted", ["node_0", "node_1"]), ("zero3", "apart", ["node_0"])]
)
def test_weights_are_saved_whole(results, mode, run, nodes):
    """ZeRO-3 gathers them on the first node only, so the other one has none."""
    for file in ("adapter_model.safetensors", "team_modules.safetensors"):
        saved = sorted((results(mode) / run).glob(f"node_*/checkpoint-2/{file}"))
        assert [path.parts[-3] for path in saved] == nodes
        assert all(tensor.numel() for path in saved for tensor in load_file(path).values())


def test_folders_of_the_wrong_kind_are_refused(results):
    folder = results("zero3") / "apart"
    result = torch.load(folder.with_suffix(".pt"))
    assert result["errors"] == [
        f"save_on_each_node=True does not support output_dir={str(folder)!r}, a folder that several nodes share: they would "
        "overwrite each other's files. Set save_on_each_node=False, or an output_dir on a disk of each node.",
        f"output_dir={str(folder / 'node_0')!r} is not on a disk that all nodes share, so no run could resume from its "
        "checkpoints. Set another output_dir, or save_on_each_node=True (--save_on_each_node true).",
        f"resume_from_checkpoint=True: cannot resume from {folder / 'node_1' / 'checkpoint-2'}: it has no rng_state_0.pth, so "
        "process 0 did not run on this node. Give each node its earlier rank. Set resume_from_checkpoint to a complete "
        "checkpoint, or start a new run.",
    ]
    assert result["written"] == []
    assert result["workers"] == available_cores()


def test_a_node_that_dies_ends_the_run_which_resumes(tiny_model, results):
    out = results("zero2")
    said = (out / "0.txt").read_text()
    last = out / "killed" / "node_0" / "checkpoint-1"
    assert f"The last complete checkpoint is {last}." in said and "If another process failed first" in said
    assert launch("zero2", tiny_model, out, ["continued"]) == [0, 0], (out / "0.txt").read_text()[-5000:]
    expected, result = torch.load(out / "uninterrupted.pt"), torch.load(out / "continued.pt")
    assert result["resumed_at"] == 1
    assert losses(result) == pytest.approx(losses(expected), abs=1e-6)
    assert len(set(losses(expected))) == 3
    assert difference(expected["weights"], result["weights"]) < 1e-6
