"""
An untrained model's answers to the role texts: problems solved, functions defined, helpers called, replies cut off.

    python recipes/benchmarks/prompts.py                                                  # built-in problems
    python recipes/benchmarks/prompts.py --dataset humaneval --split "test[100:]" --max_completion_length 256
    python recipes/benchmarks/prompts.py --workflows collaboration --roles roles.yaml     # {helper: ..., main: ...}
    python recipes/benchmarks/prompts.py --workflows pipeline --override num_turns=2 feedback=plain

Choose texts on the validation problems, and measure the chosen ones on the test problems. Every problem is played once with greedy
decoding and `--num_samples` times with `--temperature`. `calls` is the share of episodes in which main calls a helper, and `divided`
the share in which both do a part of the work (see `divided_work_reward`). `coder solved` is the share of problems that the coder of a
pipeline solves before the debuggers; they mend or break the other ones. Give the settings of a workflow with `--override`, such as
`num_agents=3`, and its own problems with `--dataset`.
"""

import sys
from pathlib import Path

import yaml
from common import make_parser, table, write_json

from marcog_trl import load_problems
from marcog_trl.cli.parsing import parse_override
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.problems import solution_job
from marcog_trl.team.settings import TeamSettings


MODES = ("greedy", "sampled")
WORKFLOWS = ("single", "collaboration", "pipeline", "discussion")
REWARDS = {
    "collaboration": ["collaboration_reward", "divided_work_reward"],
    "classeval": ["class_reward"],
}


def episodes_of(record, mode):
    """The episodes of a problem of a kind of decoding, `"greedy"` or `"sampled"`."""
    return [record["greedy"]] if mode == "greedy" else record["samples"]


def judge_drafts(team, problems, records):
    """Adds `draft_solved` to the episodes of a pipeline: whether the coder's reply, before debuggers, solves the problem."""
    pairs = [(p, e) for p, r in zip(problems, records, strict=True) for mode in MODES for e in episodes_of(r, mode)]
    drafts = [(problem, episode) for problem, episode in pairs if {"coder", "debugger"} <= set(episode["replies"])]
    verdicts = team.executor.run([solution_job(problem, episode["replies"]["coder"]) for problem, episode in drafts])
    for (_, episode), verdict in zip(drafts, verdicts, strict=True):
        episode["draft_solved"] = verdict.status == "passed"


def shares_of(records, mode):
    """Shares of the episodes of a kind of decoding, `"greedy"` or `"sampled"`, by what is counted."""
    episodes = [e for r in records for e in episodes_of(r, mode)]
    drafts = [(e["draft_solved"], e["status"] == "passed") for e in episodes if "draft_solved" in e]

    def mean(values):
        values = [value for value in values if value is not None]
        return sum(values) / len(values) if values else None

    def logged(name):
        return mean([e["components"].get(name) for e in episodes])

    agents = {name: None for e in episodes for name in e["agents"]}
    return {
        "solved": mean([e["status"] == "passed" for e in episodes]),
        "parses": mean([e["parses"] for e in episodes]),
        "coder solved": mean([draft for draft, _ in drafts]),
        "mended": mean([solved and not draft for draft, solved in drafts]),
        "broken": mean([draft and not solved for draft, solved in drafts]),
        "helper defines": logged("collaboration_reward/helper_definition"),
        "syntax": logged("collaboration_reward/syntax"),
        "calls": logged("collaboration_reward/calls_helper"),
        "divided": mean(
            [None if (r := e["components"].get("rewards/divided_work_reward")) is None else r > 2.5 for e in episodes]
        ),
        **{
            f"{name} {what}": sum(e["agents"][name][of] for e in episodes if name in e["agents"])
            / sum(e["agents"][name]["replies"] for e in episodes if name in e["agents"])
            for name in agents
            for what, of in (("cut off", "truncated"), ("tokens", "tokens"))
        },
    }


def measure(options, workflow):
    """Shares by kind of decoding: `{"greedy": {...}, "sampled": {...}}`."""
    overrides = dict(map(parse_override, options.override))
    roles = yaml.safe_load(options.roles.read_text()) if options.roles else None
    settings = TeamSettings(
        workflow=workflow,
        isolation="best_effort",
        max_completion_length=options.max_completion_length,
        temperature=options.temperature,
        **({"roles": roles} if roles else {}) | overrides,
    )
    team = untrained_team(options.model, settings, model_init_kwargs={"dtype": options.dtype})
    problems = load_problems(options.dataset, options.split)
    rewards = REWARDS.get(workflow, ["execution_reward"])
    records = evaluate_team(team, problems, options.num_samples, options.batch_size, reward_funcs=rewards).records
    judge_drafts(team, problems, records)
    team.close()
    return {mode: shares_of(records, mode) for mode in MODES}


def main():
    parser = make_parser(__doc__, num_samples=1, max_completion_length=160, batch_size=64)
    parser.add_argument(
        "--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="name or path of an untrained model"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", default="builtin", help="problem set, Hub id, or path")
    parser.add_argument("--split", default="validation[:24]")
    parser.add_argument("--workflows", nargs="+", default=list(WORKFLOWS))
    parser.add_argument("--roles", type=Path, help="YAML file of role texts by agent, of a single workflow")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--override", nargs="*", default=[], help="other settings of the team, such as num_agents=3")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    if options.roles is not None and len(options.workflows) > 1:
        sys.exit("error: --roles has the texts of one workflow. Name it with --workflows.")
    figures = {workflow: measure(options, workflow) for workflow in options.workflows}
    for workflow, of in figures.items():
        names = [name for name, share in of["greedy"].items() if share is not None]
        rows = [[mode, *(f"{of[mode][name]:.2f}" for name in names)] for mode in of]
        print(f"\n{workflow}\n{table(('', *names), *rows)}", flush=True)
    if options.output is not None:
        write_json(options.output, figures)


if __name__ == "__main__":
    main()
