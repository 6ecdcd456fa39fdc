"""
Trains tiny teams on two nodes: each has a launcher of its own, with one process. See `test_nodes.py`.

    accelerate launch --config_file recipes/zero3.yaml --num_processes 2 --num_machines 2 --machine_rank RANK \
        --main_process_ip HOST --main_process_port PORT tests/distributed/node_team.py MODEL OUT RUN ...

Every RUN is one of those below. OUT/RUN is a folder that the nodes share; OUT/RUN/node_RANK is in place of a disk of the node.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from train_team import RecordedSHPPOTrainer, make_trainer, result_of
from transformers import TrainerCallback

from marcog_trl import SHPPOConfig, SHPPOTrainer


NODE = int(os.environ.get("GROUP_RANK", 0))
OPTIONS = {
    "num_iterations": 1,
    "beta": 0.0,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "linear",
}


class Death(TrainerCallback):
    """Kills the second node, its launcher included."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and NODE == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)


def make(model, folder, own, trainer_class=SHPPOTrainer, **options):
    folder = folder / f"node_{NODE}" if own else folder
    options = {**OPTIONS, "save_on_each_node": own, **options}
    return make_trainer(model, folder, trainer_class, SHPPOConfig, options)


def recorded(model, folder, own=False):
    """A trainer whose replies do not depend on the processes."""
    return make(model, folder, own, RecordedSHPPOTrainer, max_steps=2)


def resumed(trainer):
    """Makes the last step again, from the checkpoint before it."""
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-1"))
    return result_of(trainer)


def shared(model, folder):
    whole, again = (recorded(model, folder) for _ in range(2))
    whole.train()
    return {"whole": result_of(whole), "resumed": resumed(again)}


def apart(model, folder):
    whole, again = (recorded(model, folder, own=True) for _ in range(2))
    errors = [refusal(whole, folder, True), refusal(whole, whole.args.output_dir, False)]
    written = [str(path) for path in folder.rglob("*.p*")]
    whole.train()
    errors.append(refusal(again, folder / f"node_{1 - NODE}", True))
    workers = whole.team.executor.num_workers
    result = {"errors": errors, "written": written, "workers": workers}
    return {**result, "whole": result_of(whole), "resumed": resumed(again)}


def refusal(trainer, output_dir, each_node):
    """What a run says in a folder of the wrong kind, or in that of the other node."""
    args = trainer.args
    before = args.output_dir, args.save_on_each_node
    args.output_dir, args.save_on_each_node = str(output_dir), each_node
    try:
        trainer.train(resume_from_checkpoint=True if list(Path(output_dir).glob("checkpoint-*")) else None)
    except ValueError as error:
        return str(error)
    finally:
        args.output_dir, args.save_on_each_node = before


def uninterrupted(model, folder):
    """A run with sampled replies."""
    trainer = make(model, folder, own=True)
    trainer.train()
    return result_of(trainer)


def killed(model, folder):
    """The same, until the second node dies."""
    trainer = make(model, folder, own=True)
    trainer.add_callback(Death())
    trainer.train()


def continued(model, folder):
    trainer = make(model, folder.with_name("killed"), own=True)
    trainer.train(resume_from_checkpoint=True)
    return {**result_of(trainer), "resumed_at": trainer._initial_global_step}


def main():
    model, out, *runs = sys.argv[1:]
    for name in runs:
        result = globals()[name](model, Path(out) / name)
        if int(os.environ["RANK"]) == 0:
            torch.save(result, Path(out) / f"{name}.pt")


if __name__ == "__main__":
    main()
