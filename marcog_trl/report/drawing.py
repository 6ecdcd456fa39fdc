"""Draws the plots of `figures.py` with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from marcog_trl.report.figures import Plot


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_POINTS, MAX_PATH = 800, 200  # the most points that a curve, and a path in a plane, are drawn with


def draw(plots: Sequence[Plot]) -> Figure:
    """Draws plots side by side. Needs no display, and does not change the state of `matplotlib.pyplot`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.08)  # inches: legends of several lines would be cut
    figure = Figure(figsize=(max(6.0, 4.6 * len(plots)), 3.9), layout=layout)
    axes = figure.subplots(1, len(plots), squeeze=False)
    widths = {draw_plot(axis, plot) for axis, plot in zip(axes.flat, plots, strict=True)} - {0}
    if widths:
        logs = " or ".join(map(str, sorted(widths)))
        figure.supxlabel(f"thin: every log    thick: mean of {logs} logs", fontsize=8, color="#555555")
    return figure


def to_png(figure: Figure, dpi: int = 150) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def draw_plot(axis: Axes, plot: Plot) -> int:
    """Draws one plot. Returns the largest number of logs over which a curve is averaged, 0 if none is."""
    drawing = _draw_plane if plot.is_plane else _draw_stack if plot.is_stack else _draw_curves
    width = drawing(axis, plot)
    axis.set_title(plot.title, fontsize=11, loc="left", fontweight="bold")
    axis.grid(color="#E4E4E4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)
    return width


def smoothed(values: np.ndarray) -> tuple[np.ndarray, int] | None:
    """
    The centred moving mean of a noisy curve.

    Args:
        values (`np.ndarray` of shape `(L,)`): Values.

    Returns:
        `tuple`, *optional*: The means `(L,)`, over fewer values at the ends, and how many values one is taken over. `None`
        for curves that are short, or smooth already.
    """
    width = max(5, len(values) // 15) | 1
    if len(values) < 2 * width:
        return None
    # von Neumann's ratio, halved: 1 for white noise, near 0 for a smooth curve
    if np.square(np.diff(values)).sum() <= 0.02 * 2 * np.square(values - values.mean()).sum():
        return None
    return _moving_mean(values, width), width


def _moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    return pd.Series(values).rolling(width, center=True, min_periods=1).mean().to_numpy()


def _draw_stack(axis: Axes, plot: Plot) -> int:
    x, layers = plot.curves[0].x, [curve.y for curve in plot.curves]
    widths = [mean[1] for mean in map(smoothed, layers) if mean is not None]
    if widths:
        layers = [_moving_mean(layer, widths[0]) for layer in layers]
    if len(x) == 1:  # an area needs a width
        x, layers = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(layer, 2) for layer in layers]
    labels = [_plain(curve.label) for curve in plot.curves]
    axis.stackplot(x, *layers, colors=[curve.color for curve in plot.curves], labels=labels, alpha=0.85, linewidth=0)
    axis.set_ylim(*plot.limits)
    _label_axes(axis, plot, f"mean of {widths[0]} logs" if widths else "")
    _add_legend(axis)
    return 0


def _draw_curves(axis: Axes, plot: Plot) -> int:
    widest = 0
    for i, curve in enumerate(plot.curves):
        style: dict[str, Any] = {"color": curve.color, "label": _plain(curve.label)}
        if curve.held_out:
            axis.plot(curve.x, curve.y, linestyle="none", marker="D", markersize=5, markerfacecolor="white", **style)
            continue
        thin = slice(None, None, math.ceil(len(curve.x) / MAX_POINTS))
        values, mean = curve.y, smoothed(curve.y)
        if mean is not None:
            # The more curves, the paler, and below all means
            alpha = max(0.06, 0.35 / max(1, len(plot.curves) - 1))
            axis.plot(curve.x[thin], values[thin], color=curve.color, alpha=alpha, linewidth=0.8, zorder=1.5)
            values, widest = mean[0], max(widest, mean[1])
        # Later curves are thinner, so that the curves that they cover can still be seen
        style |= {"linestyle": curve.dashes, "linewidth": max(1.3, 2.4 - 0.35 * i)}
        axis.plot(curve.x[thin], values[thin], marker="o" if len(values) < 3 else None, markersize=4, **style)
    if plot.level is not None:
        value, label = plot.level
        axis.axhline(value, color="#8A8A8A", linewidth=0.9, linestyle=(0, (2, 3)), label=label, zorder=1)
    hidden = _limit(axis, plot)
    _label_axes(axis, plot, f"{hidden} lower not shown" if hidden else "")
    if len(plot.curves) > 1 or plot.level is not None:
        _add_legend(axis)
    return widest


def _draw_plane(axis: Axes, plot: Plot) -> int:
    from matplotlib.collections import LineCollection

    for curve in plot.curves:
        points = np.stack([curve.x, curve.y], axis=1)
        every = math.ceil(len(points) / MAX_PATH)
        path = np.concatenate([points[:-1:every], points[-1:]])
        segments = np.stack([path[:-1], path[1:]], axis=1)
        shades = np.linspace(0.2, 0.9, len(segments)) if len(segments) else None
        axis.add_collection(LineCollection(list(segments), colors=curve.color, alpha=shades, linewidths=1.4))
        style: dict[str, Any] = {"marker": curve.marker, "color": curve.color, "linestyle": "none"}
        axis.plot(*path[0], markersize=7, markerfacecolor="white", **style)
        axis.plot(*path[-1], markersize=8, label=_plain(curve.label), **style)
    axis.margins(0.08)
    axis.set_aspect("equal", adjustable="datalim")  # so that distances can be compared
    axis.set_xlabel(plot.xlabel, fontsize=9)
    axis.set_ylabel(plot.ylabel, fontsize=9)
    _add_legend(axis)
    return 0


def _label_axes(axis: Axes, plot: Plot, remark: str) -> None:
    """Labels of the axes, and whole numbers on the horizontal one, if the curves have no others."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(plot.xlabel, fontsize=9)
    axis.set_ylabel(f"{plot.ylabel}\n({remark})" if remark else plot.ylabel, fontsize=9)
    counts = all((curve.x == curve.x.round()).all() for curve in plot.curves)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=counts, steps=[1, 2, 5, 10]))


def _limit(axis: Axes, plot: Plot) -> int:
    """Keeps the vertical axis within its limits, with a small margin. Returns how many values lie below."""
    lowest, highest = plot.limits
    low, high = axis.get_ylim()
    if lowest is not None and highest is not None:
        # Show at least a fiftieth of the scale, so that tiny differences do not look large
        least = (highest - lowest) / 50
        centre = min(max((low + high) / 2, lowest + least / 2), highest - least / 2)
        low, high = min(low, centre - least / 2), max(high, centre + least / 2)
    low = low if lowest is None else max(low, lowest)
    high = high if highest is None else min(high, highest)
    margin = 0.03 * (high - low)
    axis.set_ylim(low - margin, high + margin)
    return 0 if lowest is None else sum(int((curve.y < lowest).sum()) for curve in plot.curves)


def _add_legend(axis: Axes) -> None:
    """Adds a legend below the plot, where it covers nothing."""
    labels = axis.get_legend_handles_labels()[1]
    width = 46 + 4.8 * max(map(len, labels))  # of one entry, in points
    columns = max(1, min(len(labels), int(320 / width)))
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=2.6,
    )


def _plain(label: str, length: int = 28) -> str:
    """A legend entry without math text, and short enough."""
    label = label if len(label) <= length else f"{label[: length - 1]}…"
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label  # matplotlib hides entries that begin with "_"
