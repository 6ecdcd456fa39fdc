"""What is drawn of a log, what is left out, and that it can be told apart."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from marcog_trl.report.drawing import draw, smoothed, to_png
from marcog_trl.report.figures import (
    LATENTS,
    agent_style,
    always_zero,
    make_plots,
    principal_plane,
    read_history,
)
from marcog_trl.report.pictures import PICTURES


AGENTS = ["helper", "main"]
NAMES = [picture.name for picture in PICTURES]


def log(step, **more):
    """A log of an SHPPO run."""
    entry = {"step": step, "reward": 0.1 * step, "episodes/solved": 0.5, "execution_reward/pass_rate": 0.6}
    entry |= {"failures/tests": 0.3, "failures/syntax": 0.2, "failures/timeout": 0.0}
    entry |= {"kl": 0.01, "entropy": 1.0, "critic/value_loss": 0.3, "critic/explained_variance": 0.1}
    entry |= {"rewards/reward_model/mean": 0.2 * step, "rewards/execution_reward/mean": 0.1 * step}
    entry |= {"latent/distance": 0.2, "latent/behaviour_distance": 0.1, "latent/core_norm": 0.1}
    for i, agent in enumerate(AGENTS):
        entry |= {f"agents/{agent}/{name}": 0.5 + i for name in ("reward", "gradient_share", "completion_length")}
    entry[LATENTS] = {agent: [i + 0.1 * step, 0.0, 0.0] for i, agent in enumerate(AGENTS)}
    return {**entry, **more}


class TestMakePlots:
    def test_all_of_a_run_is_shown(self):
        pictures = make_plots([log(1), log(2)], AGENTS)
        assert list(pictures) == NAMES
        shown = [plot.title for plots in pictures.values() for plot in plots]
        assert len(shown) == len(set(shown)) == 18

    @pytest.mark.parametrize(
        ("absent", "without"),
        [
            ("critic", {"critic"}),
            ("gradient_share", {"gradients"}),
            (LATENTS, {"latents"}),
            ("agents/helper/reward agents/main/reward", {"agent_rewards"}),
            ("kl entropy", {"kl_entropy", "overoptimisation"}),
            ("rewards/execution", {"overoptimisation"}),
            ("latent/ diversity", {"diversity"}),
            ("failures/ pass_rate", {"failures"}),
        ],
    )
    def test_what_was_not_logged_is_left_out(self, absent, without):
        entry = {key: value for key, value in log(1).items() if not any(part in key for part in absent.split())}
        assert set(NAMES) - set(make_plots([entry], AGENTS)) == without

    @pytest.mark.parametrize("history", [[], [{"step": 1, "train_loss": 2.0}], [{"step": 1, "reward": None}]])
    def test_nothing_is_shown_of_nothing(self, history):
        assert make_plots(history, AGENTS) == {}

    def test_one_agent_has_no_rewards_beside_the_teams(self):
        entry = {"step": 1, "reward": 0.5, "agents/solo/reward": 0.5, "agents/solo/completion_length": 3.0}
        assert list(make_plots([entry], ["solo"])) == ["reward", "replies"]

    def test_held_out_problems_turns_and_single_rewards_have_curves_of_their_own(self):
        more = {"execution_reward/turn_2/pass_rate": 0.9}
        history = [log(1, **more), {"step": 1, "eval_reward": 0.4, "eval_episodes/solved": 0.3}, log(2)]
        pictures = make_plots(history, AGENTS)
        solved, reward, functions = pictures["reward"]
        assert [curve.label for curve in reward.curves] == ["reward", "reward, held-out"]
        assert [curve.label for curve in functions.curves] == ["execution_reward", "reward_model"]
        training, held_out = solved.curves
        assert (held_out.label, held_out.held_out, held_out.y.tolist()) == ("solved, held-out", True, [0.3])
        assert training.x.tolist() == [1, 2]
        labels = {curve.label: curve for curve in pictures["failures"][1].curves}
        assert set(labels) == {"tests passed", "tests passed, turn 2"}
        assert labels["tests passed, turn 2"].x.tolist() == [1]

    def test_what_is_0_all_the_time_is_named_and_not_drawn(self):
        history = [log(s, **{"latent/behaviour_distance": 1e-6, "kl": 0.0, "reward": 0.0}) for s in range(3)]
        zero = {"Distance of the behaviour", "KL to the reference", "Reward"}
        shown = {plot.title for plots in make_plots(history, AGENTS).values() for plot in plots}
        assert set(always_zero(history, AGENTS)) == zero and not zero & shown
        assert not always_zero([*history, log(3, kl=0.5, reward=-1.0)], AGENTS)[2:]

    def test_failures_are_drawn_on_top_of_each_other_without_those_that_never_happen(self):
        history = [log(s, **{"failures/tests": s / 100, "failures/syntax": 0.1}) for s in range(40)]
        stack = make_plots(history, AGENTS)["failures"][0]
        assert [curve.label for curve in stack.curves] == ["wrong result", "syntax error"]
        (axis,) = draw([stack]).axes
        tops = [area.get_paths()[0].vertices[:, 1].max() for area in axis.collections]
        assert tops == pytest.approx([0.39, 0.49], abs=0.02) and axis.get_ylim() == (0.0, 1.0)
        (axis,) = draw(make_plots(history[5:6], AGENTS)["failures"][:1]).axes  # one log
        assert np.ptp(axis.collections[0].get_paths()[0].vertices[:, 0]) > 0

    def test_rewards_are_shown_over_the_root_of_the_divergence(self):
        (plot,) = make_plots([log(1, kl=0.09), log(2, kl=0.04), log(3, kl=None)], AGENTS)["overoptimisation"]
        assert [curve.label for curve in plot.curves] == ["execution_reward", "reward_model"]
        assert plot.curves[1].x.tolist() == pytest.approx([0.2, 0.3])
        assert plot.curves[1].y.tolist() == pytest.approx([0.4, 0.2])

    def test_an_agent_has_its_colour_everywhere(self):
        agents = [f"agent{i}" for i in range(8)]
        names = ("reward", "gradient_share", "completion_length")
        entry = {f"agents/{agent}/{name}": 1.0 for agent in agents for name in names}
        entry |= {"step": 1, LATENTS: {agent: [float(i)] for i, agent in enumerate(agents)}}
        styles = {agent: set() for agent in agents}
        plots = [plot for plots in make_plots([entry], agents).values() for plot in plots]
        assert any(plot.is_plane for plot in plots)
        for plot in plots:
            for curve in plot.curves:
                styles[curve.label].add(curve.color)
        assert all(len(colors) == 1 for colors in styles.values())
        styles = [agent_style(i) for i in range(8)]
        assert len({(style["color"], style["dashes"]) for style in styles}) == 8
        assert len({(style["color"], style["marker"]) for style in styles}) == 8

    def test_values_that_are_no_finite_number_are_left_out(self):
        history = [{"step": s, "kl": kl, "name": "x"} for s, kl in enumerate([1.0, math.nan, math.inf, None, 2.0])]
        metrics = read_history(history)
        assert metrics["kl"].dropna().to_dict() == {0: 1.0, 4: 2.0}
        assert list(metrics) == ["kl"]


class TestPrincipalPlane:
    def test_points_in_a_plane_keep_their_distances(self):
        generator = np.random.default_rng(0)
        flat = generator.normal(size=(30, 2)) * [3.0, 1.0]
        basis, _ = np.linalg.qr(generator.normal(size=(8, 8)))
        coordinates, shares = principal_plane(flat @ basis[:2] + 5.0)
        between = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
        assert np.allclose(np.linalg.norm(coordinates[:, None] - coordinates[None], axis=-1), between)
        assert shares[0] > shares[1] and math.isclose(sum(shares), 1.0)

    def test_the_sign_does_not_depend_on_what_comes_later(self):
        points = np.random.default_rng(1).normal(size=(50, 4)) * [4.0, 2.0, 0.1, 0.1]
        early, late = principal_plane(points[:40])[0], principal_plane(points)[0]
        assert min(np.corrcoef(early[:, i], late[:40, i])[0, 1] for i in (0, 1)) > 0.9

    @pytest.mark.parametrize("points", [[[1.0, 2.0, 3.0]], [[1.0], [2.0]], [[0.0, 0.0]] * 3])
    def test_fewer_than_two_directions(self, points):
        coordinates, shares = principal_plane(np.array(points))
        assert coordinates.shape == (len(points), 2) and np.isfinite(coordinates).all()
        assert shares[1] == 0.0


class TestSmoothed:
    def test_is_the_mean_of_the_neighbours(self):
        values = np.array([0.0, 1.0] * 6)
        mean, width = smoothed(values)
        assert width == 5
        assert np.allclose(mean[[0, 1, 5, 11]], [1 / 3, 2 / 4, 3 / 5, 2 / 3])

    @pytest.mark.parametrize("values", [np.arange(100.0), np.ones(100), np.array([0.0, 1.0] * 4), np.array([])])
    def test_leaves_smooth_and_short_curves_as_they_are(self, values):
        assert smoothed(values) is None


class TestDraw:
    @pytest.mark.parametrize(("count", "num_agents"), [(1, 2), (2, 1), (60, 2), (60, 8)])
    def test_every_picture_is_a_png_with_its_legends_outside_of_the_data(self, count, num_agents):
        generator = np.random.default_rng(0)
        agents = [f"{AGENTS[i % 2]}{i}" for i in range(num_agents)]
        history = []
        for s in range(count):
            names = ("reward", "gradient_share", "completion_length")
            own = {f"agents/{agent}/{name}": generator.random() for agent in agents for name in names}
            history.append(log(s, **own, **{LATENTS: {agent: generator.normal(size=4).tolist() for agent in agents}}))
        history.append({f"eval_{name}": 0.5 for name in history[0]} | {"step": count})
        for plots in make_plots(history, agents).values():
            figure = draw(plots)
            assert to_png(figure).startswith(b"\x89PNG")
            inside = figure.bbox
            for axis, plot in zip(figure.axes, plots, strict=True):
                assert axis.get_title(loc="left") == plot.title and axis.get_xlabel() and axis.get_ylabel()
                legend = axis.get_legend()
                if legend is not None:
                    box = legend.get_window_extent()
                    assert not box.overlaps(axis.get_window_extent())
                    assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0

    def test_a_noisy_curve_is_shown_beside_its_mean(self):
        history = [{"step": s, "kl": float(s % 2)} for s in range(40)]
        (axis,) = draw(make_plots(history, AGENTS)["kl_entropy"]).axes
        raw, mean = (line.get_ydata() for line in axis.lines)
        assert raw.tolist() == [0.0, 1.0] * 20 and np.ptp(mean[2:-2]) < 0.3
        assert axis.lines[0].get_linewidth() < axis.lines[1].get_linewidth()
        assert "mean of 5 logs" in axis.figure.get_supxlabel()

    def test_far_outliers_do_not_flatten_the_rest(self):
        history = [{"step": s, "critic/explained_variance": -500.0 if s == 0 else 0.1 * s} for s in range(6)]
        (axis,) = draw(make_plots(history, AGENTS)["critic"]).axes
        assert axis.get_ylim()[0] > -1.2 and "1 lower not shown" in axis.get_ylabel()

    def test_names_are_taken_literally(self):
        agents = ["_hidden", "a$b$", "x" * 60]
        history = [{"step": 1, **{f"agents/{agent}/reward": 1.0 for agent in agents}}]
        (axis,) = draw(make_plots(history, agents)["agent_rewards"]).axes
        figure = axis.figure
        assert to_png(figure) and len(axis.get_legend().get_texts()) == 3

    def test_long_runs_are_drawn_with_bounded_work(self):
        generator = np.random.default_rng(0)
        history = [
            {"step": s, LATENTS: {agent: generator.normal(size=8).tolist() for agent in AGENTS}} for s in range(5000)
        ]
        plane, _ = draw(make_plots(history, AGENTS)["latents"]).axes
        assert all(len(paths.get_segments()) <= 201 for paths in plane.collections)

    def test_agents_start_at_a_ring_and_end_at_a_disc_of_their_colour(self):
        plane, _ = draw(make_plots([log(s) for s in range(5)], AGENTS)["latents"]).axes
        for i, (ring, disc) in enumerate(zip(plane.lines[::2], plane.lines[1::2], strict=True)):
            assert to_rgb(ring.get_markerfacecolor()) == (1, 1, 1)
            assert to_rgb(disc.get_markerfacecolor()) == to_rgb(agent_style(i)["color"])
            assert disc.get_xdata()[0] - ring.get_xdata()[0] == pytest.approx(0.4)
