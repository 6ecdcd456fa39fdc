"""
Measures when one adapter is too small for a team: agents that agree on what words mean or not, adapters of several ranks.

    python recipes/benchmarks/capacity.py                          # runs what is missing, then reports
    python recipes/benchmarks/capacity.py --agents 8 --ranks 4     # a part; several processes can share the work
    python recipes/benchmarks/capacity.py --report                 # tables of the results so far

Agent j writes step j of a problem in its own way (see role_task.py): the model knows three functions for each step and has no
preference. In `agree`, a seed draws for each step the function that is meant. In `conflict`, it draws one for each step and agent, so
that the same words mean different things to different agents. An agent earns 1 for the function that is meant for it. Its number is in
its prompt. One policy with one LoRA, SHPPO, and a LoRA of the same rank for each agent train on equally many generated tokens.

A unit is one kind, size, rank, method and seed, and runs in a process of its own with one thread. Measured are the reward on held-out
problems (sequences of steps that training never showed), sampled, and the mean reward during training, which is the area under the
curve. Intervals are 95 % over problems and seeds, as in learning.py.
"""

import tempfile
from pathlib import Path

import numpy as np
from common import make_parser, run_study, table
from learning import Condition
from learning_report import figures_of, interval, paired, shown


TASK = Path(__file__).with_name("role_task.py")
KINDS = ("agree", "conflict")
METHODS = {"shared": "one LoRA", "latent": "SHPPO", "separate": "LoRA per agent"}
OTHERS = ("shared", "separate")  # what SHPPO is compared with
SETTINGS = {
    "per_device_train_batch_size": 96,  # fits 2, 4 and 8 agents
    "max_completion_length": 24,
    "logging_steps": 1,
    "learning_rate": 3e-3,
    "init_core_scale": 1.5,
    "behaviour_distance_coef": 0.0,  # prompts differ
}


def run(name, options):
    """Trains a team, and measures it: `final` (figures per problem) and `rewards` (of each step)."""
    from peft import LoraConfig
    from role_task import chain_model, draw_meanings, make_problems, measure, train

    from marcog_trl import Team

    kind, size, rank, method, seed = name.split("/")
    size, rank, seed = int(size), int(rank), int(seed)
    meanings = draw_meanings(kind, size, seed)
    settings = SETTINGS | {"parameter_sharing": method, "num_agents": size}
    plan = Condition(METHODS[method], workflow=f"{TASK}:OwnWay", settings=settings)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        problems = make_problems("train", size, 4000, meanings=meanings)
        rewards = train(plan, chain_model(options.output_dir), seed, options.tokens, problems, folder, adapter)
        team = Team.from_pretrained(folder, trust_remote_code=True)
        problems = make_problems(options.split, size, options.problems, meanings=meanings)
        final = {"wanted": measure(team, problems, options.num_samples)}
    return {"final": final, "rewards": rewards}


def units(options):
    """Names of the units that are asked for: kind/size/rank/method/seed."""
    return [
        f"{kind}/{size}/{rank}/{method}/{seed}"
        for seed in options.seeds
        for rank in options.ranks
        for size in options.agents
        for kind in KINDS
        for method in METHODS
    ]


def report(found):
    results = {}
    for name, runs in found.items():
        kind, size, rank, method = name.split("/")
        results.setdefault((kind, int(size), int(rank)), {})[method] = runs
    rows = []
    for (kind, size, rank), of in sorted(results.items()):
        ends = [shown(figures_of(of[name], "wanted")) if name in of else "" for name in METHODS]
        areas = [
            f"{np.mean([np.mean(run['rewards']) for run in of[name]]):.3f}" if name in of else "" for name in METHODS
        ]
        gains = [difference(of, name) for name in OTHERS]
        gains = [written(*gain) if gain else "" for gain in gains]
        rows.append([kind, size, rank, max(map(len, of.values())), *ends, *areas, *gains])
    heads = ["roles", "agents", "rank", "seeds", *(f"{label}, held-out" for label in METHODS.values())]
    heads += [*(f"{label}, area" for label in METHODS.values()), *(f"SHPPO − {METHODS[name]}" for name in OTHERS)]
    return table(heads, *rows)


def difference(of, other):
    """How far SHPPO is above another method on held-out problems, with the seeds that both have: mean and half its interval."""
    pairs = [figures_of(runs, "wanted") for runs in paired(of, "latent", other) if runs]
    return interval(np.subtract(*pairs)) if pairs else None


def written(mean, half):
    """Bold if the interval excludes 0."""
    text = f"{mean:+.3f} ± {half:.3f}"
    return f"**{text}**" if abs(mean) > half else text


def main():
    parser = make_parser(__doc__, tokens=60_000, problems=40, num_samples=2)
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/capacity"))
    run_study(__file__, parser, lambda options: f"{options.tokens}-tokens-{options.split}", units, run, report)


if __name__ == "__main__":
    main()
