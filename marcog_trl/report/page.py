"""The report of a run: `report.html`, one file that needs no other, and its pictures."""

from __future__ import annotations

import base64
import html
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import LoraConfig
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from marcog_trl.files import write_whole
from marcog_trl.report.figures import (
    LATENTS,
    NAMES,
    Picture,
    Points,
    agent_style,
    draw,
    make_pictures,
    read_history,
    to_png,
)
from marcog_trl.report.results import ROWS


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer

logger = logging.getLogger(__name__)

REPORT_FILE, PICTURES = "report.html", "pictures"
# What a reader compares runs by; a setting that the trainer's configuration does not have is left out
_SETTINGS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "num_generations", "num_iterations", "max_completion_length", "temperature", "top_p", "learning_rate",
    "lr_scheduler_type", "max_grad_norm", "beta", "epsilon", "loss_type", "advantage", "scale_rewards", "critic",
    "critic_learning_rate", "vf_coef", "gamma", "lam", "kl_penalty", "advantage_normalization", "parameter_sharing",
    "latent_scope", "latent_size", "sigma_min", "latent_distance", "latent_distance_coef", "latent_entropy_coef",
    "latent_learning_rate", "inference_learning_rate", "policy_gradient_to_latent", "num_turns", "gamma_turn",
    "turn_tree", "joint_mode", "centralized", "agent_loss_weighting", "early_termination_threshold", "curriculum_column",
    "bf16", "use_vllm", "seed",
)  # fmt: skip


class ReportCallback(TrainerCallback):
    """
    Writes `report.html` and `pictures/*.png` into the output folder, at every save and when training ends, and then shows
    the pictures in wandb and TensorBoard where the run reports to them.

    They are made of `trainer.state.log_history`, to which the agents' mean latents are added at every log; checkpoints
    hold it, so that a resumed run shows all of itself. Only the main process writes. A picture that cannot be drawn, and a
    report that cannot be written, are warned of and do not end the run.

    Example:

    ```python
    >>> args = SHPPOConfig("team", write_report=True)  # or, with any trainer of this package,
    >>> trainer.add_callback(ReportCallback(trainer))
    ```

    Args:
        trainer ([`MultiAgentTrainer`]): The trainer whose run is reported.

    Raises:
        ValueError: If the output folder has something else where the report would be.
    """

    def __init__(self, trainer: MultiAgentTrainer):
        self.trainer = trainer
        self.folder = Path(trainer.args.output_dir or "")
        self.results: Mapping[str, Any] = {}
        for path, wrong in (
            (self.folder / REPORT_FILE, Path.is_dir),
            (self.folder / PICTURES, Path.is_file),
            (self.folder, Path.is_file),
        ):
            if wrong(path):
                raise ValueError(
                    f"output_dir={str(self.folder)!r} has no room for the report: {str(path)!r} is in the way; another "
                    "output_dir, or write_report=False, works"
                )

    def on_log(self, args, state, control, **kwargs):
        if self.trainer.agent_latents is not None:
            state.log_history[-1][LATENTS] = self.trainer.agent_latents

    def on_save(self, args, state, control, **kwargs):
        self.write()

    def on_train_end(self, args, state, control, **kwargs):
        self.write()
        if state.is_world_process_zero:
            try:
                self._show_in_trackers()
            except Exception as error:
                logger.warning("the pictures of the run are not in report_to=%s: %r", args.report_to, error)

    def write(self, results: Mapping[str, Any] | None = None) -> None:
        """
        Writes the report as it is now; does nothing but on the main process.

        Args:
            results (`Mapping`, *optional*): `{"untrained": {...}, "trained": {...}}` with the figures of [`evaluate_team`];
                kept for later reports.
        """
        self.results = self.results if results is None else results
        if not self.trainer.state.is_world_process_zero:
            return
        try:
            pictures = make_pictures(self.trainer.state.log_history, self.trainer.agents)
            images = {picture.name: image for picture in pictures if (image := _render(picture)) is not None}
            (self.folder / PICTURES).mkdir(parents=True, exist_ok=True)
            for name in NAMES:
                path = self.folder / PICTURES / f"{name}.png"
                if name in images:
                    write_whole(path, images[name])
                else:
                    path.unlink(missing_ok=True)  # of a run before in the same folder
            page = make_page(self.trainer, pictures, images, self.results)
            write_whole(self.folder / REPORT_FILE, page.encode())
        except Exception as error:  # whatever it is, the run is worth more than its pictures
            logger.warning("the report of the run was not written to %s: %r", self.folder, error)

    def _show_in_trackers(self) -> None:
        paths = {name: path for name in NAMES if (path := self.folder / PICTURES / f"{name}.png").is_file()}
        step = self.trainer.state.global_step
        if "wandb" in (self.trainer.args.report_to or ()):
            import wandb

            if wandb.run is not None:
                images = {f"report/{name}": wandb.Image(str(path)) for name, path in paths.items()}
                wandb.log({**images, "train/global_step": step})
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                from matplotlib.image import imread
                from torch.utils.tensorboard import SummaryWriter

                # Its own writer may be closed by now; a second one adds to the same run
                with SummaryWriter(callback.logging_dir) as writer:
                    for name, path in paths.items():
                        writer.add_image(f"report/{name}", imread(path), step, dataformats="HWC")


def _render(picture: Picture) -> bytes | None:
    try:
        return to_png(draw(picture))
    except Exception as error:
        logger.warning("the picture %r was not drawn: %r", picture.name, error)
        return None


