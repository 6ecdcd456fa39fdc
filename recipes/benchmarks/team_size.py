"""
Measures a trained team with 1 to 6 agents on held-out problems, without further training.

    python recipes/benchmarks/team_size.py --team outputs/quickstart
    python recipes/benchmarks/team_size.py --team outputs/quickstart --agents agents.yaml  # other role texts, by name

Without `--team`, one of two agents is trained first; further flags are then those of recipes/train_shppo.py. The table goes to
`team_size.md` and `team_size.json` in `--output_dir`.
"""

import json
from contextlib import nullcontext
from pathlib import Path

from common import make_parser, table
from train_shppo import RECIPE

from marcog_trl import Team, evaluate_team, load_problems
from marcog_trl.cli.arguments import read_agents
from marcog_trl.cli.train import train
from marcog_trl.report.results import shown_interval, write_results
from marcog_trl.team.description import TEAM_FILE
from marcog_trl.team.loading import find_team


TABLE_HEAD = (
    "agents", "solved, sampled", "solved, greedy", "untrained, sampled", "untrained, greedy", "tokens per solution",
    "seconds per problem",
)  # fmt: skip


def measure(options, problems, roles, num_agents):
    """Figures of the trained and of the untrained team of that size, or why there is none."""
    try:
        team = Team.from_pretrained(options.team, num_agents=num_agents, roles=roles, isolation=options.isolation)
    except ValueError as error:
        return {"agents": num_agents, "refused": str(error)}
    row = {"agents": num_agents, "names": team.agents}
    for name in ("trained", "untrained"):
        with team.model.disable_adapter() if name == "untrained" else nullcontext():
            row[name] = evaluate_team(team, problems, options.num_samples, seed=options.seed)
    team.close()
    return row


def cells(row, num_samples):
    if "refused" in row:
        return [row["agents"], row["refused"], *[""] * (len(TABLE_HEAD) - 2)]
    shares = [
        f"{row[name][key]:.3f} ({shown_interval(row[name], key)})"
        for name in ("trained", "untrained")
        for key in ("solved", "solved_greedy")
    ]
    trained = row["trained"]
    tokens, seconds = trained["tokens_per_problem"] / num_samples, trained["seconds_per_problem"]
    return [row["agents"], *shares, f"{tokens:.1f}", f"{seconds:.3f}"]


def main():
    parser = make_parser(__doc__, num_samples=4, seed=0)
    parser.add_argument("--team", help="folder of a saved team; by default, one is trained")
    parser.add_argument("--agents", help="YAML file: a mapping of agents' names to role texts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--dataset_name", default="builtin")
    parser.add_argument("--dataset_split", default="test")
    parser.add_argument("--isolation", default="best_effort")
    parser.add_argument("--output_dir", default="outputs/team_size")
    options, rest = parser.parse_known_args()
    if options.team is not None and rest:
        parser.error(f"{rest} is unknown. Flags of training cannot be combined with --team.")
    texts = read_agents(options.agents)["roles"] if options.agents else None
    output = Path(options.output_dir)
    if options.team is None:
        options.team = str(output / "team")
        train(RECIPE, ["--output_dir", options.team, *rest])
    trained = json.loads((find_team(options.team) / TEAM_FILE).read_text())["agents"]
    problems = load_problems(options.dataset_name, options.dataset_split)
    described = {"team": options.team, "trained_agents": [agent["name"] for agent in trained], "roles": texts}
    described |= {"problems": len(problems), "num_samples": options.num_samples, "seed": options.seed}
    rows = []
    for num_agents in options.sizes:
        rows.append(measure(options, problems, texts, num_agents))
        print(" | ".join(map(str, cells(rows[-1], options.num_samples))), flush=True)
        write_results(output / "team_size.json", {**described, "rows": rows})
    measured = table(TABLE_HEAD, *(cells(row, options.num_samples) for row in rows)) + "\n"
    (output / "team_size.md").write_text(measured)
    print(f"\n{len(problems)} problems, {options.num_samples} samples each; trained with {len(trained)} agents\n")
    print(measured)


if __name__ == "__main__":
    main()
