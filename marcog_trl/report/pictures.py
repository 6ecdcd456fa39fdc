"""The table of all pictures of a run: which logged metrics are shown, and in which picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from marcog_trl.rewards.failures import FAILURES


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
        "How much the agents differ in their latents and in what they would do with each other's, and how much the latents "
        "change the adapter.",
        (
            Panel(
                "Distance of the latents",
                "mean cosine distance, 0 to 2",
                {"latent/distance": "latents"},
                limits=(0.0, 2.0),
            ),
            Panel(
                "Distance of the behaviour",
                "total variation per token, 0 to 1",
                {"latent/behaviour_distance": "behaviour"},
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
