"""
What a run logged, as pictures.

A picture is one figure of one to three plots. It is drawn of `trainer.state.log_history` alone, and left out where the run
logged none of what it shows. An agent has the same colour and the same dashes in all of them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, told apart by colour-blind readers too, without its yellow, which is pale on white
AGENT_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
TEAM_COLORS = ("#222222", "#8A8A8A", "#5B4A8A")  # of what belongs to no agent
MARKERS = ("o", "s", "^", "v")  # where colours begin again
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LATENTS = "agent_latents"  # in log_history: agent -> mean latent μ since the log before
# The most points that a curve, and an agent's path, are drawn with
MAX_POINTS, MAX_PATH = 800, 200

Points = tuple[np.ndarray, np.ndarray]  # steps and values, `(L,)` each


@dataclass
class Curve:
    """
    Values over optimizer steps.

    Args:
        label (`str`): What the legend calls it.
        points (`tuple`): Steps and values, `(L,)` each.
        color (`str`): Colour.
        dashes (`str` or `tuple`): Line style.
        held_out (`bool`): Whether it is of held-out problems: drawn with markers, and never smoothed.
    """

    label: str
    points: Points
    color: str = TEAM_COLORS[0]
    dashes: Any = DASHES[0]
    held_out: bool = False


@dataclass
class Plot:
    """
    One pair of axes.

    Args:
        title (`str`): What is shown.
        unit (`str`): Label of the vertical axis.
        curves (`list[Curve]`): Curves; without any the plot is left out.
        limits (`tuple`): Lowest and highest value that the axis may show, `None` for any.
        level (`tuple`, *optional*): A value to compare with, and what it is.
    """

    title: str
    unit: str
    curves: list[Curve]
    limits: tuple[float | None, float | None] = (None, None)
    level: tuple[float, str] | None = None


@dataclass
class Plane:
    """
    The path of every agent's latent in the plane of their largest variance, over the run.

    Args:
        title (`str`): What is shown.
        paths (`list[tuple]`): Agent's name, colour, marker and coordinates `(L, 2)` in the order of time.
        shares (`tuple[float, float]`): Shares of the variance along both axes, in [0, 1].
    """

    title: str
    paths: list[tuple[str, str, str, np.ndarray]]
    shares: tuple[float, float]


@dataclass
class Picture:
    """
    A figure.

    Args:
        name (`str`): Stem of its file.
        title (`str`): Heading.
        caption (`str`): How to read it.
        plots (`list`): Its plots, from left to right.
    """

    name: str
    title: str
    caption: str
    plots: list[Plot | Plane] = field(default_factory=list)


NAMES = ("reward", "agent_rewards", "kl_entropy", "critic", "gradients", "latents", "diversity", "replies")


def agent_style(index: int) -> tuple[str, Any]:
    """Colour and dashes of the agent of this index."""
    return AGENT_COLORS[index % len(AGENT_COLORS)], DASHES[index % len(DASHES)]


def read_history(history: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """
    Args:
        history (`list[dict]`): `trainer.state.log_history`.

    Returns:
        `dict[str, tuple]`: Steps and values of every metric, `(L,)` each; what is no finite number is left out.
    """
    points: dict[str, tuple[list[float], list[float]]] = {}
    for log in history:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = points.setdefault(name, ([], []))
                steps.append(log["step"])
                values.append(value)
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in points.items()}


def make_pictures(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> list[Picture]:
    """
    Args:
        history (`list[dict]`): `trainer.state.log_history`.
        agents (`list[str]`): Names of the agents.

    Returns:
        `list[Picture]`: What there is to show of the run, in reading order; plots without data are left out.
    """
    metrics = read_history(history)

    def of_team(labels: Mapping[str, str]) -> list[Curve]:
        """Curves of metrics by name, of the training problems and of the held-out ones."""
        curves = []
        for i, (name, label) in enumerate((name, label) for name, label in labels.items() if name in metrics):
            color, dashes = TEAM_COLORS[i % len(TEAM_COLORS)], DASHES[i // len(TEAM_COLORS) % len(DASHES)]
            curves.append(Curve(label, metrics[name], color, dashes))
            if f"eval_{name}" in metrics:
                curves.append(Curve(f"{label}, held-out", metrics[f"eval_{name}"], color, dashes, held_out=True))
        return curves

    def of_agents(metric: str) -> list[Curve]:
        return [
            Curve(agent, metrics[f"agents/{agent}/{metric}"], *agent_style(i))
            for i, agent in enumerate(agents)
            if f"agents/{agent}/{metric}" in metrics
        ]

    rewards = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    by_function = {name: name.split("/")[1] for name in rewards} if len(rewards) > 1 else {}
    tests = {
        name: _test_label(name, ending, label)
        for ending, label in (("/solved", "solved"), ("/pass_rate", "tests passed"))
        for name in sorted(metrics)
        if name.endswith(ending) and not name.startswith("eval_")
    }
    share = (0.0, 1.0)
    equal = (1 / len(agents), "equal shares")
    own = of_agents("reward") if len(agents) > 1 else []
    returns = of_agents("return") if f"agents/{agents[0]}/turn_2/return" in metrics else []
    pictures = [
        Picture(
            "reward",
            "Reward and solved share",
            "Means over the episodes between two logs, before the updates that they led to. An episode is solved if all "
            "tests pass.",
            [
                Plot("Reward", "reward units", of_team({"reward": "sum of all" if by_function else "reward"} | by_function)),
                Plot("Solved, and tests passed", "share, 0 to 1", of_team(tests), share),
            ],
        ),
        Picture(
            "agent_rewards",
            "Rewards of the agents",
            "Where a reward is the team's, all agents earn the same and their curves lie on one another.",
            [
                Plot("Reward per agent and turn", "reward units", own),
                Plot("Return per agent: this turn and later ones", "reward units", returns),
            ],
        ),
        Picture(
            "kl_entropy",
            "KL and entropy",
            "How far the policy is from the reference model (logged with beta above 0 only), and how undecided it is.",
            [
                Plot("KL to the reference", "nats per token", of_team({"kl": "KL"}), (0.0, None)),
                Plot("Entropy of the policy", "nats per token", of_team({"entropy": "entropy"}), (0.0, None)),
            ],
        ),
        Picture(
            "critic",
            "Critic",
            "Explained variance is 1 for a critic that knows every return and 0 for one that knows their mean.",
            [
                Plot(
                    "Value loss", "squared reward units", of_team({"critic/value_loss": "value loss"}), (0.0, None)
                ),
                Plot(
                    "Explained variance",
                    "share, at most 1",
                    of_team({"critic/explained_variance": "explained variance"}),
                    (-1.0, 1.0),
                    (0.0, "the mean return"),
                ),
            ],
        ),
        Picture(
            "gradients",
            "Role balance",
            "How much of the gradient each agent's replies give; an agent near 0 is not trained.",
            [
                Plot(
                    "Share of the gradient per agent",
                    "share, 0 to 1",
                    of_agents("gradient_share"),
                    share,
                    equal if len(agents) > 1 else None,
                )
            ],
        ),
        Picture(
            "latents",
            "Latents of the agents",
            "The mean latent μ of each agent in the plane in which the latents of the whole run differ most. The "
            "hollow mark is the first log, the full one the last; paths grow darker with time.",
            list(_latent_plots(history, agents)),
        ),
        Picture(
            "diversity",
            "Diversity",
            "How different the agents are: their latents, and their next token after the same prompt; and how much the "
            "latents change the adapter.",
            [
                Plot(
                    "Distance of the latents",
                    "mean cosine distance, 0 to 2",
                    of_team({"latent/distance": "latents"}),
                    (0.0, 2.0),
                ),
                Plot(
                    "Distance of the next tokens",
                    "total variation, 0 to 1",
                    of_team({"agents/behavioural_diversity": "next tokens"}),
                    share,
                ),
                Plot(
                    "Size of the cores", "‖C‖ / √r, mean over layers", of_team({"latent/core_norm": "cores"}), (0.0, None)
                ),
            ],
        ),
        Picture(
            "replies",
            "Replies of the agents",
            "Mean length, and how many replies ended at the limit of tokens.",
            [
                Plot("Length of a reply", "tokens", of_agents("completion_length"), (0.0, None)),
                Plot("Replies cut off at the limit", "share, 0 to 1", of_agents("clipped_ratio"), share),
            ],
        ),
    ]  # fmt: skip
    for picture in pictures:
        picture.plots = [plot for plot in picture.plots if isinstance(plot, Plane) or plot.curves]
    return [picture for picture in pictures if picture.plots]


def _test_label(name: str, ending: str, label: str) -> str:
    """`label`, with the turn if it is a later one."""
    *_, last = name.removesuffix(ending).split("/")
    return f"{label}, turn {last.removeprefix('turn_')}" if last.startswith("turn_") else label


def _latent_plots(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> Iterator[Plot | Plane]:
    """The latents in two dimensions, and the first of them over time."""
    logs = [log for log in history if log.get(LATENTS)]
    if not logs:
        return
    owners = np.array([agents.index(agent) for log in logs for agent in log[LATENTS]])
    steps = np.array([log["step"] for log in logs for _ in log[LATENTS]])
    coordinates, shares = principal_plane(np.array([mu for log in logs for mu in log[LATENTS].values()]))
    paths = []
    curves = []
    for i, agent in enumerate(agents):
        own = owners == i
        if own.any():
            color, dashes = agent_style(i)
            paths.append((agent, color, MARKERS[i // len(AGENT_COLORS) % len(MARKERS)], coordinates[own]))
            curves.append(Curve(agent, (steps[own], coordinates[own, 0]), color, dashes))
    yield Plane("Mean latents", paths, shares)
    yield Plot("Along direction 1", "direction 1", curves)


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
    variances, directions = np.linalg.eigh(centred.T @ centred)  # in ascending order
    directions = directions[:, ::-1][:, :2]
    # A direction has no sign of its own: the largest component points up, so that later pictures are not mirrored
    directions = directions * np.sign(directions[np.abs(directions).argmax(0), range(directions.shape[1])])
    coordinates = np.zeros((len(points), 2))
    coordinates[:, : directions.shape[1]] = centred @ directions
    total = max(float(variances.sum()), 1e-12)
    first, second, *_ = [*np.clip(variances[::-1] / total, 0, 1), 0.0]
    return coordinates, (float(first), float(second))


def smoothed(values: np.ndarray) -> tuple[np.ndarray, int] | None:
    """
    The centred moving mean of a noisy curve.

    Args:
        values (`np.ndarray` of shape `(L,)`): Values.

    Returns:
        `tuple`, *optional*: The means `(L,)`, over fewer values at the ends, and how many one is taken over; `None` for
        curves that are short or smooth as they are.
    """
    width = max(5, len(values) // 15) | 1
    if len(values) < 2 * width:
        return None
    # von Neumann's ratio, halved: 1 for white noise, near 0 for a smooth curve
    spread = np.square(values - values.mean()).sum()
    if spread == 0 or np.square(np.diff(values)).sum() / (2 * spread) < 0.02:
        return None
    total = np.concatenate([[0.0], values.cumsum()])
    index = np.arange(len(values))
    low, high = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    return (total[high] - total[low]) / (high - low), width


def draw(picture: Picture) -> Figure:
    """Draws a picture; needs no display, and touches no figure of the caller's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.6 * len(picture.plots)), 3.9), layout="constrained")
    axes = figure.subplots(1, len(picture.plots), squeeze=False)
    widths = {draw_plot(axis, plot) for axis, plot in zip(axes.flat, picture.plots, strict=True)}
    _explain(figure, widths)
    return figure


