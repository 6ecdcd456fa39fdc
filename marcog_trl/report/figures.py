"""
Fills the pictures of `pictures.py` with the data of a run.

Everything comes from `trainer.state.log_history`; what a run did not log is left out. An agent has the same colour and line
style in all pictures. `drawing.py` draws them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from marcog_trl.report.pictures import PICTURES, Panel


# The palette of Okabe and Ito, which colour-blind readers can tell apart, without its yellow, which is pale on white
AGENT_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TEAM_COLORS = ("#222222", "#8A8A8A", "#5B4A8A")  # of metrics that belong to no agent
LAYER_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "v")  # the next one is used when the colours repeat
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LATENTS = "agent_latents"  # entry of log_history: agent -> mean latent μ since the log before


@dataclass
class Curve:
    """
    One line of a plot.

    Args:
        label (`str`): Entry of the legend.
        x, y (`np.ndarray` of shape `(L,)`): Points: steps and values, or coordinates in a plane, in the order of time.
        color (`str`): Colour.
        dashes (`str` or `tuple`): Line style of matplotlib.
        marker (`str`): Marker, in a plane.
        held_out (`bool`): Whether it shows held-out problems. It is then drawn with markers and not smoothed.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = TEAM_COLORS[0]
    dashes: Any = DASHES[0]
    marker: str = MARKERS[0]
    held_out: bool = False


@dataclass
class Plot:
    """
    A panel with the data of a run.

    Args:
        title, xlabel, ylabel (`str`): Title, and labels of the axes.
        curves (`list[Curve]`): Its curves, at least one.
        is_plane (`bool`): Whether the curves are paths in a plane, where distances can be compared.
        is_stack (`bool`): Whether the curves are shares that are drawn on top of each other.
        limits (`tuple`): See [`Panel`].
        level (`tuple`, *optional*): A value to compare with, and its label.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: list[Curve]
    is_plane: bool = False
    is_stack: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    level: tuple[float, str] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether nothing but 0 could be seen: on a scale with two ends, also less than a thousandth of it."""
        if self.is_plane:
            return False
        lowest, highest = self.limits
        visible = 0.0 if lowest is None or highest is None else (highest - lowest) / 1000
        return all(np.abs(curve.y).max() <= visible for curve in self.curves)


