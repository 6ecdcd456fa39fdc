"""Measures a team on held-out problems, and reports a run: a table, figures in JSON, and curves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from rich.console import Console
from rich.table import Table

from marcog_trl.agents import solution_job
from marcog_trl.code import syntax_error
from marcog_trl.rollout import Episode
from marcog_trl.trainers.team_files import write_json


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def evaluate_team(
    trainer: MultiAgentTrainer,
    problems: Dataset,
    num_samples: int = 4,
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, float]:
    """
    Measures the trainer's team: `num_samples` episodes per problem at the trainer's temperature, and a greedy one.

    With several processes all of them call it, and all get the same figures. Latents are their means.

    Args:
        trainer ([`MultiAgentTrainer`]): Holds the team.
        problems (`Dataset` of P rows): Problems with tests.
        num_samples (`int`, *optional*, defaults to `4`): Sampled episodes per problem.
        batch_size (`int`, *optional*, defaults to `128`): Episodes per process that are played at once.
        seed (`int`, *optional*, defaults to `0`): Seed of the sampling; the random state is restored afterwards.

    Returns:
        `dict[str, float]`: Of the sampled episodes `solved` (share that passes all tests), `solved_interval` (half the
        width of its 95 % interval, problems being the independent units), `reward`, `tests_passed` (share), `parses`
        (share whose solution is valid Python) and `samples` (number of episodes); `solved_greedy` and its interval
        `solved_greedy_interval`.

    Raises:
        ValueError: If there are no problems, or one has no tests.
    """
    if len(problems) == 0:
        raise ValueError("problems is empty; a dataset with at least one problem works")
    rows = [dict(row) for row in problems]
    sampled = _play_all(trainer, [row for row in rows for _ in range(num_samples)], batch_size, seed, greedy=False)
    greedy = _play_all(trainer, rows, batch_size, seed, greedy=True)

    def mean(name: str) -> float:
        return sum(result[name] for result in sampled) / len(sampled)

    per_problem = [
        sum(result["solved"] for result in sampled[i : i + num_samples]) / num_samples
        for i in range(0, len(sampled), num_samples)
    ]
    greedy_solved = [result["solved"] for result in greedy]
    return {
        "solved": mean("solved"),
        "solved_interval": _half_interval(per_problem),
        "solved_greedy": sum(greedy_solved) / len(greedy_solved),
        "solved_greedy_interval": _half_interval(greedy_solved),
        "reward": mean("reward"),
        "tests_passed": mean("tests_passed"),
        "parses": mean("parses"),
        "samples": len(sampled),
    }


def _half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean of independent values (normal approximation)."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = sum(values) / n
    return 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _play_all(
    trainer: MultiAgentTrainer, rows: list[dict[str, Any]], batch_size: int, seed: int, greedy: bool
) -> list[dict[str, float]]:
    """Plays one episode per row, shared among the processes, and returns what came of each, in order."""
    accelerator = trainer.accelerator
    world, rank = accelerator.num_processes, accelerator.process_index
    # Every process plays the same number of episodes, since generation and scoring are collective operations
    padded = rows + rows[:1] * (-len(rows) % world)
    share = len(padded) // world
    own = padded[rank * share : (rank + 1) * share]
    was_training, generation = trainer.model.training, trainer.generation_config
    trainer.model.eval()
    results: list[dict[str, float]] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed + rank)
        if greedy:
            trainer.generation_config = copy.deepcopy(generation)
            trainer.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        try:
            # While one batch is executed, the next one is generated
            finish: Callable[[], list[Episode]] | None = None
            for start in range(0, share, batch_size):
                begun = trainer.begin_episodes(own[start : start + batch_size])
                results += _results(finish() if finish is not None else [])
                finish = begun
            results += _results(finish() if finish is not None else [])
        finally:
            trainer.generation_config = generation
            trainer.model.train(was_training)
    return gather_object(results)[: len(rows)] if world > 1 else results


def _results(episodes: list[Episode]) -> list[dict[str, float]]:
    results = []
    for episode in episodes:
        turn = episode.turns[-1]
        job = solution_job(episode.problem, turn.solution)
        verdict = dict(turn.verdicts)[job]
        rewards = [sum(t.rewards.values()) / len(t.rewards) for t in episode.turns if t.rewards is not None]
        results.append(
            {
                "solved": float(verdict.status == "passed"),
                "tests_passed": verdict.passed / verdict.total,
                "parses": float(
                    bool(job.code) and all(syntax_error(reply) is None for reply in turn.replies.values())
                ),
                "reward": rewards[-1] if rewards else 0.0,
            }
        )
    return results


ROWS = (
    ("solved", "solved (sampled)"),
    ("solved_greedy", "solved (greedy)"),
    ("reward", "mean reward"),
    ("tests_passed", "tests passed"),
    ("parses", "replies parse"),
)


def print_table(results: Mapping[str, Any], title: str) -> None:
    """
    Prints untrained against trained.

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
