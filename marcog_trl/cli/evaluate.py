"""
Measures a team on problems: pass@k, tests passed, rewards, tokens and seconds, as a table and in files.

A saved team; its base model before training; one untrained agent with the team's budget of tokens; a model as it is:

    marcog-trl evaluate --team outputs/quickstart --output outputs/quickstart/evaluation.json
    marcog-trl evaluate --team outputs/quickstart --untrained
    marcog-trl evaluate --team outputs/quickstart --single_agent
    marcog-trl evaluate --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset_name humaneval \\
        --workflow collaboration --override temperature=0.8

The same weights with more or fewer agents, or with other role texts (agents.yaml: a list of `{name: ..., role: ...}`, which
is the whole team, or a mapping of names to texts):

    marcog-trl evaluate --team outputs/quickstart --num_agents 4
    marcog-trl evaluate --team outputs/quickstart --agents agents.yaml

A team with a workflow of its own, whose file is saved with it; or with a copy of that file:

    marcog-trl evaluate --team outputs/debate --trust_remote_code
    marcog-trl evaluate --team outputs/debate --workflow my_team.py:Debate

A team that was trained with a reward function of its own needs one that this package has:

    marcog-trl evaluate --team outputs/debate --trust_remote_code --reward execution_reward

The same command continues an evaluation with `--output` that was stopped. Several processes share the problems: with `accelerate
launch --config_file recipes/ddp.yaml --num_processes 8 recipes/evaluate.py ...` the figures are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marcog_trl.checks import Range, check_number
from marcog_trl.cli.arguments import PlayingTeamArguments, column_names
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.progress import hide_bars_of_libraries
from marcog_trl.endpoints import EndpointError
from marcog_trl.evaluation.baselines import single_agent
from marcog_trl.evaluation.evaluate import check_evaluation, evaluate_team
from marcog_trl.problems import load_problems
from marcog_trl.processes import this_process
from marcog_trl.report.console import print_evaluation
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.team.agent_contexts import without_adapter
from marcog_trl.team.team import Team
from marcog_trl.trainers.reward_functions import named_reward


@dataclass(kw_only=True)
class EvaluationArguments(PlayingTeamArguments):
    """Arguments of `marcog-trl evaluate`; see its `--help`."""

    untrained: bool = field(default=False, metadata={"help": "Whether the team is measured without its adapter."})
    single_agent: bool = field(
        default=False,
        metadata={"help": "Whether the base model is measured as one agent with the team's budget of tokens."},
    )
    dataset_name: str = field(default="builtin", metadata={"help": "Problem set, Hub id, or path."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the problems."})
    dataset_columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns under other names, such as prompt=question test=asserts."}
    )
    reward: list[str] | None = field(
        default=None, metadata={"help": "Names of reward functions to measure. Default: those of the training."}
    )
    num_samples: int = field(default=10, metadata={"help": "Sampled episodes per problem."})
    k: list[int] | None = field(
        default=None,
        metadata={"help": "Values of k for pass@k. Default: those of 1, 5 and 10 that num_samples allows."},
    )
    sampling: str = field(
        default="keyed",
        metadata={
            "help": "'keyed': the same samples with any number of processes and after a resume. 'stream': one random stream, "
            "as in the evaluations of the training recipes; needed with vLLM."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed of the samples."})
    batch_size: int = field(default=128, metadata={"help": "Number of episodes per process that are played at once."})
    output: str | None = field(
        default=None,
        metadata={
            "help": "JSON file for the figures; code and verdicts of each problem go into a JSONL file beside it, episodes into a Parquet file."
        },
    )
    overwrite_output: bool = field(
        default=False, metadata={"help": "Whether an evaluation with other settings in the output file is replaced."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_evaluation(self.num_samples, self.batch_size, self.k, self.sampling, self.output)
        check_number("seed", self.seed, Range(0, 2**32 - 1), whole=True, default=0)
        column_names(self.dataset_columns)
        for name in self.reward or ():
            named_reward(name)
        if self.untrained and self.single_agent:
            raise ValueError(
                "--untrained and --single_agent exclude each other: a single agent is untrained. Use one of them."
            )
        if self.model_name_or_path is not None and (self.untrained or self.single_agent):
            raise ValueError(
                "--untrained and --single_agent need a --team to leave the training out of. --model_name_or_path is untrained; "
                "for one agent, set --workflow single."
            )


def _load(args: EvaluationArguments) -> tuple[Team, str]:
    """The team, and what it is."""
    if args.model_name_or_path is not None:
        return args.load_team(), "untrained model"
    if args.single_agent:
        return args.load_team(single_agent), "untrained single agent, budget of the team"
    team = args.load_team()
    if args.untrained and team.description.full_finetuning:
        raise ValueError(
            f"--untrained leaves out a team's adapter, but {args.adapter!r} has all weights of its model. Measure the untrained "
            f"model with --model_name_or_path {team.description.base_model} and the same workflow."
        )
    return team, "untrained team" if args.untrained else "trained team"


def measure(args: EvaluationArguments) -> tuple[str, dict[str, Any], int]:
    """A description of the team, its figures, and the number of problems."""
    problems = load_problems(args.dataset_name, args.dataset_test_split, columns=column_names(args.dataset_columns))
    team, measured = _load(args)
    with without_adapter(team.model) if args.untrained else nullcontext():
        figures = evaluate_team(
            team,
            problems,
            args.num_samples,
            args.batch_size,
            args.seed,
            k=args.k,
            sampling=args.sampling,
            output=args.output,
            overwrite_output=args.overwrite_output,
            reward_funcs=args.reward,
            description={"measured": measured, "from": args.adapter or args.model_name_or_path},
        )
    return measured, figures, len(problems)


def _kept_by(output: str | None) -> str:
    """Line on what an interrupted evaluation leaves, and how to continue."""
    if output is None:
        return "Nothing was kept. With --output evaluation.json, the same command continues where it was stopped."
    partial = Path(output).with_suffix(".jsonl.partial")
    done = max(0, partial.read_bytes().count(b"\n") - 1) if partial.is_file() else 0  # the first line has the settings
    return f"{done} problems are kept in {partial}. The same command continues from there."


def main(argv: Sequence[str], status: RunStatus) -> int:
    """
    Runs `marcog-trl evaluate`: measures what the flags name, and prints the figures.

    Args:
        argv (`list[str]`): The flags.
        status ([`RunStatus`]): Told what an interruption leaves behind.

    Returns:
        `int`: The exit status, 0.

    Raises:
        SystemExit: With one line, if anything in the command line, the data or the model is wrong.
    """
    hide_bars_of_libraries()
    with one_line(ValueError, OSError, EndpointError, WorkflowError):
        (args,) = Parser(EvaluationArguments, prog="marcog-trl evaluate", description=__doc__).parse(argv)
        status.now = lambda: _kept_by(args.output)
        with redirect_stdout(sys.stderr):  # libraries print there too
            team, figures, number = measure(args)
    if this_process().is_main_process:
        print_evaluation(figures, f"{team}: {number} problems of {args.dataset_name}, {args.num_samples} samples each")
    return 0
