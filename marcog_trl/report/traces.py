"""Episodes to read, on the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text


def episode_trace(row: Mapping[str, Any], title: str) -> RenderableType:
    """
    Shows an episode turn by turn: what each agent was asked and replied, the solution, its verdict, and what agents earned.

    Args:
        row (`dict`): A row that [`~marcog_trl.report.episodes.episode_row`] made.
        title (`str`): Heading.

    Returns:
        A renderable of `rich`.
    """
    parts: list[RenderableType] = []
    last = len(row["earlier_turns"]) + 1
    for turn in range(1, last + 1):
        messages = [message for message in row["messages"] if message["turn"] == turn]
        parts.append(Rule(f"turn {turn} of {last}"))
        table = Table("agent", "reward", "advantage", "tokens", "")
        for message in messages:
            agent = message["agent"]
            parts.append(Panel(Text(message["prompt"]), title=f"{agent} is asked", title_align="left", style="dim"))
            parts.append(Panel(_code(message["reply"]), title=f"{agent} writes", title_align="left"))
            notes = [*(["cut off"] if message["truncated"] else []), message["left_out"]]
            figures = ("–" if message[name] is None else f"{message[name]:.3f}" for name in ("reward", "advantage"))
            table.add_row(agent, *figures, str(message["tokens"]), "; ".join(filter(None, notes)))
        result = [*row["earlier_turns"], row][turn - 1]
        parts.append(Panel(_code(result["solution"]), title="solution", title_align="left", border_style="cyan"))
        if result["status"]:
            parts.append(Text(verdict_of(result)))
        parts.append(table)
    if row["masked"]:
        parts.append(Text("The episode was not scored and is left out of the loss."))
    return Panel(Group(*parts), title=Text(title))


def verdict_of(row: Mapping[str, Any]) -> str:
    """The verdict of an episode, in one line."""
    return f"{row['status']}: {row['tests_passed']} of {row['tests']} tests passed. {row['message']}".strip()


def _code(text: str) -> RenderableType:
    """A reply with its code highlighted."""
    text = text.strip()
    return Markdown(text) if "```" in text else Syntax(text, "python", theme="ansi_light", word_wrap=True)
