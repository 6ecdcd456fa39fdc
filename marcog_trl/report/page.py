"""The page of a run, `report.html`: fills `page.html.jinja`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from transformers import TrainerState, TrainingArguments

from marcog_trl.report.episode_files import EPISODES_FOLDER, FILES, read_rows
from marcog_trl.report.episodes import side_by_side
from marcog_trl.report.plots import agent_color, draw, read_history
from marcog_trl.report.results import change_rows
from marcog_trl.report.traces import verdict_of


def make_page(
    algorithm: str,
    team: Mapping[str, Any],
    args: TrainingArguments,
    state: TrainerState,
    warnings: Sequence[str] = (),
    results: Mapping[str, Any] | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
) -> str:
    """
    Args:
        algorithm (`str`): Name of the algorithm.
        team (`Mapping`): The content of `team.json`.
        args (`TrainingArguments`): The trainer's configuration.
        state (`TrainerState`): The trainer's state, with everything that was logged.
        warnings (`list[str]`, *optional*): What went wrong.
        results, examples (*optional*): See [`ReportCallback.write`].

    Returns:
        `str`: An HTML page that needs no other file.
    """
    folder = Path(args.output_dir or "")
    agents = {agent["name"]: agent["role"] for agent in team["agents"]}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["verdict"] = verdict_of
    return environment.get_template("page.html.jinja").render(
        title=f"{args.run_name or folder.name}: {algorithm}",
        status=f"Step {state.global_step} of {state.max_steps}, written {datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        warnings=warnings,
        results=change_rows(results) if results else None,
        examples=examples,
        episodes=_episodes(folder, state),
        run={
            "Algorithm": f"{algorithm} ({team['trainer']})",
            "Base model": team["base_model"],
            "Workflow": f"{team['workflow']}, turns: {team['num_turns']}",
            "Rewards": ", ".join(team["rewards"]),
            "Processes": f"{args.world_size} on {args.device.type}",
            "Output": folder.resolve(),
            "Versions": ", ".join(f"{package} {version}" for package, version in team["versions"].items()),
        },
        agents=agents,
        colors={agent: agent_color(i) for i, agent in enumerate(agents)},
        pictures={
            title: base64.b64encode(image).decode()
            for title, image in draw(state.log_history, list(agents), results).items()
        },
        metrics=_metric_rows(state.log_history),
        settings=_changed_settings(args),
    )


def _episodes(folder: Path, state: TrainerState) -> list[dict[str, Any]]:
    """Problems with episodes at several steps: those of evaluations, in which problems come again, else of training."""
    if not any((folder / EPISODES_FOLDER).glob(FILES)):
        return []
    rows = [row for row in read_rows(folder) if row["step"] <= state.global_step + 1]
    evaluated = [row for row in rows if row["split"] == "eval"]
    return side_by_side(evaluated if len({row["step"] for row in evaluated}) > 1 else rows)


def _metric_rows(history: list[dict[str, Any]]) -> list[list[str]]:
    """Per metric its name, first, last, lowest and highest value, and the last step at which it was logged."""
    frame, rows = read_history(history), []
    for name in sorted(frame.columns.difference(["epoch"])):
        metric = frame[name].dropna()
        values = (metric.iloc[0], metric.iloc[-1], metric.min(), metric.max())
        rows.append([name, *(f"{value:.4g}" for value in values), f"{metric.index[-1]:g}"])
    return rows


def _changed_settings(args: TrainingArguments) -> dict[str, Any]:
    """The settings that differ from their defaults, without secrets."""
    values = args.to_dict()
    changed = [f.name for f in fields(args) if f.default is not MISSING and getattr(args, f.name) != f.default]
    return {name: values[name] for name in changed}