def agent_style(index: int) -> dict[str, Any]:
    """Colour, line style and marker of the agent of this index, as arguments of [`Curve`]."""
    return {
        "color": AGENT_COLORS[index % len(AGENT_COLORS)],
        "dashes": DASHES[index % len(DASHES)],
        "marker": MARKERS[index // len(AGENT_COLORS) % len(MARKERS)],
    }


def read_history(history: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """
    Args:
        history (`list[dict]`): `trainer.state.log_history`.

    Returns:
        `pd.DataFrame`: One row per log, with the step as index, and one column per metric. What was not logged, or is not a
        finite number, is NaN; metrics without any number have no column.
    """
    frame = pd.DataFrame(list(history), index=pd.Index([log["step"] for log in history], name="step"))
    frame = frame.apply(pd.to_numeric, errors="coerce").astype(float).replace([np.inf, -np.inf], np.nan)
    return frame.dropna(axis="columns", how="all").drop(columns="step", errors="ignore")


def make_plots(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> dict[str, list[Plot]]:
    """
    Args:
        history (`list[dict]`): `trainer.state.log_history`.
        agents (`list[str]`): Names of the agents.

    Returns:
        `dict[str, list[Plot]]`: The plots of each picture by its name, in reading order. Plots and pictures without data, and
        those that show nothing but 0, are left out.
    """
    found = _all_plots(history, agents)
    pictures = {name: [plot for plot in plots if not plot.is_zero] for name, plots in found.items()}
    return {name: plots for name, plots in pictures.items() if plots}


def always_zero(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> list[str]:
    """Titles of the plots that [`make_plots`] leaves out because they show nothing but 0."""
    return [plot.title for plots in _all_plots(history, agents).values() for plot in plots if plot.is_zero]


def _all_plots(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> dict[str, list[Plot]]:
    metrics, shares = _add_directions(read_history(history), history)
    pictures = {}
    for picture in PICTURES:
        plots = [_fill(panel, metrics, agents, shares) for panel in picture.panels]
        pictures[picture.name] = [plot for plot in plots if plot is not None]
    return pictures


def _fill(panel: Panel, metrics: pd.DataFrame, agents: Sequence[str], shares: tuple[float, float]) -> Plot | None:
    """The plot of a panel; `None` if the run did not log what it shows."""
    turns = panel.min_turns == 1 or any(f"agents/{agent}/turn_{panel.min_turns}/return" in metrics for agent in agents)
    if len(agents) < panel.min_agents or not turns:
        return None
    if panel.agents:
        curves = _agent_curves(panel, metrics, agents)
    else:
        curves = _team_curves(panel, metrics) + _layers(panel, metrics)
    if not curves:
        return None
    level = None
    if panel.level is not None:
        value, label = panel.level
        level = (1 / len(agents) if value is None else value, label)
    labels = (panel.xlabel.format(*shares), panel.ylabel.format(*shares))
    is_plane, is_stack = bool(panel.against), bool(panel.stack)
    return Plot(panel.title, *labels, curves, is_plane, is_stack, panel.limits, level)


def _agent_curves(panel: Panel, metrics: pd.DataFrame, agents: Sequence[str]) -> list[Curve]:
    curves = []
    for i, agent in enumerate(agents):
        name, against = f"agents/{agent}/{panel.agents}", f"agents/{agent}/{panel.against}"
        if name in metrics:
            x, y = _points(metrics[name])
            curves.append(Curve(agent, _points(metrics[against])[1] if panel.against else x, y, **agent_style(i)))
    return curves


def _team_curves(panel: Panel, metrics: pd.DataFrame) -> list[Curve]:
    labels = {}
    for pattern, label in panel.team.items():
        matches = [match for name in sorted(metrics) if (match := re.fullmatch(pattern, name))]
        for match in matches if len(matches) >= panel.min_matches else ():
            turn = re.search(r"/turn_(\d+)$", match[1]) if match.groups() else None
            labels[match[0]] = label.format(*match.groups()) + (f", turn {turn[1]}" if turn else "")
    curves = []
    for i, (name, label) in enumerate(labels.items()):
        color, dashes = TEAM_COLORS[i % len(TEAM_COLORS)], DASHES[i // len(TEAM_COLORS) % len(DASHES)]
        if panel.root:
            curves += [Curve(label, *points, color, dashes) for points in _points_over_root(metrics, panel.root, name)]
            continue
        curves.append(Curve(label, *_points(metrics[name]), color, dashes))
        if f"eval_{name}" in metrics:
            curves.append(Curve(f"{label}, held-out", *_points(metrics[f"eval_{name}"]), color, dashes, held_out=True))
    return curves


def _points_over_root(metrics: pd.DataFrame, root: str, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """A metric over the square root of another one, from left to right; empty without that one."""
    if root not in metrics:
        return []
    both = metrics[[root, name]].dropna().sort_values(root, kind="stable")
    return [(np.sqrt(both[root].clip(lower=0).to_numpy()), both[name].to_numpy())] if len(both) else []


def _layers(panel: Panel, metrics: pd.DataFrame) -> list[Curve]:
    """Curves on the same steps, without those that are always 0. A layer has its colour in all runs."""
    known = metrics[[name for name in panel.stack if name in metrics]].dropna()
    return [
        Curve(label, known.index.to_numpy(), known[name].to_numpy(), LAYER_COLORS[i % len(LAYER_COLORS)])
        for i, (name, label) in enumerate(panel.stack.items())
        if name in known and known[name].any()
    ]


def _points(metric: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    metric = metric.dropna()
    return metric.index.to_numpy(), metric.to_numpy()


def _add_directions(
    metrics: pd.DataFrame, history: Sequence[Mapping[str, Any]]
) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Adds the latents in two dimensions as metrics of the agents; also returns the shares of the variance."""
    latents = [(i, agent, mu) for i, log in enumerate(history) for agent, mu in (log.get(LATENTS) or {}).items()]
    if not latents:
        return metrics, (0.0, 0.0)
    coordinates, shares = principal_plane(np.array([mu for *_, mu in latents]))
    columns: dict[str, np.ndarray] = {}
    for (i, agent, _), point in zip(latents, coordinates, strict=True):
        for k, coordinate in enumerate(point):
            columns.setdefault(f"agents/{agent}/direction_{k + 1}", np.full(len(metrics), np.nan))[i] = coordinate
    return pd.concat([metrics, pd.DataFrame(columns, index=metrics.index)], axis="columns"), shares


def principal_plane(points: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """
    Coordinates in the plane of the largest variance.

    Args:
        points (`np.ndarray` of shape `(M, d)`): Points.

    Returns:
        `tuple`: Coordinates `(M, 2)`, 0 along directions that there are not, and the share of the variance along each, in
        [0, 1].
    """
    centred = points - points.mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    # The sign of a direction is arbitrary. Its largest component is made positive, so that later pictures are not mirrored.
    largest = np.take_along_axis(directions, np.abs(directions).argmax(1, keepdims=True), axis=1)
    coordinates = np.zeros((len(points), 2))
    coordinates[:, : len(directions)] = centred @ (directions * np.sign(largest)).T
    variances = np.zeros(2)
    variances[: len(directions)] = np.square(sizes[:2])
    first, second = variances / max(float(np.square(sizes).sum()), 1e-12)
    return coordinates, (float(first), float(second))
