"""
Writes each agent of a saved team as an ordinary LoRA adapter, for PEFT and vLLM, beside a copy of the team, and pushes the
folder to the Hub:

    marcog-trl export --team outputs/quickstart --output_dir outputs/team
    marcog-trl export --output_dir outputs/team --push user/team

The second command pushes a folder that was written before. With `--push` in the first one, it does both.

With `--num_agents` or `--agents agents.yaml` (a list of `{name: ..., role: ...}`, which is the whole team, or a mapping of
names to texts) it is a team of other agents with the same weights. A team with a workflow of its own, whose file is saved with
it, needs `--trust_remote_code`, or a copy of that file:

    marcog-trl export --team outputs/debate --output_dir outputs/team --workflow my_team.py:Debate
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marcog_trl.checks import COUNT, check_number
from marcog_trl.cli.arguments import SavedTeamArguments, column_names
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.progress import hide_bars_of_libraries
from marcog_trl.endpoints import EndpointError
from marcog_trl.problems import load_problems
from marcog_trl.processes import this_process
from marcog_trl.team.export import check_new, export_team
from marcog_trl.team.hub import PushError, check_repo_id, push_team
from marcog_trl.team.loading import find_team


@dataclass(kw_only=True)
class ExportArguments(SavedTeamArguments):
    """Arguments of `marcog-trl export`; see its `--help`."""

    output_dir: str = field(metadata={"help": "Folder to write, or a folder that was written before."})
    push: str | None = field(default=None, metadata={"help": "Repository of the Hub, such as user/team."})
    private: bool | None = field(default=None, metadata={"help": "Whether a repository that is created is private."})
    dataset_name: str = field(
        default="builtin",
        metadata={"help": "Problems over which the latents of agents in observation scope are averaged."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the problems."})
    dataset_columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns under other names, such as prompt=question test=asserts."}
    )
    num_problems: int = field(default=64, metadata={"help": "Number of problems, from the first one."})

    def __post_init__(self):
        if self.adapter is None and self.push is None:
            raise ValueError(
                "There is nothing to export or push. Set --adapter outputs/quickstart, or --push user/team."
            )
        if self.adapter is None and (self.num_agents, self.agents, self.workflow) != (None, None, None):
            raise ValueError(
                "--num_agents, --agents and --workflow need --adapter. Set --adapter outputs/quickstart, for example."
            )
        column_names(self.dataset_columns)
        check_number("num_problems", self.num_problems, COUNT, whole=True, default=64)
        if self.push is not None:
            check_repo_id(self.push)


def _export(args: ExportArguments) -> tuple[dict[str, Any], bool]:
    """
    Writes the team. Returns a report on each agent's adapter, empty for one that speaks through an endpoint, and whether this
    process is the one that writes.
    """
    check_new(Path(args.output_dir))
    problems = load_problems(args.dataset_name, args.dataset_split, columns=column_names(args.dataset_columns))
    problems = problems.select(range(min(args.num_problems, len(problems))))
    team = args.load_team()
    report = export_team(team, find_team(str(args.adapter)), args.output_dir, problems)
    team.close()
    return report | {agent: {} for agent in team.outside}, this_process().is_main_process


def main(argv: Sequence[str], status: RunStatus) -> int:
    """
    Runs `marcog-trl export`: writes and pushes what the flags name, and prints what was written.

    Args:
        argv (`list[str]`): The flags.
        status ([`RunStatus`]): Told what an interruption leaves behind.

    Returns:
        `int`: The exit status, 0.

    Raises:
        SystemExit: With one line, if anything in the command line or the team is wrong, or the push failed.
    """
    writes = True
    hide_bars_of_libraries()
    with one_line(ValueError, OSError, EndpointError, PushError):
        (args,) = Parser(ExportArguments, prog="marcog-trl export", description=__doc__).parse(argv)
        if args.adapter is not None:
            with redirect_stdout(sys.stderr):  # libraries print there too
                report, writes = _export(args)
            status.now = lambda: (
                f"The export is in {args.output_dir}. Push it with --push user/team, without --adapter."
            )
            for agent, own in report.items() if writes else ():
                if not own:
                    print(f"{agent}: no adapter, because the agent speaks through an endpoint")
                    continue
                distance = f"KL per token {own['kl_per_token']:.2g} on {own['tokens']} tokens"
                print(f"{args.output_dir}/agents/{agent}: {distance if own['tokens'] else 'the agent itself'}")
        if args.push is not None and writes:
            print(f"Pushed: {push_team(args.output_dir, args.push, private=args.private).commit_url}")
    return 0
