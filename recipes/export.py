"""
Writes each agent of a saved team as an ordinary LoRA adapter, for PEFT and vLLM, beside a copy of the team, and pushes the
folder to the Hub:

    python recipes/export.py --adapter outputs/quickstart --output_dir outputs/team --push user/team

Without `--push` all stays local; without `--adapter` a folder that was written before is pushed, for instance again.
"""

import sys
from dataclasses import dataclass, field

from trl import TrlParser

from marcog_trl import Team, load_problems
from marcog_trl.trainers.export import PushError, export_team, push_team
from marcog_trl.trainers.saved import find_team


@dataclass
class ExportArguments:
    output_dir: str = field(metadata={"help": "Folder to write, or one that was written."})
    adapter: str | None = field(default=None, metadata={"help": "Folder of a saved team. Default: only push."})
    push: str | None = field(default=None, metadata={"help": "Repository of the Hub, such as user/team."})
    private: bool | None = field(default=None, metadata={"help": "Whether a repository that is created is private."})
    dataset_name: str = field(
        default="builtin", metadata={"help": "Problems that agents with latents in observation scope are averaged on."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the problems."})
    num_problems: int = field(default=64, metadata={"help": "Number of problems, from the first on."})
    isolation: str = field(default="strict", metadata={"help": "How programs are confined."})


def main():
    (args,) = TrlParser((ExportArguments,)).parse_args_and_config()
    if args.adapter is None and args.push is None:
        sys.exit("error: neither adapter nor push says what to do; --adapter outputs/quickstart works")
    try:
        if args.adapter is not None:
            problems = load_problems(args.dataset_name, args.dataset_split)
            problems = problems.select(range(min(args.num_problems, len(problems))))
            team = Team.from_pretrained(args.adapter, isolation=args.isolation)
            for agent, report in export_team(team.trainer, find_team(args.adapter), args.output_dir, problems).items():
                distance = f"KL per token {report['kl_per_token']:.2g} on {report['tokens']} tokens"
                print(f"{args.output_dir}/agents/{agent}: {distance if report['tokens'] else 'the agent itself'}")
            team.close()
        if args.push is not None:
            print(f"Pushed: {push_team(args.output_dir, args.push, private=args.private).commit_url}")
    except (ValueError, PushError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
