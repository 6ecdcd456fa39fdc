"""
Plays teams on the same problems, and says which one solves more, with what budget:

    marcog-trl compare outputs/team outputs/agent --dataset_name humaneval --output outputs/comparison.json

The first team is compared with each of the others. A team is a folder or a repository of the Hub, a model that answers alone
(`model:NAME`), or the `.json` file of an evaluation that was made before. `--samples 4` lets four samples of an agent that works
alone compete, and visible tests choose among them, as in the workflow `coverage`:

    marcog-trl compare outputs/coverage outputs/agent model:Qwen/Qwen2.5-Coder-0.5B-Instruct --samples 4

Differences are paired by problem, with 95 % intervals over problems. `--output` writes them, with a picture of the same name.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset

from marcog_trl.checks import Count, check_fields
from marcog_trl.cli.arguments import PlayingTeamArguments, column_names
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.progress import hide_bars_of_libraries
from marcog_trl.endpoints import EndpointError
from marcog_trl.evaluation.comparison import (
    BUDGETS,
    Difference,
    as_json,
    budgets,
    compare,
    read_evaluation,
    select_samples,
)
from marcog_trl.evaluation.evaluate import check_evaluation, evaluate_team
from marcog_trl.evaluation.journal import ProblemRecord
from marcog_trl.files import write_json, write_whole
from marcog_trl.problems import load_problems
from marcog_trl.processes import this_process
from marcog_trl.report.console import print_table
from marcog_trl.report.plots import draw_differences
from marcog_trl.rewards import execution_reward
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.team import Team


@dataclass(kw_only=True)
class ComparisonArguments:
    """Arguments of `marcog-trl compare`; see its `--help`."""

    dataset_name: str = field(default="builtin", metadata={"help": "Problem set, Hub id, or path."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the problems."})
    dataset_columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns under other names, such as prompt=question test=asserts."}
    )
    num_samples: Count = field(default=4, metadata={"help": "Sampled episodes of each team per problem."})
    samples: Count = field(
        default=1, metadata={"help": "Samples of an agent that works alone, of which one is chosen by visible tests."}
    )
    visible_tests: Count = field(default=1, metadata={"help": "Number of tests that choose among --samples."})
    batch_size: int = field(default=128, metadata={"help": "Number of episodes that are played at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the samples and of the intervals."})
    sampling: str = field(default="keyed", metadata={"help": "As in `marcog-trl evaluate`."})
    isolation: str = field(default="strict", metadata={"help": "How programs are confined."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Whether to run the files of saved workflows."})
    override: list[str] = field(
        default_factory=list, metadata={"help": "Settings of all teams, such as max_completion_length=512."}
    )
    output: str | None = field(default=None, metadata={"help": "JSON file, beside which the picture is written."})

    def __post_init__(self):
        check_fields(self)
        check_evaluation(self.num_samples, self.batch_size, None, self.sampling, self.output)

    def load(self, name: str) -> Team:
        """Loads the team, or the model that answers alone, with this name."""
        model = name.removeprefix("model:") if name.startswith("model:") else None
        arguments = PlayingTeamArguments(
            adapter=name if model is None else None,
            model_name_or_path=model,
            trust_remote_code=self.trust_remote_code,
            isolation=self.isolation,
            override=self.override,
        )
        return arguments.load_team()


def play(args: ComparisonArguments, name: str, problems: Dataset) -> list[ProblemRecord]:
    """Plays a team on the problems."""
    team = args.load(name)
    works_alone = len(team.workflow.slots) == 1
    count = args.num_samples * (args.samples if works_alone else 1)
    found = evaluate_team(
        team, problems, count, args.batch_size, args.seed, sampling=args.sampling, reward_funcs="execution_reward"
    )
    team.close()
    return found.records


def check_teams(args: ComparisonArguments, names: Sequence[str], problems: Dataset) -> None:
    """
    Checks, before any team plays, that all can.

    Raises:
        ValueError: If a team cannot be loaded, or does not fit the problems.
    """
    for name in names:
        try:
            team = args.load(name)
            check_dataset("dataset_name", problems, team.workflow, [execution_reward])
        except (ValueError, OSError) as error:
            raise ValueError(f"{name}: {error}") from error
        del team
        gc.collect()  # one model at a time


def works_alone(records: Sequence[ProblemRecord]) -> bool:
    """Whether the episodes have one reply."""
    return all(len(record["greedy"]["messages"]) == 1 for record in records)


def run(args: ComparisonArguments, names: Sequence[str]) -> tuple[list[Difference], dict[str, list[ProblemRecord]]]:
    """The differences between the first team and each of the others, and the records of all."""
    records = {name: read_evaluation(name) for name in names if name.endswith(".json")}
    playing = [name for name in names if name not in records]
    if playing:
        problems = load_problems(
            args.dataset_name, args.dataset_test_split, columns=column_names(args.dataset_columns)
        )
        check_teams(args, playing, problems)
        records |= {name: play(args, name, problems) for name in playing}
    for name, own in records.items():
        if args.samples > 1 and works_alone(own):
            records[name] = [select_samples(record, args.samples, args.visible_tests) for record in own]
    first, *others = names
    return [compare(first, other, records, args.seed) for other in others], records


def show(differences: Sequence[Difference], records: dict[str, list[ProblemRecord]]) -> None:
    """Prints what each team spends on an episode, and the verdicts."""
    rows = [(name, *(f"{value:,.3g}" for value in budgets(own).values())) for name, own in records.items()]
    print_table(tuple(BUDGETS.values()), rows, f"one episode, on {differences[0].problems} problems")
    for difference in differences:
        low, high = difference.solved_greedy_interval
        greedy = f"greedy {100 * difference.solved_greedy:+.1f} points ({100 * low:.1f} to {100 * high:.1f})"
        print(f"{difference.verdict}; {greedy}")


def main(argv: Sequence[str], status: RunStatus) -> int:
    """
    Runs `marcog-trl compare`.

    Args:
        argv (`list[str]`): Names of the teams, then the flags.
        status ([`RunStatus`]): Told what an interruption leaves behind.

    Returns:
        `int`: The exit status, 0.

    Raises:
        SystemExit: With one line, if anything in the command line, the data or the teams is wrong.
    """
    hide_bars_of_libraries()
    first_flag = next((i for i, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    names, flags = argv[:first_flag], argv[first_flag:]
    with one_line(ValueError, OSError, EndpointError, WorkflowError):
        (args,) = Parser(ComparisonArguments, prog="marcog-trl compare TEAM TEAM ...", description=__doc__).parse(
            flags
        )
        if len(names) < 2 or len({*names}) < len(names):
            raise ValueError(
                f"compare needs at least two different teams, but has {list(names)}. Write marcog-trl compare outputs/team "
                "model:NAME, for example."
            )
        with redirect_stdout(sys.stderr):  # libraries print there too
            differences, records = run(args, names)
    if this_process().is_main_process:
        show(differences, records)
        if args.output is not None:
            output = Path(args.output)
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, as_json(differences, records))
            write_whole(output.with_suffix(".png"), draw_differences(differences))
    return 0
