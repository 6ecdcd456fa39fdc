"""
How the cost of a rollout grows with rows, agents, generations, turns and processes, apart from the model, and what
shared prompts save:

    python recipes/benchmarks/growth.py
    torchrun --nproc_per_node 2 recipes/benchmarks/growth.py --case rows --rows 2048

Replies of 48 random tokens come from a stand-in that returns at once, and the reward costs nothing. What is left are the loops
over rows that play episodes, score them and log metrics, those of TRL included, and the sums over advantages. `GRPOTrainer` at as
many rows is measured in the same way. The share is that of a step of `throughput.py`'s small model, which is measured with
`--step-rows` rows. Seconds are those of the processor. With several processes, `--rows` are those of each process, and each
prints its own table.

Shared prompts: steps of the small model with one agent and 4 generations, which take turns with steps in which each row has its
prompt computed for itself.
"""

import random
import statistics
import tempfile
import warnings
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

from common import ON_CPU, make_parser, table, write_json
from throughput import ProcessorClock, code_prompt, make_model, make_trainer

from marcog_trl.team import team


LENGTH = 48  # tokens of a reply
BASE = {"rows": 4096, "agents": 2, "generations": 4, "turns": 1}
SETTINGS = [
    *({"rows": rows} for rows in (256, 1024, 4096)),
    *({"agents": agents} for agents in (4, 8, 16, 32)),
    *({"generations": generations} for generations in (16, 64)),
    *({"turns": turns} for turns in (2, 4)),
    *({"rows": rows, "turns": turns, "turn_tree": True} for rows, turns in ((4080, 2), (4032, 3), (4080, 4))),
    {"agents": 1, "trl": True},
]
PHASES = ("play", "score", "credit and log")


def trainer_of(
    folder, tokenizer, rows, agents, generations, turns, turn_tree=False, trl=False, prompt_length=96, **options
):
    prompt = code_prompt(tokenizer, prompt_length)
    settings = {
        **ON_CPU, "per_device_train_batch_size": rows, "num_generations": generations, "max_completion_length": LENGTH, **options,
    }  # fmt: skip
    own = {} if trl else {"num_agents": agents, "num_turns": turns, "turn_tree": turn_tree}
    prompts = [f"{prompt} {i}" for i in range(rows // generations)]
    return make_trainer("grpo" if trl else "magrpo", folder, folder, prompts, **own, **settings)


def measure(folder, tokenizer, setting, options):
    """Median seconds of every phase of a generation batch."""
    trainer, rng = trainer_of(folder, tokenizer, **setting), random.Random(0)
    replies = [[rng.randrange(10, 300) for _ in range(LENGTH)] for _ in range(setting["rows"])]
    trainer._generate_single_turn = lambda prompt_ids, *rest: (replies[: len(prompt_ids)], None)
    clock, found = ProcessorClock(trainer), []
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    for _ in range(options.steps + 1):
        clock.spent = defaultdict(float)
        trainer._generate_and_score_completions(inputs)
        play, score, total = (clock.spent[name] for name in ("generate", "execute", "rollout"))
        found.append((play, score, total - play - score))
    return dict(zip(PHASES, map(statistics.median, zip(*found[1:], strict=True)), strict=True))


def measure_step(folder, tokenizer, options):
    """Seconds of a whole step per row, with the model."""
    setting = BASE | {"rows": options.step_rows, "max_steps": options.steps + 1}
    trainer = trainer_of(folder, tokenizer, **setting, generation_kwargs={"min_new_tokens": LENGTH})
    clock = ProcessorClock(trainer)
    trainer.train()
    return statistics.median(step["step"] for step in clock.steps[1:]) / options.step_rows


def compare_prompts(folder, tokenizer, length, options):
    """Ratios of processor time, of a step and of its generation, with and without shared prompts."""
    setting = BASE | {"rows": options.step_rows, "agents": 1, "max_steps": 2 * options.steps + 2}
    trainer = trainer_of(
        folder, tokenizer, **setting, prompt_length=length, generation_kwargs={"min_new_tokens": LENGTH}
    )
    clock, shared_prompts, generate = ProcessorClock(trainer), team.shared_prompts, trainer.team.generate

    def taking_turns(rows):
        team.shared_prompts = (nullcontext, shared_prompts)[len(clock.steps) % 2]
        return generate(rows)

    trainer.team.generate = taking_turns
    trainer.train()
    team.shared_prompts = shared_prompts
    return [
        statistics.median(
            shared[phase] / alone[phase] for alone, shared in zip(clock.steps[2::2], clock.steps[3::2], strict=True)
        )
        for phase in ("step", "generate")
    ]


def name_of(setting):
    kind = "TRL's GRPOTrainer" if setting.get("trl") else "a tree" if setting.get("turn_tree") else ""
    sizes = [f"{setting[name]} {name[:-1] if setting[name] == 1 else name}" for name in BASE if name != "rows"]
    return ", ".join([kind, *sizes] if kind else sizes)


def compare_rows(folder, tokenizer, options):
    settings = SETTINGS if options.rows is None else [{"rows": options.rows}]
    step, rows, results = measure_step(folder, tokenizer, options), [], []
    for setting in (BASE | changed for changed in settings):
        figure = measure(folder, tokenizer, setting, options)
        each, seconds = sum(figure.values()) / setting["rows"], [f"{figure[phase]:.2f}" for phase in PHASES]
        rows.append([name_of(setting), setting["rows"], *seconds, f"{1e6 * each:.0f}", f"{each / step:.2%}"])
        results.append({"setting": setting, **figure})
    print(f"a step with the model: {1e3 * step:.0f} ms per row\n")
    print(
        table(("", "rows", *(f"{phase}, s" for phase in PHASES), "µs per row", "share of a step"), *rows), flush=True
    )
    return {"step": step, "settings": results}


def compare_lengths(folder, tokenizer, options):
    ratios = {length: compare_prompts(folder, tokenizer, length, options) for length in options.lengths}
    print("shared prompts\n")
    header = ("tokens of a prompt", "a step, of that without", "its generation")
    print(table(header, *((length, *(f"{ratio:.2f}" for ratio in found)) for length, found in ratios.items())))
    return ratios


def main():
    cases = {"rows": compare_rows, "prompts": compare_lengths}
    parser = make_parser(__doc__, steps=2)
    parser.add_argument("--case", choices=(*cases, "all"), default="all")
    parser.add_argument("--step-rows", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[96, 384], help="tokens of shared prompts")
    parser.add_argument("--rows", type=int, help="measure only this number of rows, with 2 agents and 4 generations")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_model(folder, "small")
        chosen = cases if options.case == "all" else [options.case]
        write_json(options.output, {case: cases[case](folder, tokenizer, options) for case in chosen})


if __name__ == "__main__":
    main()
