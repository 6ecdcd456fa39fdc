"""
Writes problems whose code has a bug to a folder, as `train.jsonl`, `validation.jsonl` and `test.jsonl`:

    python recipes/examples/bugfix/problems.py outputs/builtin_bugs
    python recipes/examples/bugfix/problems.py outputs/humanevalfix --name humanevalfix

`builtin` is the built-in problem set with a mistake in one step of each solution, without network. `humanevalfix` is HumanEval with
the bugs of HumanEvalPack, from the Hub: 32 problems for `validation` and 130 for `train`; `test` has all 164. The columns are those of
`load_problems`, and `buggy_solution`.
"""

import argparse
import random
from pathlib import Path

from datasets import Dataset, load_dataset

from marcog_trl import load_problems
from marcog_trl.parsing.syntax import combine
from marcog_trl.problems.builtin import SIZES, STEPS, write_aux, write_main
from marcog_trl.problems.tests import helpers_before, stub_line


def builtin_bugs(split, seed=0):
    """
    A split of the built-in problems with bugs. Such code fails at least one of the tests, because the tests of a built-in problem
    tell its solution from those with a mistake in one step.

    Args:
        split (`str`): `train`, `validation` or `test`.
        seed (`int`, *optional*, defaults to `0`): Seed of the problems and of the mistakes.

    Returns:
        `list[dict]`: Rows with `buggy_solution`, `mistake_in` (`first` or `second`: the step with the mistake) and `mistake` (the
        wrong expression).
    """
    rng = random.Random(f"bugs {split} {seed}")
    rows = []
    for row in load_problems("builtin", split, seed=seed):
        first, second = STEPS[row["first"]], STEPS[row["second"]]
        mistake_in, mistake = rng.choice(
            [("first", mistake) for mistake in first.mistakes] + [("second", mistake) for mistake in second.mistakes]
        )
        aux = write_aux(first, row["first_k"], mistake if mistake_in == "first" else None)
        main = write_main(second, row["second_k"], first.takes, mistake if mistake_in == "second" else None)
        bug = {"buggy_solution": f"{combine(aux, main)}\n", "mistake_in": mistake_in, "mistake": mistake}
        rows.append({**row, "task_id": row["task_id"].replace("builtin", "builtin_bugs", 1), **bug})
    return rows


def humanevalfix(row):
    """A row of HumanEvalPack as a problem. Its programs are bodies of functions, and its tests end with a call of `check`."""
    name, prompt = row["entry_point"], row["prompt"]
    parts = [helpers_before(prompt, stub_line(prompt, name)), row.get("import"), row.get("test_setup")]
    return {
        "task_id": f"humanevalfix/{row['task_id']}",
        "prompt": prompt,
        "entry_point": name,
        "test": row["test"].strip().removesuffix(f"check({name})"),
        "test_format": "check",
        "setup": "\n".join(part.rstrip() for part in parts if part and part.strip()),
        "canonical_solution": row["declaration"] + row["canonical_solution"],
        "buggy_solution": row["declaration"] + row["buggy_solution"],
        "starter_code": prompt,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--name", choices=("builtin", "humanevalfix"), default="builtin")
    options = parser.parse_args()
    if options.name == "builtin":
        splits = {split: builtin_bugs(split) for split in SIZES}
    else:
        rows = [humanevalfix(row) for row in load_dataset("bigcode/humanevalpack", "python", split="test")]
        splits = {"train": rows[33:163], "validation": rows[:32], "test": rows}
    for split, rows in splits.items():
        Dataset.from_list(rows).to_json(options.folder / f"{split}.jsonl")


if __name__ == "__main__":
    main()
