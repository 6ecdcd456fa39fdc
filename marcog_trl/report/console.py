"""What is printed: tables of results, and an episode to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marcog_trl.parsing.prompts import messages_of
from marcog_trl.report.results import LABELS, change_rows, shown_interval
from marcog_trl.rollout.records import Episode, Row, Turn


MOST_EPISODES = 2  # that `log_completions` prints per log


def print_table(results: Mapping[str, Any], title: str) -> None:
    """
    Prints the results of a team before and after its training.

    Args:
        results (`Mapping`): `{"untrained": {...}, "trained": {...}}` of what [`evaluate_team`] returned.
        title (`str`): Title of the table.
    """
    table = Table("", title=title)
    for name in ("untrained", "trained", "change"):
        table.add_column(name, justify="right")
    for row in change_rows(results):
        table.add_row(*row)
    Console().print(table)


def print_evaluation(results: Mapping[str, float], title: str) -> None:
    """
    Prints the results of one evaluation.

    Args:
        results (`Mapping`): What [`evaluate_team`] returned.
        title (`str`): Title of the table.
    """
    table = Table("", title=title)
    table.add_column("mean", justify="right")
    table.add_column("95 %", justify="right")
    for name, value in results.items():
        if not name.endswith("_interval"):
            shown = str(value) if isinstance(value, int) else f"{value:.3f}"
            table.add_row(LABELS.get(name, name), shown, shown_interval(results, name))
    Console().print(table)


def print_episodes(episodes: Sequence[Episode], step: int) -> None:
    """
    Prints episodes to read.

    Args:
        episodes (`list[Episode]`): Scored episodes.
        step (`int`): The optimizer step.
    """
    for i, episode in enumerate(episodes):
        number = f" ({i + 1} of {len(episodes)})" if len(episodes) > 1 else ""
        Console().print(episode_trace(episode, f"an episode of step {step}{number}"))


def episode_trace(episode: Episode, title: str) -> RenderableType:
    """
    Shows an episode turn by turn: what each agent was sent and replied, the solution, its verdict, and the rewards.

    Args:
        episode (`Episode`): A scored episode.
        title (`str`): Heading.

    Returns:
        A renderable of `rich`.
    """
    parts: list[RenderableType] = []
    for k, turn in enumerate(episode.turns):
        parts.append(Rule(f"turn {k + 1} of {len(episode.turns)}"))
        rows = [row for row in episode.rows if row.slot.turn == k]
        for row in rows:
            parts.append(Panel(_asked(row), title=f"{row.slot.agent} is asked", title_align="left", style="dim"))
            parts.append(Panel(Text(row.text.strip()), title=f"{row.slot.agent} writes", title_align="left"))
        parts.append(Panel(Text(turn.solution.strip()), title="solution", title_align="left", border_style="cyan"))
        for _, verdict in turn.verdicts[-1:]:
            tests = f"{verdict.status}: {verdict.passed} of {verdict.total} tests passed."
            parts.append(Text(f"{tests} {verdict.message}" if verdict.message else tests))
        parts.append(_rewards(turn, rows))
    if episode.masked:
        parts.append(Text("The episode was not scored and is left out of the loss."))
    return Panel(Group(*parts), title=title)


def _asked(row: Row) -> Text:
    """All messages of a prompt, under their roles if there are several."""
    messages = messages_of(row.prompt)
    texts = [message["content"].strip() for message in messages]
    if len(messages) > 1:
        texts = [f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True)]
    return Text("\n\n".join(texts))


def _rewards(turn: Turn, rows: list[Row]) -> Table:
    table = Table("agent", "reward", "tokens")
    for row in rows:
        reward = "–" if turn.rewards is None else f"{turn.rewards[row.slot.agent]:.3f}"
        table.add_row(row.slot.agent, reward, str(row.num_tokens))
    return table
