"""
Pictures of a run: which logged metrics are shown, and in which picture.

[`PICTURES`] says what is plotted. Everything comes from `trainer.state.log_history`; what a run did not log is left out. An
agent has the same colour and line style in all pictures. `drawing.py` draws them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from marcog_trl.rewards.failures import FAILURES


# The palette of Okabe and Ito, which colour-blind readers can tell apart, without its yellow, which is pale on white
AGENT_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TEAM_COLORS = ("#222222", "#8A8A8A", "#5B4A8A")  # of metrics that belong to no agent
LAYER_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "v")  # the next one is used when the colours repeat
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LATENTS = "agent_latents"  # entry of log_history: agent -> mean latent μ since the log before


@dataclass(frozen=True)
class Panel:
    """
    What one pair of axes shows: metrics of the team, or a metric of every agent.

    Args:
        title (`str`): Title, which no other panel has.
        ylabel (`str`): Label of the vertical axis, with the unit.
        team (`dict[str, str]`, *optional*):
            Names of metrics, as regular expressions, and the labels of their curves. A label may have one `{}` for the
            first group of the expression. Held-out values (`eval_...`) are shown beside each curve.
        stack (`dict[str, str]`, *optional*): Names of shares that are drawn on top of each other, and their labels.
        agents (`str`, *optional*): Name of a metric that is logged for every agent, after `agents/<agent>/`.
        against (`str`, *optional*): Metric of the agents on the horizontal axis. Defaults to the optimizer step.
        root (`str`, *optional*): Metric of the team whose square root is on the horizontal axis of the team's curves.
        xlabel (`str`, *optional*):
            Label of the horizontal axis. In both labels, `{0}` and `{1}` stand for the shares of the variance of the latents
            along their first two directions.
        limits (`tuple`, *optional*): Lowest and highest value that the vertical axis may show, `None` for any.
        level (`tuple`, *optional*): A value to compare with, and its label. `None` is an agent's equal share.
        min_matches (`int`, *optional*, defaults to 1): An expression that fewer names match has no curves.
        min_agents (`int`, *optional*, defaults to 1): The panel is left out for smaller teams.
        min_turns (`int`, *optional*, defaults to 1): The panel is left out if the agents logged fewer turns.
    """

    title: str
    ylabel: str
    team: Mapping[str, str] = field(default_factory=dict)
    stack: Mapping[str, str] = field(default_factory=dict)
    agents: str = ""
    against: str = ""
    root: str = ""
    xlabel: str = "optimizer step"
    limits: tuple[float | None, float | None] = (None, None)
    level: tuple[float | None, str] | None = None
    min_matches: int = 1
    min_agents: int = 1
    min_turns: int = 1

    @property
    def file(self) -> str:
        """Name of its image file, without the suffix: the title in small letters."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Picture:
    """
    One to three panels that belong together. Each is an image file.

    Args:
        name (`str`): Short name.
        title (`str`): Heading on the page.
        caption (`str`): How to read it.
        panels (`tuple[Panel, ...]`): Its panels, from left to right.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


SHARE, POSITIVE = (0.0, 1.0), (0.0, None)
PICTURES = (
    Picture(
        "reward",
        "Reward and solved share",
        "Means over the episodes between two logs, before the updates that they led to. The reward is the weighted sum of "
        "all reward functions. An episode is solved if its last solution passes all tests.",
        (
            Panel("Solved", "share of episodes, 0 to 1", {"episodes/solved": "solved"}, limits=SHARE),
            Panel("Reward", "reward units", {"reward": "reward"}),
            Panel("Reward functions", "reward units", {"rewards/(.+)/mean": "{}"}, min_matches=2),
        ),
    ),
    Picture(
        "failures",
        "Kinds of failure",
        "Why solutions fail: the first check that they do not pass. What is left above the areas is solved. A crash is code "
        "that cannot be loaded, or that dies.",
        (
            Panel(
                "Solutions that fail",
                "share of episodes, 0 to 1",
                stack={f"failures/{kind}": label for kind, label in reversed(FAILURES.items())},
                limits=SHARE,
            ),
            Panel(
                "Tests passed",
                "share of tests, 0 to 1",
                {"(?!eval_)(.*)/pass_rate": "tests passed"},
                limits=SHARE,
            ),
        ),
    ),
    Picture(
        "agent_rewards",
        "Rewards of the agents",
        "If the team shares its reward, all agents earn the same and their curves coincide.",
        (
            Panel("Reward per agent and turn", "reward units", agents="reward", min_agents=2),
            Panel("Return per agent: this turn and later ones", "reward units", agents="return", min_turns=2),
        ),
    ),
    Picture(
        "kl_entropy",
        "KL and entropy",
        "How far the policy is from the reference model (logged only if beta is above 0), and how undecided it is.",
        (
            Panel("KL to the reference", "nats per token", {"kl": "KL"}, limits=POSITIVE),
            Panel("Entropy of the policy", "nats per token", {"entropy": "entropy"}, limits=POSITIVE),
        ),
    ),
    Picture(
        "overoptimisation",
        "Rewards and distance",
        "Every reward function over the distance from the reference model. Where a reward model rises and the reward that it "
        "stands for (weight 0) falls, its mistakes are being exploited.",
        (
            Panel(
                "Reward functions over the distance",
                "reward units",
                {"rewards/(.+)/mean": "{}"},
                root="kl",
                xlabel="√KL to the reference, √(nats per token)",
                min_matches=2,
            ),
        ),
    ),
    Picture(
        "critic",
        "Critic",
        "The explained variance is 1 if the critic predicts every return and 0 if it predicts only their mean.",
        (
            Panel("Value loss", "squared reward units", {"critic/value_loss": "value loss"}, limits=POSITIVE),
            Panel(
                "Explained variance",
                "share, at most 1",
                {"critic/explained_variance": "explained variance"},
                limits=(-1.0, 1.0),
                level=(0.0, "the mean return"),
            ),
        ),
    ),
    Picture(
        "gradients",
        "Role balance",
        "How much of the gradient comes from the replies of each agent. An agent near 0 is not trained.",
        (
            Panel(
                "Share of the gradient per agent",
                "share, 0 to 1",
                agents="gradient_share",
                limits=SHARE,
                level=(None, "equal shares"),
                min_agents=2,
            ),
        ),
    ),
    Picture(
        "latents",
        "Latents of the agents",
        "The mean latent μ of each agent, projected to the plane in which the latents of the whole run vary most. A hollow "
        "mark is the first log, a full one the last; paths grow darker with time.",
        (
            Panel(
                "Mean latents",
                "direction 2 ({1:.0%})",
                agents="direction_2",
                against="direction_1",
                xlabel="direction 1 ({0:.0%} of the variance)",
            ),
            Panel("Along direction 1", "direction 1", agents="direction_1"),
        ),
    ),
    Picture(
        "diversity",
        "Diversity",
        "How much the agents differ in their latents and in their next token after the same prompt, and how much the "
        "latents change the adapter.",
        (
            Panel(
                "Distance of the latents",
                "mean cosine distance, 0 to 2",
                {"latent/distance": "latents"},
                limits=(0.0, 2.0),
            ),
            Panel(
                "Distance of the next tokens",
                "total variation, 0 to 1",
                {"agents/behavioural_diversity": "next tokens"},
                limits=SHARE,
            ),
            Panel("Size of the cores", "‖C‖ / √r, mean over layers", {"latent/core_norm": "cores"}, limits=POSITIVE),
        ),
    ),
    Picture(
        "replies",
        "Replies of the agents",
        "Mean length, and the share of replies that reached max_completion_length.",
        (
            Panel("Length of a reply", "tokens", agents="completion_length", limits=POSITIVE),
            Panel("Replies cut off at the limit", "share, 0 to 1", agents="clipped_ratio", limits=SHARE),
        ),
    ),
)


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
