"""Exports a team's agents as ordinary LoRA adapters, and pushes them, from a command line."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from marcog_trl.checks import COUNT, check_number
from marcog_trl.cli.agents_file import agent_settings
from marcog_trl.cli.arguments import SavedTeamArguments
from marcog_trl.cli.endings import Kept, one_line
from marcog_trl.cli.parsing import read_arguments
from marcog_trl.problems import load_problems
from marcog_trl.processes import this_process
from marcog_trl.team.export import export_team
from marcog_trl.team.hub import PushError, check_repo_id, push_team
from marcog_trl.team.loading import find_team
from marcog_trl.team.team import Team


@dataclass(kw_only=True)
class ExportArguments(SavedTeamArguments):
    """Arguments of recipes/export.py; see its `--help`."""

    output_dir: str = field(metadata={"help": "Folder to write, or a folder that was written before."})
    push: str | None = field(default=None, metadata={"help": "Repository of the Hub, such as user/team."})
    private: bool | None = field(default=None, metadata={"help": "Whether a repository that is created is private."})
    dataset_name: str = field(
        default="builtin",
        metadata={"help": "Problems over which the latents of agents in observation scope are averaged."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the problems."})
    num_problems: int = field(default=64, metadata={"help": "Number of problems, from the first one."})

    def __post_init__(self):
        if self.adapter is None and self.push is None:
            raise ValueError(
                "There is nothing to export or push. Set --adapter outputs/quickstart, or --push user/team."
            )
        if self.adapter is None and (self.num_agents is not None or self.agents is not None):
            raise ValueError(
                "--num_agents and --agents need --adapter. Set --adapter outputs/quickstart, for example."
            )
        check_number("num_problems", self.num_problems, COUNT, whole=True, default=64)
        if self.push is not None:
            check_repo_id(self.push)


def _export(args: ExportArguments) -> tuple[dict[str, Any], bool]:
    """Writes the team. Returns a report on each agent's adapter, and whether this process is the one that writes."""
    settings = agent_settings(args.num_agents, args.agents)
    problems = load_problems(args.dataset_name, args.dataset_split)
    problems = problems.select(range(min(args.num_problems, len(problems))))
    folder = find_team(str(args.adapter))
    team = Team.from_pretrained(folder, base_model=args.base_model, isolation=args.isolation, **settings)
    report = export_team(team, folder, args.output_dir, problems)
    team.close()
    return report, this_process().is_main_process


def export(kept: Kept) -> None:
    """
    Writes and pushes what the process's command line names, and prints what was written.

    Args:
        kept ([`Kept`]): Told what an interruption leaves behind.

    Raises:
        SystemExit: With one line, if anything in the command line or the team is wrong, or the push failed.
    """
    writes = True
    with one_line(ValueError, OSError, PushError):
        args = read_arguments(ExportArguments)
        if args.adapter is not None:
            with redirect_stdout(sys.stderr):  # libraries print there too
                report, writes = _export(args)
            kept.now = lambda: f"The export is in {args.output_dir}. Push it with --push user/team, without --adapter."
            for agent, own in report.items() if writes else ():
                distance = f"KL per token {own['kl_per_token']:.2g} on {own['tokens']} tokens"
                print(f"{args.output_dir}/agents/{agent}: {distance if own['tokens'] else 'the agent itself'}")
        if args.push is not None and writes:
            print(f"Pushed: {push_team(args.output_dir, args.push, private=args.private).commit_url}")