def make_page(
    trainer: MultiAgentTrainer, pictures: Sequence[Picture], images: Mapping[str, bytes], results: Mapping[str, Any]
) -> str:
    """
    Args:
        trainer ([`MultiAgentTrainer`]): The trainer of the run.
        pictures (`list[Picture]`): What there is to show.
        images (`dict[str, bytes]`): PNG of each picture that could be drawn, by name.
        results (`Mapping`): See [`ReportCallback.write`]; may be empty.

    Returns:
        `str`: An HTML page that refers to nothing outside of itself.
    """
    state = trainer.state
    parts = []
    if {"untrained", "trained"} <= set(results):
        parts.append(_section("Held-out problems", _results_table(results)))
    parts.append(_section("The run", _rows(_run(trainer))))
    agents = "".join(
        f'<tr><th><span class="swatch" style="background:{agent_style(i)[0]}"></span>{_text(agent.name)}</th>'
        f"<td>{_text(agent.role)}</td></tr>"
        for i, agent in enumerate(trainer.workflow.agents)
    )
    parts.append(_section("Agents", f"<table>{agents}</table>"))
    for picture in pictures:
        if picture.name in images:
            data = base64.b64encode(images[picture.name]).decode()
            shown = f'<img alt="{_text(picture.title)}" src="data:image/png;base64,{data}">'
        else:
            shown = "<p><em>This picture could not be drawn; the log of the run says why.</em></p>"
        parts.append(_section(picture.title, f"<p>{_text(picture.caption)}</p>{shown}"))
    metrics = read_history(state.log_history)
    if not pictures:
        parts.append(_section("Pictures", "<p>Nothing was logged yet that could be drawn.</p>"))
    table = _metrics_table(metrics) if metrics else "<p>No metric was logged yet.</p>"
    parts.append(_section("Metrics", table))
    parts.append(
        _section("Settings", f"<details><summary>Key settings</summary>{_rows(_settings(trainer))}</details>")
    )
    name = trainer.args.run_name or Path(trainer.args.output_dir or "").name
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _PAGE.format(
        title=_text(f"{name}: {type(trainer)._name}"),
        style=_STYLE,
        state=_text(f"Step {state.global_step} of {state.max_steps}, written {written}"),
        body="\n".join(parts),
    )


def _run(trainer: MultiAgentTrainer) -> Iterable[tuple[str, Any]]:
    """What the run is, row by row."""
    team, args = trainer.team_description(), trainer.args
    trained, total = trainer.model.get_nb_trainable_parameters()
    adapter = trainer.model.peft_config["default"]
    yield "Algorithm", f"{type(trainer)._name} ({type(trainer).__name__})"
    if type(trainer)._paper:
        yield "Paper", f"{type(trainer)._paper['title']}, arXiv:{type(trainer)._paper['id']}"
    yield "Base model", team["base_model"]
    yield "Parameters", f"{total:,}, of which {trained:,} are trained"
    if isinstance(adapter, LoraConfig):
        yield "Adapter", f"LoRA, r = {adapter.r}, alpha = {adapter.lora_alpha}"
    agents, turns = _count(len(trainer.agents), "agent"), _count(team["num_turns"], "turn")
    yield "Workflow", f"{team['workflow']}, {agents}, {turns}"
    weights = trainer.reward_weights.tolist()
    yield "Rewards", ", ".join(f"{weight:g} × {name}" for name, weight in zip(team["rewards"], weights, strict=True))
    accelerator = trainer.accelerator
    yield (
        "Processes",
        f"{accelerator.num_processes} on {accelerator.device.type} ({accelerator.distributed_type.value})",
    )
    yield "Output", Path(args.output_dir or "").resolve()
    versions = {**team["versions"], "python": platform.python_version()}
    yield "Versions", ", ".join(f"{package} {version}" for package, version in versions.items())


def _settings(trainer: MultiAgentTrainer) -> Iterable[tuple[str, Any]]:
    own = {field.name for field in fields(trainer.args)}
    return [(name, getattr(trainer.args, name)) for name in _SETTINGS if name in own]


def _results_table(results: Mapping[str, Any]) -> str:
    rows = []
    for key, label in ROWS:
        cells = []
        for figures in (results["untrained"], results["trained"]):
            half = figures.get(f"{key}_interval")
            cells.append(f"{figures[key]:.3f}" + ("" if half is None else f" ± {half:.3f}"))
        change = results["trained"][key] - results["untrained"][key]
        rows.append((label, *cells, f"{change:+.3f}"))
    return _table(("", "untrained", "trained", "change"), rows)


def _metrics_table(metrics: Mapping[str, Points]) -> str:
    rows = [
        (name, *(f"{number:.4g}" for number in (values[0], values[-1], values.min(), values.max())), f"{steps[-1]:g}")
        for name, (steps, values) in sorted(metrics.items())
        if name not in ("step", "epoch")
    ]
    heads = ("metric", "first", "last", "lowest", "highest", "last logged at step")
    return f"<details open><summary>{len(rows)} metrics</summary>{_table(heads, rows)}</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr><th>{_text(first)}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _rows(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in pairs)
    return f"<table>{rows}</table>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text(value: Any) -> str:
    return html.escape(str(value))


_STYLE = """\
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem; background: #fff; color: #222;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2rem 0 .4rem; padding-bottom: .2rem; border-bottom: 1px solid #ddd; font-size: 1.15rem; }
p { margin: .3rem 0; color: #555; max-width: 50rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .4rem 0; }
th, td { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #eee; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
tr > th:first-child { font-weight: 600; white-space: nowrap; }
.figures td, .figures thead th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 50%; }
summary { cursor: pointer; color: #555; }"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{state}</p>
{body}
</body>
</html>
"""
