"""Reports of a run or of an evaluation: tables, figures in JSON, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marcog_trl.trainers.team_files import write_json


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


def plot_curves(history: Sequence[Mapping[str, float]], agents: Sequence[str], path: str | Path) -> None:
    """
    Draws what a run logged: reward, gradient shares of the agents, KL and entropy, critic and latents.

    Args:
        history (`list[dict]`): `trainer.state.log_history`.
        agents (`list[str]`): Names of the agents.
        path (`str`): The PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "reward": ["reward", *(f"agents/{agent}/reward" for agent in agents)],
        "tests": ["execution_reward/pass_rate", "execution_reward/solved", "collaboration_reward/solved"],
        "KL and entropy": ["kl", "entropy"],
        "critic": ["critic/value_loss", "critic/explained_variance"],
        "latents": ["latent/distance", "latent/core_norm", "latent/sigma"],
        "share of the gradient": [f"agents/{agent}/gradient_share" for agent in agents],
    }
    logged = {
        title: {key: [(log["step"], log[key]) for log in history if log.get(key) is not None] for key in keys}
        for title, keys in panels.items()
    }
    logged = {title: {key: points for key, points in curves.items() if points} for title, curves in logged.items()}
    logged = {title: curves for title, curves in logged.items() if curves}
    if not logged:
        raise ValueError("history has no logged metrics; set logging_steps below the number of steps")
    columns = min(3, len(logged))
    lines = math.ceil(len(logged) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.5 * columns, 3.2 * lines), squeeze=False)
    for axis, (title, curves) in zip(axes.flat, logged.items(), strict=False):
        for key, points in curves.items():
            axis.plot(*zip(*points, strict=True), label=key.removeprefix("agents/"))
        axis.set(title=title, xlabel="optimizer step")
        axis.legend(fontsize="x-small")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(logged) :]:
        axis.remove()
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
