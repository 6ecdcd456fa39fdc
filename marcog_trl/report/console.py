"""An episode to read: who was asked what, what they wrote, what the tests said, and what it earned."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marcog_trl.parsing.prompts import messages_of
from marcog_trl.rollout.records import Episode, Row, Turn


def episode_trace(episode: Episode, title: str) -> RenderableType:
    """
    An episode turn by turn.

    Args:
        episode (`Episode`): A played, scored episode.
        title (`str`): Heading.

    Returns:
        A renderable of `rich`: per turn, each reply with the last message that its agent was sent, the solution, its
        verdict, and a table of the agents' rewards.
    """
    parts: list[RenderableType] = []
    for k, turn in enumerate(episode.turns):
        parts.append(Rule(f"turn {k + 1} of {len(episode.turns)}"))
        rows = [row for row in episode.rows if row.slot.turn == k]
        for row in rows:
            asked = messages_of(row.prompt)[-1]["content"]
            parts.append(
                Panel(Text(asked.strip()), title=f"{row.slot.agent} is asked", title_align="left", style="dim")
            )
            parts.append(Panel(Text(row.text.strip()), title=f"{row.slot.agent} writes", title_align="left"))
        parts.append(Panel(Text(turn.solution.strip()), title="solution", title_align="left", border_style="cyan"))
        for _, verdict in turn.verdicts[-1:]:
            said = f"{verdict.status}: {verdict.passed} of {verdict.total} tests passed"
            parts.append(Text(f"{said}. {verdict.message}" if verdict.message else said))
        parts.append(_rewards(turn, rows))
    if episode.masked:
        parts.append(Text("The episode was not scored, and is left out of the loss."))
    return Panel(Group(*parts), title=title)


def _rewards(turn: Turn, rows: list[Row]) -> Table:
    table = Table("agent", "reward", "tokens")
    for row in rows:
        reward = "–" if turn.rewards is None else f"{turn.rewards[row.slot.agent]:.3f}"
        table.add_row(row.slot.agent, reward, str(len(row.completion_ids)))
    return table
