"""
Whether agents that are paid for what they add solve more than samples of one agent, and whether more agents than were trained do.

    python recipes/benchmarks/coverage.py --seeds 0 1 2 3 4      # runs what is missing, then reports
    python recipes/benchmarks/coverage.py --only latent --seeds 0  # one unit; several processes can share the work

All units start from the embedded default, which was taught to answer alone (see learning.py), and end after `--tokens` generated
tokens. Replies and prompts are as long. An update has 8 problems with 8 replies each: eight of one agent, or two of each of four.

At the end, 4, 8 and 16 agents, or samples of the one agent, answer 120 held-out problems: `selected` is the share of which the program
that a visible test chooses passes all tests; `any`, of which some program passes all hidden tests; and `one`, the share of programs that
do. `alike` is the share of pairs of agents with the same reply. A LoRA per agent exists for the trained agents alone.
"""

import functools
import tempfile
from pathlib import Path

import learning
from common import make_parser, run_study, table
from learning_report import figures_of, shown
from learning_task import study_model


TEAM, SIZES, VISIBLE = 4, (4, 8, 16), 1
NAMES = ["solver", *(f"solver{i}" for i in range(2, max(SIZES) + 1))]
SETTINGS = {"max_completion_length": 64, "per_device_train_batch_size": 64}
ONE = SETTINGS | {"workflow": "single", "num_generations": 8, "roles": {"solver": ""}}
MANY = SETTINGS | {"num_agents": TEAM, "num_generations": 2, "roles": dict.fromkeys(NAMES[:TEAM], "")}
COUNTERFACTUAL = {"joint_mode": "cross", "advantage": "none"}


def coverage(label, trainer="SHPPOTrainer", **settings):
    return learning.Condition(label, trainer, "coverage", MANY | settings, ("coverage_reward",))


CONDITIONS = {
    "untrained": learning.Condition(
        "untrained, samples of one agent", "MultiAgentGRPOTrainer", "single", ONE, trained=False
    ),
    "grpo": learning.Condition("GRPO, samples of one agent", "MultiAgentGRPOTrainer", "single", ONE),
    "ppo": learning.Condition("PPO, samples of one agent", "MultiAgentPPOTrainer", "single", ONE),
    "shared": coverage("coverage, MAGRPO, one shared policy", "MultiAgentGRPOTrainer", **COUNTERFACTUAL),
    "shared_ppo": coverage("coverage, PPO, one shared policy", "MultiAgentPPOTrainer"),
    "latent": coverage("coverage, SHPPO"),
    "separate": coverage("coverage, a LoRA per agent", parameter_sharing="separate"),
}


def measure(trainer, condition, problems, num_samples):
    """Figures of every problem: `one`, and for each number of agents `selected@k` and `any@k`."""
    from marcog_trl import Team, evaluate_team, make_reward

    alone = condition.workflow == "single"
    sizes = SIZES if alone or condition.settings.get("parameter_sharing") != "separate" else (TEAM,)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        for size in (1,) if alone else sizes:
            options = {} if alone else {"num_agents": size, "roles": dict.fromkeys(NAMES[:size], "")}
            reward = "execution_reward" if alone else make_reward("coverage_reward", all_or_nothing=True)
            samples = num_samples * max(SIZES) if alone else num_samples
            team = Team.from_pretrained(folder, **options)
            records = evaluate_team(team, problems, samples, reward_funcs=reward).records
            team.close()
            figures |= figures_of_samples(records, num_samples) if alone else figures_of_team(records, size)
    return figures


def mean(values):
    return sum(values) / len(values)


def solved(episode):
    return float(episode["status"] == "passed")


def passes_hidden_tests(episode):
    return float(all(test < VISIBLE for test in episode["failed_tests"]))


def figures_of_samples(records, num_samples):
    from marcog_trl.evaluation.comparison import select_samples

    figures = {"one": [mean([passes_hidden_tests(sample) for sample in record["samples"]]) for record in records]}
    for size in SIZES:
        figures[f"selected@{size}"], figures[f"any@{size}"] = [], []
        for record in records:
            samples = record["samples"][: num_samples * size]
            chosen = select_samples({**record, "samples": samples}, size, VISIBLE)["samples"]
            groups = [samples[start : start + size] for start in range(0, len(samples), size)]
            figures[f"selected@{size}"].append(mean([solved(episode) for episode in chosen]))
            figures[f"any@{size}"].append(mean([max(map(passes_hidden_tests, group)) for group in groups]))
    return figures


def figures_of_team(records, size):
    def logged(name):
        return [mean([e["components"][f"coverage_reward/{name}"] for e in record["samples"]]) for record in records]

    selected = [mean([solved(episode) for episode in record["samples"]]) for record in records]
    of_one = {"one": logged("mean"), "alike": logged("alike")} if size == TEAM else {}
    return {f"selected@{size}": selected, f"any@{size}": logged("any"), **of_one}


def run(name, options):
    from marcog_trl import load_problems

    condition, seed = name.split("/")
    plan = CONDITIONS[condition]
    problems = load_problems("builtin", "train"), load_problems("builtin", options.split)
    measure_team = functools.partial(measure, condition=plan, num_samples=options.samples)
    model = study_model(options.output_dir)
    return learning.run_unit(
        plan,
        int(seed),
        model,
        options.tokens,
        *problems,
        points=1,
        measure=lambda trainer, test, _: measure_team(trainer, problems=test),
    )


def units(options):
    """Names of the units that are asked for: condition/seed. What is not trained has one seed."""
    return [
        f"{name}/{seed}"
        for seed in options.seeds
        for name, condition in CONDITIONS.items()
        if (not options.only or name in options.only) and (condition.trained or seed == options.seeds[0])
    ]


def report(results):
    """A table of all conditions that have results."""
    columns = ["one", *(f"{rule}@{size}" for rule in ("selected", "any") for size in SIZES), "alike"]
    rows = []
    for name, condition in CONDITIONS.items():
        runs = results.get(name, [])
        if runs:
            found = runs[0]["final"]
            cells = [shown(figures_of(runs, column)) if column in found else "" for column in columns]
            tokens = mean([run["ledger"]["tokens"] for run in runs])
            rows.append([condition.label, len(runs), f"{tokens:,.0f}", *cells])
    return table(["", "seeds", "generated tokens", *columns], *rows)


def main():
    parser = make_parser(__doc__, tokens=60_000, samples=4)
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, help="conditions to run")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/coverage"))
    run_study(__file__, parser, lambda options: f"tokens-{options.tokens}", units, run, report)


if __name__ == "__main__":
    main()
