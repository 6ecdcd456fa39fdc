"""The pictures of a run: `PANELS` says which logged metrics are drawn, and `draw` draws them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from marcog_trl.rewards.failures import FAILURES


# The palette of Okabe and Ito, which colour-blind readers can tell apart, without its yellow, which is pale on white
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TEAM_COLOR = "#222222"  # of metrics of the whole team
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LONGEST_LABEL = 28  # characters


@dataclass(frozen=True)
class Panel:
    """
    A picture of one or several metrics over the optimizer steps. Held-out values (`eval_...`) are shown beside each curve.

    Args:
        title (`str`): Title, which no other panel has.
        ylabel (`str`): Label of the vertical axis, with the unit.
        metrics (`str`): Names of the metrics, as a regular expression. If it has a group, that is the label of a curve.
        limits (`tuple`, *optional*): Lowest and highest value that the vertical axis shows, `None` for those of the curves.
        min_curves (`int`, *optional*, defaults to 1): With fewer curves, the panel is left out.
        result (`str`, *optional*): Name of the same figure in what [`evaluate_team`] returns.
    """

    title: str
    ylabel: str
    metrics: str
    limits: tuple[float | None, float | None] = (None, None)
    min_curves: int = 1
    result: str = ""


SHARE, POSITIVE = (-0.02, 1.02), (0.0, None)
PANELS = (
    Panel("Solved", "share of episodes, 0 to 1", "episodes/solved", SHARE, result="solved"),
    Panel("Reward", "reward units", "reward", result="reward"),
    Panel("Reward functions", "reward units", "rewards/(.+)/mean", min_curves=2),
    Panel("Reward per agent", "reward units", "agents/([^/]+)/reward", min_curves=2),
    Panel("Solutions that fail", "share of episodes, 0 to 1", "failures/(.+)", SHARE),
    Panel("KL to the reference", "nats per token", "kl", POSITIVE),
    Panel("Entropy of the policy", "nats per token", "entropy", POSITIVE),
    Panel("Variance that the critic explains", "share, at most 1", "critic/explained_variance", (-1.0, 1.02)),
    Panel("Gradient per agent", "share, 0 to 1", "agents/([^/]+)/gradient_share", SHARE, min_curves=2),
    Panel("Distance of the latents", "mean cosine distance, 0 to 2", "latent/distance", POSITIVE),
    Panel("Length of a reply", "tokens", "agents/([^/]+)/completion_length", POSITIVE),
    Panel("Replies cut off at the limit", "share, 0 to 1", "agents/([^/]+)/clipped_ratio", SHARE),
)


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


def draw(
    history: Sequence[Mapping[str, Any]], agents: Sequence[str], results: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """
    Draws the pictures of a run. Needs no display, and does not change the state of `matplotlib.pyplot`.

    Args:
        history (`list[dict]`): `trainer.state.log_history`. What a run did not log is left out.
        agents (`list[str]`): Names of the agents. An agent has the same colour and line style in all pictures.
        results (`Mapping`, *optional*): `{"untrained": {...}, "trained": {...}}` of what [`evaluate_team`] returned, which are
            shown before the first step and at the last one, with their intervals.

    Returns:
        `dict[str, bytes]`: PNG files by the titles of `PANELS`.
    """
    metrics = read_history(history)
    found = {panel: [match for name in metrics if (match := re.fullmatch(panel.metrics, name))] for panel in PANELS}
    return {
        panel.title: _draw_panel(panel, matches, metrics, agents, results)
        for panel, matches in found.items()
        if len(matches) >= panel.min_curves
    }


def agent_color(index: int) -> str:
    """Colour of the agent of this index."""
    return COLORS[index % len(COLORS)]


def _draw_panel(
    panel: Panel, matches: Sequence[re.Match], metrics: pd.DataFrame, agents: Sequence[str], results: Mapping | None
) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.0, 3.9), layout="constrained")
    axis = figure.subplots()
    for i, match in enumerate(matches):
        label, color = ("training", TEAM_COLOR)
        if match.groups():
            label, i = FAILURES.get(match[1], match[1]), agents.index(match[1]) if match[1] in agents else i
            color = agent_color(i)
        # The space keeps matplotlib from hiding labels that begin with "_"
        text = f" {label[:LONGEST_LABEL]}".replace("$", r"\$")
        values = metrics[match[0]].dropna()
        width = len(values) // 10 | 1  # odd, so that the mean is centred
        if width > 1:
            axis.plot(values.index, values, color=color, alpha=0.2, linewidth=0.8)
        # Later curves are thinner, so that the curves that they cover can still be seen
        style: dict[str, Any] = {"linestyle": DASHES[i % len(DASHES)], "linewidth": max(1.3, 2.4 - 0.35 * i)}
        mean = values.rolling(width, center=True, min_periods=1).mean()
        axis.plot(mean.index, mean, color=color, label=text, marker="o" if len(mean) < 3 else None, **style)
        if f"eval_{match[0]}" in metrics:
            held_out = metrics[f"eval_{match[0]}"].dropna()
            label = " held-out" if match is matches[0] else ""
            axis.plot(held_out.index, held_out, "D", color=color, markersize=5, markerfacecolor="white", label=label)
    if results and panel.result:
        evaluations = [results["untrained"], results["trained"]]
        measured = np.array([[found[panel.result]] for found in evaluations])
        bounds = [found.get(f"{panel.result}_interval", [found[panel.result]] * 2) for found in evaluations]
        label, ends = " held-out, before and after", [0, metrics.index.max()]
        axis.errorbar(ends, measured[:, 0], abs(bounds - measured).T, fmt="D", color=TEAM_COLOR, label=label)
    axis.set_title(panel.title, fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel("optimizer step", fontsize=9)
    axis.set_ylabel(panel.ylabel, fontsize=9)
    axis.set_ylim(*panel.limits)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axis.grid(color="#E4E4E4", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def draw_differences(differences: Sequence[Any]) -> bytes:
    """
    Draws paired differences with their intervals.

    Args:
        differences (`list[Difference]` of length D): What [`~marcog_trl.evaluation.comparison.compare`] returned.

    Returns:
        `bytes`: A PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 1.6 + 0.6 * len(differences)), layout="constrained")
    axis = figure.subplots()
    for kind, offset, color in (("solved", 0.12, COLORS[0]), ("solved_greedy", -0.12, COLORS[1])):
        values = np.array([getattr(difference, kind) for difference in differences])
        bounds = np.array([getattr(difference, f"{kind}_interval") for difference in differences])
        places = np.arange(len(differences))[::-1] + offset
        label = "sampled" if kind == "solved" else "greedy"
        errors = 100 * abs(bounds - values[:, None]).T
        axis.errorbar(100 * values, places, xerr=errors, fmt="o", color=color, capsize=3, label=label)
    names = [_short(difference.b) for difference in differences]
    axis.set_yticks(np.arange(len(differences))[::-1], names)
    axis.set_ylim(-0.6, len(differences) - 0.4)
    axis.axvline(0, color=TEAM_COLOR, linewidth=0.8)
    axis.set_title(f"{_short(differences[0].a)} compared with", fontsize=11, loc="left", fontweight="bold")
    axis.set_xlabel("problems solved, difference in points, with 95 % intervals", fontsize=9)
    axis.grid(axis="x", color="#E4E4E4", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _short(name: str) -> str:
    """The end of a long name, as text that matplotlib does not read as mathematics."""
    return (name if len(name) <= LONGEST_LABEL else f"…{name[-LONGEST_LABEL + 1 :]}").replace("$", r"\$")
