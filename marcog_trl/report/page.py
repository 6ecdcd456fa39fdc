"""The page of a run, `report.html`: fills `page.html.jinja` with what a trainer knows."""

from __future__ import annotations

import base64
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from jinja2 import Environment, FileSystemLoader
from peft import LoraConfig
from transformers import IntervalStrategy

from marcog_trl.report.figures import agent_style, always_zero, read_history
from marcog_trl.report.pictures import PICTURES, Picture
from marcog_trl.report.results import change_rows


# The settings by which readers compare runs. Those that a trainer's configuration does not have are left out.
_COMPARED_SETTINGS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "num_generations", "num_iterations", "max_completion_length", "temperature", "top_p", "learning_rate",
    "lr_scheduler_type", "max_grad_norm", "beta", "epsilon", "loss_type", "advantage", "scale_rewards", "critic",
    "critic_learning_rate", "vf_coef", "gamma", "lam", "kl_penalty", "advantage_normalization", "parameter_sharing",
    "latent_scope", "latent_size", "sigma_min", "core_scale", "latent_distance", "latent_distance_coef",
    "latent_entropy_coef", "behaviour_distance_coef",
    "latent_learning_rate", "inference_learning_rate", "policy_gradient_to_latent", "num_turns", "gamma_turn",
    "credit", "fanout", "counterfactual_critic", "turn_tree", "joint_mode", "centralized", "agent_loss_weighting",
    "early_termination_threshold", "curriculum_column", "bf16", "use_vllm", "seed",
)  # fmt: skip


def make_page(
    trainer: Any,
    images: Mapping[str, bytes | None],
    results: Mapping[str, Any],
    examples: Sequence[Mapping[str, Any]] = (),
) -> str:
    """
    Args:
        trainer ([`MultiAgentTrainer`]): The trainer of the run.
        images (`dict[str, bytes]`): PNG files by the titles of the panels, `None` for a panel that could not be drawn.
        results, examples: See [`ReportCallback.write`]; may be empty.

    Returns:
        `str`: An HTML page that needs no other file.
    """
    state, args = trainer.state, trainer.args
    name = args.run_name or Path(args.output_dir or "").name
    colors = {agent: agent_style(i)["color"] for i, agent in enumerate(trainer.agents)}
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        title=f"{name}: {trainer._name}",
        status=f"Step {state.global_step} of {state.max_steps}, written {written}",
        warnings=list(trainer.diagnosis.found.values()),
        results=change_rows(results) if {"untrained", "trained"} <= set(results) else None,
        examples=examples,
        run=list(_describe_run(trainer)),
        agents=[
            {"name": agent.name, "role": agent.role, "color": colors[agent.name]} for agent in trainer.workflow.agents
        ],
        colors=colors,
        held_out=_describe_held_out(trainer),
        pictures=[picture for picture in map(partial(_show, images), PICTURES) if picture["images"]],
        zero=always_zero(state.log_history, trainer.agents),
        metrics=_metric_rows(state.log_history),
        settings=[(f, getattr(args, f)) for f in _COMPARED_SETTINGS if f in {field.name for field in fields(args)}],
    )


def _show(images: Mapping[str, bytes | None], picture: Picture) -> dict[str, Any]:
    """A picture with those of its images that there are."""
    shown = [panel.title for panel in picture.panels if panel.title in images]
    return {
        "title": picture.title,
        "caption": picture.caption,
        "images": [{"title": title, "data": base64.b64encode(images[title] or b"").decode()} for title in shown],
    }


def _describe_held_out(trainer: Any) -> str:
    """What the evaluations during training measured, and what they cost; empty without any."""
    history, args = trainer.state.log_history, trainer.args
    seconds = [log["eval_runtime"] for log in history if "eval_runtime" in log]
    if not seconds:
        return ""
    training, step = 0.0, 0
    for log in history:
        if "step_time" in log:  # the mean since the log before
            training, step = training + log["step_time"] * (log["step"] - step), log["step"]
    on_steps = args.eval_strategy == IntervalStrategy.STEPS
    steps = trainer.state.eval_steps
    every = ("every step" if steps == 1 else f"every {steps} steps") if on_steps else f"{len(seconds)} times"
    problems = trainer.eval_dataset
    size = f"{_count(len(problems), 'problem')}, " if isinstance(problems, Dataset) else ""
    return (
        f"On held-out problems: {size}{_count(trainer.num_generations_eval, 'episode')} of each, {every}. That took "
        f"{sum(seconds):.0f} seconds in all, {sum(seconds) / (sum(seconds) + training):.0%} of the time of the training."
    )


def _describe_run(trainer: Any) -> Iterable[tuple[str, Any]]:
    """What the run is, row by row."""
    team, accelerator = trainer.team.description.to_dict(), trainer.accelerator
    whole = trainer.team.description.full_finetuning
    adapter = None if whole else trainer.model.peft_config["default"]
    model = trainer.model
    trained, total = (
        (model.num_parameters(only_trainable=True), model.num_parameters())
        if whole
        else model.get_nb_trainable_parameters()
    )
    yield "Algorithm", f"{trainer._name} ({type(trainer).__name__})"
    if trainer._paper:
        yield "Paper", f"{trainer._paper['title']}, arXiv:{trainer._paper['id']}"
    yield "Base model", team["base_model"]
    yield "Parameters", f"{total:,}, of which {trained:,} are trained"
    if isinstance(adapter, LoraConfig):
        yield "Adapter", f"LoRA, r = {adapter.r}, alpha = {adapter.lora_alpha}"
    elif whole:
        yield "Adapter", "none: all weights of the model are trained"
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
