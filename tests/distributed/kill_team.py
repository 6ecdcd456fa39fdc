"""
Trains tiny teams, on as many processes as it is launched with, kills all of them with SIGKILL at chosen moments, resumes from the
last checkpoint, and writes how far the weights are from those of the uninterrupted run.

    accelerate launch --config_file recipes/zero3.yaml --num_processes 2 tests/distributed/kill_team.py MODEL OUT PLAN

PLAN is JSON: a list of `{"run": one of RUNS, "kills": [[[moment, count, rank], ...], ...]}`; `"max_steps"` may be given too. Every
list of kills is a series: the first attempt is killed at the first one, the attempt that resumes at the second one, and the last
attempt runs to its end. Moments are those of `Killer`; rank -1 is the last process. The result, a list of series, is
OUT/results.json.

Every attempt is a fork of this process, since importing everything takes longer than training here.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from train_team import make_trainer, reward, weights_of

from marcog_trl import (
    MultiAgentGRPOConfig,
    MultiAgentGRPOTrainer,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    SHPPOConfig,
    SHPPOTrainer,
)
from marcog_trl.execution import Job


RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COMMON = {
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "shuffle_dataset": True,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "num_workers": 1,
}
TREE = {"turn_tree": True, "early_termination_threshold": 0.4, "per_device_train_batch_size": 12}
RUNS = {
    "ppo": (MultiAgentPPOTrainer, MultiAgentPPOConfig, {"num_iterations": 2}),
    "shppo": (SHPPOTrainer, SHPPOConfig, {"save_total_limit": 1}),
    "agent": (SHPPOTrainer, SHPPOConfig, {"latent_scope": "agent", "policy_gradient_to_latent": True}),
    "grpo": (MultiAgentGRPOTrainer, MultiAgentGRPOConfig, {"save_steps": 1}),
    "tree": (MultiAgentGRPOTrainer, MultiAgentGRPOConfig, TREE),
}


class Killer:
    """
    Counts the moments of an attempt, and kills all of its processes at the given one.

    Moments: `generate` (a forward pass of generation), `reward` (code of a reward function is running in a worker),
    `backward` (a gradient of the adapter was computed), and `save` (a file of a checkpoint is opened, renamed or removed: an
    opened one is left with a few bytes).
    """

    def __init__(self, pids: Path, kill=None):
        self.pids = pids
        self.moment, self.count, rank = kill or (None, 0, 0)
        self.rank = rank % WORLD
        self.counts = dict.fromkeys(("generate", "reward", "backward", "save"), 0)
        self.training = False
        (pids / str(RANK)).write_text(str(os.getpid()))

    def at(self, moment: str) -> bool:
        self.counts[moment] += self.training
        return self.training and (moment, RANK) == (self.moment, self.rank) and self.counts[moment] == self.count

    def kill(self):
        others = [int((self.pids / str(rank)).read_text()) for rank in range(WORLD) if rank != RANK]
        for pid in (*others, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def watch(self, trainer):
        sys.addaudithook(self.audit)
        torch_save = torch.save

        def save(content, file, *args, **kwargs):
            self.audit("open", (str(file), "w"))  # it opens files without Python's knowing
            return torch_save(content, file, *args, **kwargs)

        torch.save = save
        generating = False
        generate_single_turn = trainer._generate_single_turn

        def generate(*args):
            nonlocal generating
            generating = True
            output = generate_single_turn(*args)
            generating = False
            return output

        trainer._generate_single_turn = generate
        trainer.model.get_input_embeddings().register_forward_pre_hook(
            lambda *args: self.kill() if generating and self.at("generate") else None
        )
        adapter = next(p for name, p in trainer.model.named_parameters() if "lora_A" in name)
        adapter.register_hook(lambda gradient: self.kill() if self.at("backward") else None)

    def audit(self, event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[1], str) and not args[1].startswith("r")
        if not (writes or event in ("os.remove", "os.rename", "os.rmdir")) or "checkpoint-" not in str(args[0]):
            return
        if self.at("save"):
            if writes:
                Path(args[0]).write_bytes(b"\x80\x02")
            self.kill()


def train(model: str, folder: Path, run: str, killer: Killer, max_steps: int):
    """The trainer at the end of a run that goes on from the last checkpoint in the folder, and where it went on."""
    trainer_class, config_class, options = RUNS[run]

    def executed(completions, executor, **kwargs):
        """A reward from a worker; long enough for a kill in its midst."""
        code = "import time\ntime.sleep(0.01)\ndef f(x): return x"
        jobs = [Job(code, [f"assert f({len(completion)}) % 3"], entry_point="f") for completion in completions]
        future = executor.submit(jobs)
        if killer.at("reward"):
            killer.kill()
        return [verdict.passed / 10 for verdict in future.result()]

    trainer = make_trainer(
        model, folder, trainer_class, config_class, {**COMMON, **options, "max_steps": max_steps}, [reward, executed]
    )
    killer.watch(trainer)
    killer.training = True
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        if "has no checkpoint-*" not in str(error) and "cannot resume from" not in str(error):
            raise
        trainer.train()
    killer.training = False
    trainer.executor.close()
    return trainer, trainer._initial_global_step


class Server:
    """Forks attempts; one per process of the launch, which all fork the same ones in the same order."""

    def __init__(self, model: str, out: Path):
        self.model, self.out, self.attempts, self.max_steps = model, out, 0, 6

    def attempt(self, folder: Path, run: str, kill=None, whole: Path | None = None) -> bool:
        """Whether the run came to its end; `whole`: where the uninterrupted run is, or is to be."""
        self.attempts += 1
        pids = self.out / "attempts" / str(self.attempts)
        pids.mkdir(parents=True, exist_ok=True)
        if WORLD > 1:
            os.environ.update(MASTER_PORT=self._port(pids), TORCHELASTIC_USE_AGENT_STORE="False")
        child = os.fork()
        if not child:
            try:
                self._run(folder, run, Killer(pids, kill), whole)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and kill:
            return False
        if status:
            raise SystemExit(f"attempt {self.attempts}, {run} {kill}, ended with {status}")
        return True

    def _port(self, pids: Path) -> str:
        """A free port, found by the first process."""
        file = pids / "port"
        if RANK == 0:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                file.with_suffix(".partial").write_text(str(listener.getsockname()[1]))
            file.with_suffix(".partial").rename(file)
        while not file.exists():
            time.sleep(0.01)
        return file.read_text()

    def _run(self, folder: Path, run: str, killer: Killer, whole: Path) -> None:
        trainer, resumed_at = train(self.model, folder, run, killer, self.max_steps)
        weights = weights_of(trainer)
        reference = whole / "weights.pt"
        if RANK == 0:
            if folder == whole:
                torch.save(weights, reference)
            expected = torch.load(reference)
            difference = max((weights[name] - tensor).abs().max().item() for name, tensor in expected.items())
            (folder / "result.json").write_text(json.dumps({"resumed_at": resumed_at, "difference": difference}))
        trainer.accelerator.wait_for_everyone()

    def series(self, run: str, kills: list, number: int) -> dict:
        folder = self.out / run / str(number)
        happened = []
        for kill in [*kills, None]:
            if self.attempt(folder, run, kill and tuple(kill), self.out / run / "whole"):
                break
            happened.append(kill)
        result = json.loads((folder / "result.json").read_text()) if RANK == 0 else {}
        shutil.rmtree(folder, ignore_errors=True) if RANK == 0 else None
        return {"run": run, "kills": happened, **result}


def main():
    model, out, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    server, results = Server(model, out), []
    for part in plan:
        run = part["run"]
        server.max_steps = part.get("max_steps", server.max_steps)
        server.attempt(out / run / "whole", run, whole=out / run / "whole")
        for number, series in enumerate(part["kills"]):
            results.append(server.series(run, series, number))
            if RANK == 0:
                (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
