"""What is drawn of a log, and what is left out."""

import pytest

from marcog_trl.report.plots import PANELS, agent_color, draw


AGENTS = ["helper", "main"]
OF_AGENTS = ("reward", "gradient_share", "completion_length", "clipped_ratio")


def log(step, agents=AGENTS, **more):
    """A log of an SHPPO run."""
    entry = {
        "step": step,
        "reward": 0.1 * step,
        "episodes/solved": 0.5,
        "failures/tests": 0.3,
        "failures/no_code": 0.2,
    }
    entry |= {"kl": 0.01, "entropy": 1.0, "critic/explained_variance": 0.1, "latent/distance": 0.2}
    entry |= {"rewards/reward_model/mean": 0.2 * step, "rewards/execution_reward/mean": 0.1 * step}
    entry |= {f"agents/{agent}/{name}": 0.5 + i for i, agent in enumerate(agents) for name in OF_AGENTS}
    return entry | more


@pytest.fixture
def drawn(monkeypatch):
    """`drawn(history)`: what is drawn of it, as axes by their titles."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw))
    )

    def of(history, agents=AGENTS, results=None):
        figures.clear()
        images = draw(history, agents, results)
        assert all(image.startswith(b"\x89PNG") for image in images.values())
        axes = {figure.axes[0].get_title(loc="left"): figure.axes[0] for figure in figures}
        assert list(axes) == list(images)
        return axes

    return of


def entries(axis):
    """The legend of a picture: the line of each label."""
    handles, labels = axis.get_legend_handles_labels()
    return {label.strip(): handle for handle, label in zip(handles, labels, strict=True)}


def test_all_of_a_run_is_shown(drawn):
    assert list(drawn([log(1), log(2)])) == [panel.title for panel in PANELS]


@pytest.mark.parametrize(
    ("absent", "without"),
    [
        ("critic", {"Variance that the critic explains"}),
        ("gradient_share", {"Gradient per agent"}),
        ("latent", {"Distance of the latents"}),
        ("helper/reward", {"Reward per agent"}),
        ("rewards/execution", {"Reward functions"}),
        ("failures", {"Solutions that fail"}),
    ],
)
def test_what_was_not_logged_is_left_out(absent, without):
    entry = {key: value for key, value in log(1).items() if absent not in key}
    assert {panel.title for panel in PANELS} - set(draw([entry], AGENTS)) == without


def test_held_out_problems_are_shown_beside_the_training(drawn):
    curves = entries(drawn([log(1), {"step": 1, "eval_episodes/solved": 0.3}, log(2)])["Solved"])
    assert {label: line.get_xydata().tolist() for label, line in curves.items()} == {
        "training": [[1, 0.5], [2, 0.5]], "held-out": [[1, 0.3]]
    }  # fmt: skip


def test_the_evaluations_before_and_after_are_shown_with_their_intervals(drawn):
    before, after = {"solved": 0.3, "solved_interval": [0.2, 0.5], "reward": 0.1}, {"solved": 0.8, "reward": 0.6}
    axes = drawn([log(1), log(2)], results={"untrained": before, "trained": after})
    marks, _, [bars] = entries(axes["Solved"])["held-out, before and after"].lines
    assert marks.get_xydata().tolist() == [[0, 0.3], [2, 0.8]]
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [pytest.approx([0.2, 0.5]), [0.8, 0.8]]
    with_both = {title for title, axis in axes.items() if "held-out, before and after" in entries(axis)}
    assert with_both == {"Solved", "Reward"}


def test_solutions_fail_for_reasons_that_people_read(drawn):
    assert list(entries(drawn([log(1)])["Solutions that fail"])) == ["wrong result", "no code"]


def test_an_agent_has_its_colour_everywhere(drawn):
    agents = [f"agent{i}" for i in range(8)]
    looks = {agent: set() for agent in agents}
    for axis in drawn([log(1, agents), log(2, agents)], agents).values():
        for label, line in entries(axis).items():
            if label in agents:
                looks[label].add(
                    (line.get_color(), line.get_linestyle(), line._dash_pattern[1] and str(line._dash_pattern))
                )
    assert all(len(own) == 1 for own in looks.values()) and len(set.union(*looks.values())) == 8
    assert next(iter(looks["agent1"]))[0] == agent_color(1)
