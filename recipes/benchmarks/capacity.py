"""
Measures when one adapter is too small for a team: agents that agree on what words mean or not, adapters of several ranks.

    python recipes/benchmarks/capacity.py                          # runs what is missing, then reports
    python recipes/benchmarks/capacity.py --agents 8 --ranks 1 4   # a part; several processes can share the work
    python recipes/benchmarks/capacity.py --report                 # tables of the results so far

Agent j writes step j of a problem in its own way (see role_task.py): the model knows three functions for each step and has no
preference. In `agree`, a seed draws for each step the function that is meant. In `conflict`, it draws one for each step and agent, so
that the same words mean different things to different agents. An agent earns 1 for the function that is meant for it. Its number is in
its prompt. One policy with one LoRA, SHPPO, and a LoRA of the same rank for each agent train on equally many generated tokens.

A unit is one kind, size, rank, method and seed, and runs in a process of its own with one thread. Measured are the reward on held-out
problems (sequences of steps that training never showed), sampled, and the mean reward during training, which is the area under the
curve. Intervals are 95 % over problems and seeds, as in learning.py.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
from common import load_results, make_parser, result_path, run_study, table
from learning_report import figures_of, interval, paired, shown
from zero_shot import PARTING, condition


KINDS = ("agree", "conflict")
METHODS = {"shared": "one LoRA", "latent": "SHPPO", "separate": "LoRA per agent"}
OTHERS = ("shared", "separate")  # what SHPPO is compared with
LEARNING_RATES = {1: 3e-3, 2: 3e-3, 4: 3e-3, 16: 1e-3}  # by rank


def run_unit(kind, size, rank, method, seed, model, tokens, num_problems, num_samples, split):
    """
    Trains a team, and measures it.

    Returns:
        `dict`: `final` (figures per problem), `rewards` (of each step) and `ledger`.
    """
    from peft import LoraConfig
    from role_task import draw_meanings, make_problems, measure, train

    from marcog_trl import Team

    meanings = draw_meanings(kind, size, seed)
    settings = PARTING | {"learning_rate": LEARNING_RATES[rank]}
    plan = condition(METHODS[method], "OwnWay", parameter_sharing=method, num_agents=size, **settings)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        problems = make_problems("train", size, 4000, meanings=meanings)
        learned = train(plan, model, seed, tokens, problems, folder, adapter)
        team = Team.from_pretrained(folder, trust_remote_code=True)
        final = measure(team, make_problems(split, size, num_problems, meanings=meanings), num_samples)
    return {"final": final, **learned}


def run(name, options, folder):
    """One unit of the study, in this process."""
    import torch
    from role_task import chain_model

    from marcog_trl.report.results import write_results

    torch.set_num_threads(1)
    kind, size, rank, method, seed = name.split("/")
    measured = options.problems, options.num_samples, options.split
    model = chain_model(options.output_dir)
    result = run_unit(kind, int(size), int(rank), method, int(seed), model, options.tokens, *measured)
    write_results(result_path(folder, name), {"unit": name, "tokens": options.tokens, **result})


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


def report(folder):
    """Prints the table, and writes it and a picture of the differences into the folder of the results."""
    results = {}
    for name, result in load_results(folder):
        kind, size, rank, method = name.split("/")
        results.setdefault((kind, int(size), int(rank)), {}).setdefault(method, []).append(result)
    rows = []
    for (kind, size, rank), of in sorted(results.items()):
        ends = [shown(figures_of(of[name], "sampled/right")) if name in of else "" for name in METHODS]
        areas = [
            f"{np.mean([np.mean(run['rewards']) for run in of[name]]):.3f}" if name in of else "" for name in METHODS
        ]
        gains = [difference(of, name) for name in OTHERS]
        gains = [written(*gain) if gain else "" for gain in gains]
        rows.append([kind, size, rank, max(map(len, of.values())), *ends, *areas, *gains])
    heads = ["roles", "agents", "rank", "seeds", *(f"{label}, held-out" for label in METHODS.values())]
    heads += [*(f"{label}, area" for label in METHODS.values()), *(f"SHPPO − {METHODS[name]}" for name in OTHERS)]
    text = table(heads, *rows)
    print(text)
    (folder / "report.md").write_text(text + "\n")
    draw(results, folder / "capacity.png")


def difference(of, other):
    """How far SHPPO is above another method on held-out problems, with the seeds that both have: mean and half its interval."""
    pairs = [figures_of(runs, "sampled/right") for runs in paired(of, "latent", other) if runs]
    return interval(np.subtract(*pairs)) if pairs else None


def written(mean, half):
    """Bold if the interval excludes 0."""
    text = f"{mean:+.3f} ± {half:.3f}"
    return f"**{text}**" if abs(mean) > half else text


def draw(results, path):
    """Where SHPPO is above the other methods (green) and where below (red), by agents and rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes, ranks = (sorted({key[i] for key in results}) for i in (1, 2))
    figure, axes = plt.subplots(len(KINDS), len(OTHERS), figsize=(10, 6), layout="constrained", squeeze=False)
    for (kind, other), axis in zip(itertools.product(KINDS, OTHERS), axes.flat, strict=True):
        found = [[difference(results.get((kind, size, rank), {}), other) for rank in ranks] for size in sizes]
        means = [[cell[0] if cell else np.nan for cell in row] for row in found]
        image = axis.imshow(means, cmap="RdYlGn", vmin=-0.2, vmax=0.2, aspect="auto")
        for i, j in itertools.product(range(len(sizes)), range(len(ranks))):
            mean, half = found[i][j] or (0.0, 0.0)
            text = f"{mean:+.3f}\n± {half:.3f}" if found[i][j] else "not run"
            axis.text(j, i, text, ha="center", va="center", fontweight="bold" if abs(mean) > half else "normal")
        axis.set_xticks(range(len(ranks)), ranks)
        axis.set_yticks(range(len(sizes)), sizes)
        axis.set(title=f"roles {kind}: SHPPO − {METHODS[other]}", xlabel="rank", ylabel="agents")
    figure.colorbar(image, ax=axes, label="share of wanted functions")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    parser = make_parser(__doc__, tokens=60_000, problems=40, num_samples=2)
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16], choices=LEARNING_RATES)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/capacity"))
    run_study(__file__, parser, lambda options: f"{options.tokens}-tokens-{options.split}", units, run, report)


if __name__ == "__main__":
    main()
