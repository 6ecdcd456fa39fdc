"""The page of a run, `report.html`: fills `page.html.jinja` with what a trainer knows."""

from __future__ import annotations

import base64
import platform
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from peft import LoraConfig

from marcog_trl.report.figures import PICTURES, agent_style, read_history
from marcog_trl.report.results import change_rows


# The settings by which readers compare runs. Those that a trainer's configuration does not have are left out.
_COMPARED_SETTINGS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "num_generations", "num_iterations", "max_completion_length", "temperature", "top_p", "learning_rate",
    "lr_scheduler_type", "max_grad_norm", "beta", "epsilon", "loss_type", "advantage", "scale_rewards", "critic",
    "critic_learning_rate", "vf_coef", "gamma", "lam", "kl_penalty", "advantage_normalization", "parameter_sharing",
    "latent_scope", "latent_size", "sigma_min", "latent_distance", "latent_distance_coef", "latent_entropy_coef",
    "latent_learning_rate", "inference_learning_rate", "policy_gradient_to_latent", "num_turns", "gamma_turn",
    "turn_tree", "joint_mode", "centralized", "agent_loss_weighting", "early_termination_threshold", "curriculum_column",
    "bf16", "use_vllm", "seed",
)  # fmt: skip


def make_page(trainer: Any, images: Mapping[str, bytes | None], results: Mapping[str, Any]) -> str:
    """
    Args:
        trainer ([`MultiAgentTrainer`]): The trainer of the run.
        images (`dict[str, bytes]`): PNG files of the pictures by name, `None` for a picture that could not be drawn.
        results (`Mapping`): See [`ReportCallback.write`]; may be empty.

    Returns:
        `str`: An HTML page that needs no other file.
    """
    state, args = trainer.state, trainer.args
    name = args.run_name or Path(args.output_dir or "").name
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        title=f"{name}: {trainer._name}",
        status=f"Step {state.global_step} of {state.max_steps}, written {written}",
        results=change_rows(results) if {"untrained", "trained"} <= set(results) else None,
        run=list(_describe_run(trainer)),
        agents=[
            {"name": agent.name, "role": agent.role, "color": agent_style(i)["color"]}
            for i, agent in enumerate(trainer.workflow.agents)
        ],
        pictures=[
            {
                "title": picture.title,
                "caption": picture.caption,
                "image": base64.b64encode(images[picture.name] or b"").decode(),
            }
            for picture in PICTURES
            if picture.name in images
        ],
        metrics=_metric_rows(state.log_history),
        settings=[(f, getattr(args, f)) for f in _COMPARED_SETTINGS if f in {field.name for field in fields(args)}],
    )


def _describe_run(trainer: Any) -> Iterable[tuple[str, Any]]:
    """What the run is, row by row."""
    team, accelerator = trainer.team.description.to_dict(), trainer.accelerator
    trained, total = trainer.model.get_nb_trainable_parameters()
    adapter = trainer.model.peft_config["default"]
    yield "Algorithm", f"{trainer._name} ({type(trainer).__name__})"
    if trainer._paper:
        yield "Paper", f"{trainer._paper['title']}, arXiv:{trainer._paper['id']}"
    yield "Base model", team["base_model"]
    yield "Parameters", f"{total:,}, of which {trained:,} are trained"
    if isinstance(adapter, LoraConfig):
        yield "Adapter", f"LoRA, r = {adapter.r}, alpha = {adapter.lora_alpha}"
    agents, turns = _count(len(trainer.agents), "agent"), _count(team["num_turns"], "turn")
    yield "Workflow", f"{team['workflow']}, {agents}, {turns}"
    weights = trainer.reward_weights.tolist()
    yield "Rewards", ", ".join(f"{weight:g} × {name}" for name, weight in zip(team["rewards"], weights, strict=True))
    mode = f" ({accelerator.distributed_type.value})" if accelerator.num_processes > 1 else ""
    yield "Processes", f"{accelerator.num_processes} on {accelerator.device.type}{mode}"
    yield "Output", Path(trainer.args.output_dir or "").resolve()
    versions = {**team["versions"], "python": platform.python_version()}
    yield "Versions", ", ".join(f"{package} {version}" for package, version in versions.items())


def _metric_rows(history: list[dict[str, Any]]) -> list[list[str]]:
    """Per metric its name, first, last, lowest and highest value, and the last step at which it was logged."""
    frame, rows = read_history(history), []
    for name in sorted(frame.columns.difference(["epoch"])):
        metric = frame[name].dropna()
        values = (metric.iloc[0], metric.iloc[-1], metric.min(), metric.max())
        rows.append([name, *(f"{value:.4g}" for value in values), f"{metric.index[-1]:g}"])
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
