"""
Measures the peak memory of training on CPU beside what `trainer.plan()` computes, each time in a process of its own.

    python recipes/benchmarks/memory.py

SHPPO with models of three shapes, and PPO that trains all weights, with and without a reference model. The C library gives freed
blocks back here (`MALLOC_MMAP_THRESHOLD_`); it would otherwise keep up to half as much again.
"""

import statistics
import tempfile
import warnings

from common import (
    ON_CPU,
    QUIET,
    forget_peak,
    make_parser,
    measure_apart,
    read_options,
    resident_mib,
    same_prompt_team,
    table,
    take_turns,
    variety,
)
from throughput import SHAPES, make_model


# TRL's buffer for log-probabilities has 32,768 columns. Of a smaller vocabulary, most of it would stay untouched
FEW_WORDS = {"vocab_size": 32_768}
ALL_WEIGHTS = {"tokens": 32, "rows": 8, "steps": 2, "full_finetuning": True, **FEW_WORDS}
PLANNED = {
    "small": {"shape": "small", "tokens": 64, "rows": 32, "steps": 3, **FEW_WORDS},
    "medium": {"shape": "medium", "tokens": 32, "rows": 32, "steps": 2, **FEW_WORDS},
    "0.5b": {"shape": "0.5b", "tokens": 16, "rows": 8, "steps": 2, "vocab_size": 151_936},
    "small, all weights": {"shape": "small", **ALL_WEIGHTS},
    "medium, all weights": {"shape": "medium", **ALL_WEIGHTS},
    "medium, all weights, beta=0": {"shape": "medium", "beta": 0.0, **ALL_WEIGHTS},
}


def measure(shape, tokens, rows=32, steps=3, vocab_size=None, full_finetuning=False, beta=0.02):
    from datasets import Dataset

    from marcog_trl import MultiAgentPPOConfig, MultiAgentPPOTrainer, SHPPOConfig, SHPPOTrainer

    warnings.filterwarnings("ignore", category=FutureWarning)
    if vocab_size is not None:
        SHAPES[shape] = SHAPES[shape] | {"vocab_size": vocab_size}
    folder = tempfile.mkdtemp()
    empty = resident_mib("VmRSS")
    make_model(folder, shape)
    config, trainer_class = (
        (MultiAgentPPOConfig, MultiAgentPPOTrainer) if full_finetuning else (SHPPOConfig, SHPPOTrainer)
    )
    args = config(
        folder, per_device_train_batch_size=rows, num_generations=4, max_completion_length=tokens, max_steps=steps, beta=beta,
        full_finetuning=full_finetuning, **QUIET | ON_CPU,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["def f(xs): add one to every number " * 8] * 64})
    trainer = trainer_class(folder, variety, args, dataset, workflow=same_prompt_team(2))
    trainer.generation_config.min_new_tokens = tokens
    forget_peak()
    trainer.train()
    peak = resident_mib("VmHWM")
    return {"tensors_mib": peak - empty, "plan_mib": trainer.plan().peak / 2**20}


def main():
    options = read_options(make_parser(__doc__, rounds=3), lambda task: measure(**task))
    figures = take_turns(
        PLANNED,
        options.rounds,
        lambda task: measure_apart(__file__, task, MALLOC_MMAP_THRESHOLD_="65536"),
    )
    rows = []
    for shape, found in figures.items():
        measured, planned = (statistics.median(figure[key] for figure in found) for key in ("tensors_mib", "plan_mib"))
        rows.append([shape, f"{measured:,.0f}", f"{planned:,.0f}", f"{planned / measured:.2f}"])
    print(table(("", "measured MiB", "plan MiB", "plan/measured"), *rows))


if __name__ == "__main__":
    main()
