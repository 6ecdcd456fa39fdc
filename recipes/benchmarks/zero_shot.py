"""
Measures whether teams of 2 and 3 agents work with 4 to 8 agents without further training: what SHPPO's latents are for in its paper.

    python recipes/benchmarks/zero_shot.py                            # runs what is missing, then reports
    python recipes/benchmarks/zero_shot.py --only latent_observation  # several processes can share the work
    python recipes/benchmarks/zero_shot.py --report                   # tables of the results so far

Agent j writes step j of a problem (see role_task.py), and earns 1 if its function is right. Conditions differ in what agents share, and
in whether prompts say which step is whose; where all agents read one prompt, only LatentNet sees the role texts. All train on equally
many generated tokens. A trained team is saved and loaded with `Team.from_pretrained(folder, num_agents=n)`. With an adapter per agent,
that is refused. There, trained agents write further steps as copies of them would: agent 1 of two also writes steps 3, 5 and 7.

A unit is one trained size, condition and seed, and runs in a process of its own with one thread. Measured are held-out problems
(sequences of steps that training never showed), sampled at temperature 1 and greedily: the share of agents that write their own step
(right, or with one of its two mistakes), the share of right functions, and the share of problems with right functions only. Intervals
are 95 % over problems and seeds, as in learning.py.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from common import make_parser, run_study, table
from learning import Condition
from learning_report import figures_of, shown


TASK = Path(__file__).with_name("role_task.py")
TEAM_SIZES = (2, 3, 4, 5, 6, 8)
BATCH = {
    "per_device_train_batch_size": 96,
    "max_completion_length": 24,
    "logging_steps": 1,
}  # fits 2, 3, 4, 6 and 8 agents


def condition(label, prompts, **settings):
    return Condition(label, workflow=f"{TASK}:{prompts}", settings={**BATCH, **settings})


PARTING = {"init_core_scale": 1.5, "behaviour_distance_coef": 0.0}  # the figures are older than the defaults of today
CONDITIONS = {
    "untrained_roles": replace(condition("untrained, roles in prompts", "Chain"), trained=False),
    "untrained_same": replace(condition("untrained, same prompt", "SamePrompts"), trained=False),
    "shared_roles": condition("shared policy, roles in prompts", "Chain", parameter_sharing="shared"),
    "latent_roles": condition(
        "SHPPO, observation, roles in prompts", "Chain", init_core_scale=1.0, latent_learning_rate=1e-4
    ),
    "separate_roles": condition("LoRA per agent, roles in prompts", "Chain", parameter_sharing="separate"),
    "shared_same": condition("shared policy, same prompt", "SamePrompts", parameter_sharing="shared"),
    "latent_observation": condition("SHPPO, observation, same prompt", "SamePrompts", **PARTING),
    "latent_agent": condition("SHPPO, agent, same prompt", "SamePrompts", **PARTING, latent_scope="agent"),
    "separate_same": condition("LoRA per agent, same prompt", "SamePrompts", parameter_sharing="separate"),
}
TRAINED_SIZES = {2: list(CONDITIONS), 3: [name for name in CONDITIONS if not name.startswith("untrained")]}
CEILING = {6: ["shared_roles", "latent_observation"]}


def load_for(folder, plan, trained_size, num_agents):
    """A saved team with another number of agents."""
    from role_task import WORKFLOWS

    from marcog_trl import Team

    if plan.settings.get("parameter_sharing") != "separate":
        return Team.from_pretrained(folder, num_agents=num_agents, trust_remote_code=True)
    workflow = WORKFLOWS[plan.workflow.rpartition(":")[2]](trained_size, num_steps=num_agents)
    return Team.from_pretrained(folder, workflow=workflow)


def run(name, options):
    """
    Trains a team of a size, and measures it at all sizes.

    Returns:
        `dict`: `final` (figures per problem, such as `"5/sampled/right"`), `rewards` (of each step) and `ledger`.
    """
    from role_task import chain_model, make_problems, measure, train

    size, plan, seed = name.split("/")
    size, plan, model = int(size), CONDITIONS[plan], chain_model(options.output_dir)
    plan = replace(plan, settings=plan.settings | {"num_agents": size})
    final = {}
    with tempfile.TemporaryDirectory() as folder:
        learned = train(plan, model, int(seed), options.tokens, make_problems("train", size, 4000), folder)
        for num_agents in TEAM_SIZES:
            team = load_for(folder, plan, size, num_agents)
            problems = make_problems(options.split, num_agents, options.problems)
            figures = measure(team, problems, options.num_samples)
            final |= {f"{num_agents}/{name}": values for name, values in figures.items()}
    return {"final": final, **learned}


def units(options):
    """Names of the units that are asked for: size/condition/seed. What is not trained has one seed."""
    return [
        f"{size}/{name}/{seed}"
        for seed in options.seeds
        for size, names in (TRAINED_SIZES | CEILING).items()
        if size in options.sizes
        for name in names
        if options.only is None or name in options.only
        if CONDITIONS[name].trained or seed == options.seeds[0]
    ]


FIGURES = {"own": "agents that write their own step", "right": "right functions", "solved": "solved problems"}


def report(results):
    parts = []
    for figure, title in FIGURES.items():
        for decoding in ("sampled", "greedy"):
            rows = [
                ["–" if name.startswith("untrained") else size, CONDITIONS[name].label, len(results[f"{size}/{name}"])]
                + [shown(figures_of(results[f"{size}/{name}"], f"{n}/{decoding}/{figure}")) for n in TEAM_SIZES]
                for size, names in (TRAINED_SIZES | CEILING).items()
                for name in names
                if f"{size}/{name}" in results
            ]
            heads = ["trained with", "", "seeds", *(f"{n} agents" for n in TEAM_SIZES)]
            parts += [f"**{title}, {decoding}**", table(heads, *rows)]
    return "\n\n".join(parts)


def main():
    parser = make_parser(__doc__, tokens=40_000, problems=40, num_samples=2)
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, metavar="CONDITION", help=", ".join(CONDITIONS))
    sizes = sorted(TRAINED_SIZES | CEILING)
    parser.add_argument("--sizes", type=int, nargs="+", choices=sizes, default=sizes, help="agents of trained teams")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/zero_shot"))
    run_study(__file__, parser, lambda options: f"{options.tokens}-tokens-{options.split}", units, run, report)


if __name__ == "__main__":
    main()
