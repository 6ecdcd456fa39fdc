"""
Trains tiny teams whose reward function fails on one of two processes, and writes what became of each process.

    accelerate launch --config_file recipes/ddp.yaml --num_processes 2 tests/distributed/fail_team.py MODEL OUT
"""

import os
import sys
from pathlib import Path

import torch
from train_team import RecordedPPOTrainer, make_trainer, weights_of

from marcog_trl import MultiAgentPPOConfig


RANK = int(os.environ["RANK"])


def faulty(completions, trainer_state, **kwargs):
    if RANK == 1 and trainer_state.global_step == 1:
        raise ZeroDivisionError("a defect on process 1")
    return [len(completion) % 5 / 5 for completion in completions]


def main():
    model, out = sys.argv[1], Path(sys.argv[2])
    result = {}
    for mode in ("raise", "mask"):
        # No turn but the first: the function is called once a step
        options = {"on_reward_error": mode, "num_iterations": 1}
        trainer = make_trainer(model, out / mode, RecordedPPOTrainer, MultiAgentPPOConfig, options, faulty)
        try:
            trainer.train()
        except Exception as error:
            result[mode] = f"{type(error).__name__}: {error}"
    result["failed"] = [log["rewards/failed"] for log in trainer.state.log_history if "rewards/failed" in log]
    result["steps"] = trainer.state.global_step
    result["weights"] = weights_of(trainer)
    torch.save(result, out / f"{RANK}.pt")


if __name__ == "__main__":
    main()
