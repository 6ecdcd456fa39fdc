"""The results of an evaluation: the rows of every table that shows them, and their file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marcog_trl.files import write_json


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
        `list[list[str]]`: Per result its label and, for every column, the mean with half the width of its 95 % confidence
        interval.
    """
    rows = []
    for name, label in LABELS.items():
        row = [label]
        for column in columns:
            half = results[column].get(f"{name}_interval")
            row.append(f"{results[column][name]:.3f}" + ("" if half is None else f" ± {half:.3f}"))
        rows.append(row)
    return rows


def change_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """[`result_rows`] of a team before and after its training (`"untrained"`, `"trained"`), and the change."""
    changes = (f"{results['trained'][name] - results['untrained'][name]:+.3f}" for name in LABELS)
    rows = result_rows(results, ("untrained", "trained"))
    return [[*row, change] for row, change in zip(rows, changes, strict=True)]


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Writes results as JSON, and creates the folder. Readers never see a partial file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(path), dict(results))
