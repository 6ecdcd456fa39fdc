"""The results of an evaluation: the rows of every table that shows them, and their file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marcog_trl.files import write_json
from marcog_trl.parsing.prompts import messages_of


LABELS = {
    "solved": "solved (sampled)",
    "solved_greedy": "solved (greedy)",
    "reward": "mean reward",
    "tests_passed": "tests passed",
    "parses": "replies parse",
}


def result_rows(results: Mapping[str, Any], columns: Sequence[str]) -> list[list[str]]:
    """
    The table of one or several evaluations, as text.

    Args:
        results (`Mapping`): What [`evaluate_team`] returned, by the name of the evaluation, such as
            `{"untrained": {...}, "trained": {...}}`.
        columns (`list[str]`): Names of the evaluations to show.

    Returns:
        `list[list[str]]`: Per result its label and, for every column, the mean with its 95 % confidence interval.
    """
    rows = []
    for name, label in LABELS.items():
        row = [label]
        for column in columns:
            interval = shown_interval(results[column], name)
            row.append(f"{results[column][name]:.3f}" + (f" ({interval})" if interval else ""))
        rows.append(row)
    return rows


def shown_interval(results: Mapping[str, Any], name: str) -> str:
    """The confidence interval of a result of [`evaluate_team`], such as `"0.251 to 0.371"`. Empty if it has none."""
    bounds = results.get(f"{name}_interval")
    return "" if bounds is None else "{:.3f} to {:.3f}".format(*bounds)


def change_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """[`result_rows`] of a team before and after its training (`"untrained"`, `"trained"`), and the change."""
    changes = (f"{results['trained'][name] - results['untrained'][name]:+.3f}" for name in LABELS)
    rows = result_rows(results, ("untrained", "trained"))
    return [[*row, change] for row, change in zip(rows, changes, strict=True)]


def examples(
    problems: Sequence[Mapping[str, Any]], untrained: Sequence[Mapping], trained: Sequence[Mapping], count: int = 2
) -> list[dict[str, Any]]:
    """
    Problems to read, with the greedy replies of the team before and after its training.

    Takes one problem of each kind in turn, where there is one: solved by training, not solved after it, lost by it, and
    solved before it.

    Args:
        problems (`Sequence[Mapping]` of length P): The problems.
        untrained, trained (`list[dict]` of length P): The problems' records, see
            [`~marcog_trl.evaluation.evaluate.Evaluation`].
        count (`int`, *optional*, defaults to `2`): Number of problems.

    Returns:
        `list[dict]`: `"prompt"` of each problem, and `"untrained"` and `"trained"`, the record of the greedy episode.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {
        kind: [] for kind in ((False, True), (False, False), (True, False), (True, True))
    }
    pairs = [(before["greedy"], after["greedy"]) for before, after in zip(untrained, trained, strict=True)]
    for i, (before, after) in enumerate(pairs):
        kinds[before["status"] == "passed", after["status"] == "passed"].append(i)
    rounds = itertools.zip_longest(*kinds.values())
    chosen = [i for indices in rounds for i in indices if i is not None][:count]
    return [
        {
            "prompt": "\n\n".join(message["content"] for message in messages_of(problems[i]["prompt"])).strip(),
            "untrained": pairs[i][0],
            "trained": pairs[i][1],
        }
        for i in chosen
    ]


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Writes results as JSON, and creates the folder. Readers never see a partial file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(path), dict(results))
