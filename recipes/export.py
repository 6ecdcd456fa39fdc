"""
Writes each agent of a saved team as an ordinary LoRA adapter, for PEFT and vLLM, beside a copy of the team, and pushes the
folder to the Hub:

    python recipes/export.py --adapter outputs/quickstart --output_dir outputs/team --push user/team

With `--num_agents` or `--agents agents.yaml` (a list of `{name: ..., role: ...}`, which is the whole team, or a mapping of
names to texts) it is a team of other agents with the same weights. Without `--push` all stays local; without `--adapter` a folder that was written before is pushed, for instance again.
"""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from endings import Kept, interrupts, one_line

from marcog_trl import Team, load_problems
from marcog_trl.cli.launch import read_arguments
from marcog_trl.team.export import export_team
from marcog_trl.team.hub import PushError, check_repo_id, push_team
from marcog_trl.trainers.ranges import COUNT, check_number
from marcog_trl.trainers.saved import agent_settings, find_team


@dataclass
class ExportArguments:
    output_dir: str = field(metadata={"help": "Folder to write, or one that was written."})
    adapter: str | None = field(default=None, metadata={"help": "Folder of a saved team. Default: only push."})
    base_model: str | None = field(
        default=None, metadata={"help": "Where the team's base model is, if not where it was."}
    )
    num_agents: int | None = field(default=None, metadata={"help": "Size of the team, if not that which was trained."})
    agents: str | None = field(
        default=None,
        metadata={"help": "YAML file: a list of all agents with name and role, or a mapping of names to role texts."},
    )
    push: str | None = field(default=None, metadata={"help": "Repository of the Hub, such as user/team."})
    private: bool | None = field(default=None, metadata={"help": "Whether a repository that is created is private."})
    dataset_name: str = field(
        default="builtin", metadata={"help": "Problems that agents with latents in observation scope are averaged on."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the problems."})
    num_problems: int = field(default=64, metadata={"help": "Number of problems, from the first on."})
    isolation: str = field(default="strict", metadata={"help": "How programs are confined."})


def check(args):
    """Refuses a command line before any work is done."""
    if args.adapter is None and args.push is None:
        raise ValueError("There is nothing to export or push. Set --adapter outputs/quickstart, or --push user/team.")
    if args.adapter is None and (args.num_agents is not None or args.agents is not None):
        raise ValueError("--num_agents and --agents need --adapter. Set --adapter outputs/quickstart, for example.")
    check_number("num_problems", args.num_problems, COUNT, whole=True, default=64)
    if args.push is not None:
        check_repo_id(args.push)


def export(args):
    """Writes the team, and says what each agent's adapter is; whether this process is the one that writes."""
    settings = agent_settings(args.num_agents, args.agents)
    problems = load_problems(args.dataset_name, args.dataset_split)
    problems = problems.select(range(min(args.num_problems, len(problems))))
    folder = find_team(args.adapter)
    team = Team.from_pretrained(folder, base_model=args.base_model, isolation=args.isolation, **settings)
    report = export_team(team.trainer, folder, args.output_dir, problems)
    team.close()
    return report, team.trainer.is_world_process_zero()


def main():
    kept, writes = Kept(), True
    with interrupts(kept), one_line(ValueError, OSError, PushError):
        args = read_arguments(ExportArguments)
        check(args)
        if args.adapter is not None:
            with redirect_stdout(sys.stderr):  # libraries print there too
                report, writes = export(args)
            kept.now = lambda: f"The export is in {args.output_dir}; --push without --adapter pushes it."
            for agent, own in report.items() if writes else ():
                distance = f"KL per token {own['kl_per_token']:.2g} on {own['tokens']} tokens"
                print(f"{args.output_dir}/agents/{agent}: {distance if own['tokens'] else 'the agent itself'}")
        if args.push is not None and writes:
            print(f"Pushed: {push_team(args.output_dir, args.push, private=args.private).commit_url}")


if __name__ == "__main__":
    main()
