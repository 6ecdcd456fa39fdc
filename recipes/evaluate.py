"""
Measures a saved team on held-out problems, as the training recipes do at their end:

    python recipes/evaluate.py --adapter outputs/quickstart
"""

from dataclasses import dataclass, field

from trl import TrlParser

from marcog_trl import load_problems
from marcog_trl.trainers.report import evaluate_team, write_results
from marcog_trl.trainers.saved import load_trainer


@dataclass
class EvaluationArguments:
    adapter: str = field(metadata={"help": "Folder of a saved team."})
    dataset_name: str = field(default="builtin", metadata={"help": "Problem set."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of the problems."})
    num_samples: int = field(default=4, metadata={"help": "Sampled episodes per problem."})
    isolation: str = field(default="strict", metadata={"help": "How programs are confined."})
    output: str | None = field(default=None, metadata={"help": "JSON file to write the figures to."})


def main():
    (args,) = TrlParser((EvaluationArguments,)).parse_args_and_config()
    problems = load_problems(args.dataset_name, args.dataset_test_split)
    trainer = load_trainer(args.adapter, problems, isolation=args.isolation)
    results = evaluate_team(trainer, problems, args.num_samples)
    if trainer.accelerator.is_main_process:
        for name, figure in results.items():
            print(f"{name:24} {figure:.4f}")
        if args.output is not None:
            write_results(args.output, results)


if __name__ == "__main__":
    main()
