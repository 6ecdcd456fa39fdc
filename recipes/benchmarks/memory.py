"""
Measures the peak memory of SHPPO with 2 and with 8 agents at the same number of rows, each in its own process.

    python recipes/benchmarks/memory.py
"""

import argparse
import json
import statistics
import tempfile
import warnings
from pathlib import Path

from common import ON_CPU, QUIET, make_parser, measure_apart, same_prompt_team, take_turns, variety
from throughput import SHAPES, make_model


def resident_mib(which):
    """`which`: "VmRSS", what is resident now, or "VmHWM", its peak. (`ru_maxrss` would begin with the peak of the parent.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def measure(num_agents, shape, tokens):
    from datasets import Dataset

    from marcog_trl import SHPPOConfig, SHPPOTrainer

    warnings.filterwarnings("ignore", category=FutureWarning)
    folder = tempfile.mkdtemp()
    make_model(folder, shape)
    args = SHPPOConfig(
        folder, per_device_train_batch_size=32, num_generations=4, max_completion_length=tokens, max_steps=3, beta=0.02,
        generation_kwargs={"min_new_tokens": tokens}, **QUIET | ON_CPU,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["def f(xs): add one to every number " * 8] * 64})
    trainer = SHPPOTrainer(folder, variety, args, dataset, workflow=same_prompt_team(num_agents))
    start = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the set-up
    trainer.train()
    peak = resident_mib("VmHWM")
    return {"peak_mib": peak, "training_mib": peak - start}


def main():
    parser = make_parser(__doc__, rounds=3, tokens=64)
    parser.add_argument("--shape", choices=SHAPES, default="medium", help="of the model")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        print(json.dumps(measure(*options.task)))
        return
    teams = {num_agents: [num_agents, options.shape, options.tokens] for num_agents in (2, 8)}
    figures = take_turns(teams, options.rounds, lambda task: measure_apart(__file__, task))
    for key in ("peak_mib", "training_mib"):
        two, eight = (statistics.median(figure[key] for figure in figures[num_agents]) for num_agents in teams)
        print(f"{key}: 2 agents {two:.0f}, 8 agents {eight:.0f}, ratio {eight / two:.3f}")


if __name__ == "__main__":
    main()