def draw_overview(pictures: Sequence[Picture], columns: int = 3) -> Figure:
    """Draws the plots of several pictures in one figure."""
    from matplotlib.figure import Figure

    plots = [plot for picture in pictures for plot in picture.plots]
    columns = min(columns, len(plots))
    lines = math.ceil(len(plots) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.7 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    widths = {draw_plot(axis, plot) for axis, plot in zip(axes, plots, strict=False)}
    for axis in axes[len(plots) :]:
        axis.remove()
    _explain(figure, widths)
    return figure


def to_png(figure: Figure, dpi: int = 110) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _explain(figure: Figure, widths: set[int]) -> None:
    if widths - {0}:
        logs = " or ".join(str(width) for width in sorted(widths - {0}))
        figure.supxlabel(f"thin: every log    thick: mean of {logs} logs", fontsize=8, color="#555555")


def draw_plot(axis: Axes, plot: Plot | Plane) -> int:
    """Draws one plot, and says over how many logs its curves are smoothed at most: 0 for none."""
    width = _draw_plane(axis, plot) if isinstance(plot, Plane) else _draw_curves(axis, plot)
    axis.set_title(plot.title, fontsize=11, loc="left", fontweight="bold")
    axis.grid(color="#E4E4E4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)
    return width


def _draw_curves(axis: Axes, plot: Plot) -> int:
    from matplotlib.ticker import MaxNLocator

    widest = 0
    for i, curve in enumerate(plot.curves):
        steps, values = curve.points
        # Later curves are thinner, so that those that they cover can still be seen
        weight = max(1.3, 2.4 - 0.35 * i)
        style: dict[str, Any] = {"color": curve.color, "label": _plain(curve.label)}
        if curve.held_out:
            axis.plot(steps, values, linestyle="none", marker="D", markersize=5, markerfacecolor="white", **style)
            continue
        thin = slice(None, None, math.ceil(len(steps) / MAX_POINTS))
        mean = smoothed(values)
        if mean is not None:
            # The more curves, the paler, and below all means
            alpha = max(0.06, 0.35 / max(1, len(plot.curves) - 1))
            axis.plot(steps[thin], values[thin], color=curve.color, alpha=alpha, linewidth=0.8, zorder=1.5)
            values, widest = mean[0], max(widest, mean[1])
        marker = "o" if len(steps) < 3 else None
        axis.plot(
            steps[thin], values[thin], linestyle=curve.dashes, linewidth=weight, marker=marker, markersize=4, **style
        )
    if plot.level is not None:
        value, label = plot.level
        axis.axhline(value, color="#8A8A8A", linewidth=0.9, linestyle=(0, (2, 3)), label=label, zorder=1)
    hidden = _limit(axis, plot)
    axis.set_xlabel("optimizer step", fontsize=9)
    axis.set_ylabel(f"{plot.unit}\n({hidden} lower not shown)" if hidden else plot.unit, fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    if len(plot.curves) > 1 or plot.level is not None:
        _legend(axis)
    return widest


def _limit(axis: Axes, plot: Plot) -> int:
    """Keeps the axis within its limits, with a margin in which curves at them are seen; says how many values are below."""
    lowest, highest = plot.limits
    low, high = axis.get_ylim()
    if lowest is not None and highest is not None:
        # Differences below a fiftieth of the scale are no more than they look
        least = (highest - lowest) / 50
        centre = min(max((low + high) / 2, lowest + least / 2), highest - least / 2)
        low, high = min(low, centre - least / 2), max(high, centre + least / 2)
    low = low if lowest is None else max(low, lowest)
    high = high if highest is None else min(high, highest)
    margin = 0.03 * (high - low)
    axis.set_ylim(low - margin, high + margin)
    return 0 if lowest is None else sum(int((curve.points[1] < lowest).sum()) for curve in plot.curves)


def _draw_plane(axis: Axes, plane: Plane) -> int:
    from matplotlib.collections import LineCollection

    for agent, color, marker, coordinates in plane.paths:
        every = math.ceil(len(coordinates) / MAX_PATH)
        path = np.concatenate([coordinates[:-1:every], coordinates[-1:]])
        segments = np.stack([path[:-1], path[1:]], axis=1)
        shades = np.linspace(0.2, 0.9, len(segments)) if len(segments) else None
        axis.add_collection(LineCollection(list(segments), colors=color, alpha=shades, linewidths=1.4))
        style: dict[str, Any] = {"marker": marker, "color": color, "linestyle": "none"}
        axis.plot(*path[0], markersize=7, markerfacecolor="white", **style)
        axis.plot(*path[-1], markersize=8, label=_plain(agent), **style)
    axis.margins(0.08)
    axis.set_aspect("equal", adjustable="datalim")  # so that distances can be compared
    axis.set_xlabel(f"direction 1 ({plane.shares[0]:.0%} of the variance)", fontsize=9)
    axis.set_ylabel(f"direction 2 ({plane.shares[1]:.0%})", fontsize=9)
    _legend(axis)
    return 0


def _legend(axis: Axes) -> None:
    """Below the plot, where it covers nothing."""
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
    """A legend's entry that is taken literally."""
    label = label if len(label) <= length else f"{label[: length - 1]}…"
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label  # matplotlib hides such entries
