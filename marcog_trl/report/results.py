"""Reports of a run or of an evaluation: tables, figures in JSON, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marcog_trl.files import write_json, write_whole
from marcog_trl.report.figures import draw_overview, make_pictures, to_png


ROWS = (
    ("solved", "solved (sampled)"),
    ("solved_greedy", "solved (greedy)"),
    ("reward", "mean reward"),
    ("tests_passed", "tests passed"),
    ("parses", "replies parse"),
)


def print_table(results: Mapping[str, Any], title: str) -> None:
    """
    Prints a team before and after its training.

    Args:
        results (`Mapping`): `{"untrained": {...}, "trained": {...}}` with the figures of [`evaluate_team`].
        title (`str`): Title of the table.
    """
    table = Table(title=title)
    table.add_column("")
    for name in ("untrained", "trained", "change"):
        table.add_column(name, justify="right")
    for key, label in ROWS:
        before, after = results["untrained"], results["trained"]
        cells = []
        for figures in (before, after):
            cell = f"{figures[key]:.3f}"
            if f"{key}_interval" in figures:
                cell += f" ± {figures[f'{key}_interval']:.3f}"
            cells.append(cell)
        table.add_row(label, *cells, f"{after[key] - before[key]:+.3f}")
    Console().print(table)


def print_figures(figures: Mapping[str, float], title: str) -> None:
    """
    Prints an evaluation.

    Args:
        figures (`Mapping`): What [`evaluate_team`] returned.
        title (`str`): Title of the table.
    """
    labels = dict(ROWS)
    table = Table(title=title)
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("± 95 %", justify="right")
    for name, value in figures.items():
        if not name.endswith("_interval"):
            half = figures.get(f"{name}_interval")
            shown = str(value) if isinstance(value, int) else f"{value:.3f}"
            table.add_row(labels.get(name, name), shown, "" if half is None else f"{half:.3f}")
    Console().print(table)


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Writes figures as JSON; the file appears whole or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(path), dict(results))


def plot_curves(history: Sequence[Mapping[str, Any]], agents: Sequence[str], path: str | Path) -> bool:
    """
    Draws all that a run logged in one figure (see [`~marcog_trl.report.figures.make_pictures`]).

    Args:
        history (`list[dict]`): `trainer.state.log_history`.
        agents (`list[str]`): Names of the agents.
        path (`str`): The PNG to write; it appears whole or not at all. Where nothing was logged that could be drawn, a file
            of an earlier run is deleted.

    Returns:
        `bool`: Whether there was something to draw.
    """
    path, pictures = Path(path), make_pictures(history, agents)
    if pictures:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_png(draw_overview(pictures)))
    else:
        path.unlink(missing_ok=True)
    return bool(pictures)
