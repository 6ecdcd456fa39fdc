"""Shows a run while it trains: a block that is updated in place in a terminal, and one short line per log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.ansi import AnsiDecoder
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback


HISTORY = 3  # logs that the block shows
REFRESHES_PER_SECOND = 2
SILENCE = 15.0  # seconds without a line after which lines say what the trainer does
# Metrics of training on preferences, which has no rewards: of MADPO, and of a reward model
_OF_PREFERENCES = {
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "accuracy": "accuracy", "margin": "margin"
}  # fmt: skip


class ConsoleCallback(TrainerCallback):
    """
    Shows a run on the console: step, reward, share of solved problems, reward of each agent, entropy, tokens per second and
    time left. Use it as a context manager around training, so that the terminal is left in order whatever happens:

    ```python
    >>> with ConsoleCallback(trainer.agents, "my team") as console:
    ...     trainer.add_callback(console)
    ...     trainer.train()
    ```

    Add it in place of transformers' `ProgressCallback` or `PrinterCallback`. Only the main process prints.

    Args:
        agents (`list[str]`): Names of the agents.
        title (`str`): Title of the block.
        live (`bool`, *optional*): Whether to show one block instead of lines. Defaults to `True` in a terminal.
    """

    def __init__(self, agents: Sequence[str], title: str, live: bool | None = None):
        self.agents = agents
        self.title = title
        self.live = sys.stdout.isatty() and Console().is_interactive if live is None else live
        self.logs: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self.held_out: Mapping[str, Any] = {}  # log of the last evaluation
        self.activity = ""  # what the trainer does now
        self._shows = False  # on the main process, while it trains
        self._spoke = 0.0  # when the last line was printed
        self._screen = ExitStack()  # what is undone when the block ends
        self._progress = Progress(
            TextColumn("step {task.completed} of {task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("and"),
            TimeRemainingColumn(),
            TextColumn("left"),
            expand=True,
            auto_refresh=False,
            speed_estimate_period=float("inf"),  # steps may take minutes
        )

    def __enter__(self) -> ConsoleCallback:
        return self

    def __exit__(self, *_: Any) -> None:
        self._screen.close()

    # Callbacks

    def on_train_begin(self, args, state, control, **kwargs):
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task("", total=state.max_steps, completed=state.global_step)
        for log in state.log_history:  # of a resumed run
            self._note(log)
        self._shows, self._spoke = state.is_world_process_zero, time.monotonic()
        if state.is_world_process_zero and self.live:
            console = Console(file=sys.stdout)
            for enter in (_above_block(console), self._block_on(console)):
                self._screen.enter_context(enter)

    def on_step_end(self, args, state, control, **kwargs):
        (task,) = self._progress.task_ids
        self._progress.update(task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        log = {**logs, "step": state.global_step}
        self._note(log)
        if state.is_world_process_zero and not self.live:
            self._print(self.line(log))

    def tell(self, activity: str) -> None:
        """
        Shows what the trainer does within a step: in the block, or, after 15 seconds without a line, in a line.

        Args:
            activity (`str`): Such as `"judging 16 episodes"`.
        """
        self.activity = activity
        if self._shows and not self.live and time.monotonic() - self._spoke >= SILENCE:
            (task,) = self._progress.tasks
            self._print(f"step {task.completed + 1:.0f} of {task.total:.0f}  {activity}")

    def _print(self, line: str) -> None:
        print(line, flush=True)
        self._spoke = time.monotonic()

    def _note(self, log: Mapping[str, Any]) -> None:
        if evaluation_in(log) is not None:
            self.held_out = log
        elif "train_runtime" not in log:
            self.logs.append(log)

    def on_train_end(self, args, state, control, **kwargs):
        self._shows, self.activity = False, ""
        self._screen.close()

    # What is shown

    def line(self, log: Mapping[str, Any]) -> str:
        """A log in one line."""
        (task,) = self._progress.tasks
        step = f"step {log['step']} of {task.total:.0f}"
        if "train_runtime" in log:
            return f"{step}  trained in {_duration(log['train_runtime'])}"
        prefix = evaluation_in(log)
        if prefix is not None:
            found = _spaced(short(log, (), prefix))
            return f"{step}  held-out problems: {found}  in {_duration(log[f'{prefix}runtime'])}"
        shown = short(log, self.agents)
        rewards = sorted({float(shown[agent]) for agent in self.agents if agent in shown})
        if len(rewards) == 1 or len(rewards) > 3:  # they share it, or the line would be long
            shown = {name: value for name, value in shown.items() if name not in self.agents}
        if len(rewards) > 3:
            shown["agents"] = f"{rewards[0]:.3f} to {rewards[-1]:.3f}"
        left = task.time_remaining
        return f"{step}  {_spaced(shown)}" + (f"  {_duration(left)} left" if left else "")

    def block(self, width: int | None = None) -> RenderableType:
        """The block as of now, by default as wide as the terminal."""
        parts: list[RenderableType] = [self._progress.get_renderable()]
        if self.activity:
            parts.append(Text(self.activity, style="dim", no_wrap=True, overflow="ellipsis"))
        if self.logs:
            now = short(self.logs[-1], self.agents)
            agents = {name: now.pop(name) for name in self.agents if name in now}
            held_out = short(self.held_out, (), evaluation_in(self.held_out) or "")
            rows = Table.grid(padding=(0, 2))
            rows.add_row("team", _side_by_side(now))
            if agents:
                rows.add_row("reward of", _side_by_side(agents))
            if held_out:
                step = {"at step": str(self.held_out["step"])}
                rows.add_row("held-out", _side_by_side({**held_out, **step}))
            parts += [rows, Text(), self._history()]
        return Panel(Group(*parts), title=Text(self.title), title_align="left", width=width)

    def _history(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        names = list(short(self.logs[-1], ()))
        for name in ("step", *names):
            table.add_column(name, justify="right")
        for log in self.logs:
            shown = short(log, ())
            table.add_row(str(log["step"]), *(shown.get(name, "–") for name in names))
        return table

    @contextmanager
    def _block_on(self, console: Console) -> Iterator[None]:
        # The streams are redirected by `_above_block`
        with Live(
            console=console,
            get_renderable=lambda: self.block(console.width - 4),  # "^C" beside it must not begin another line
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield


def short(log: Mapping[str, Any], agents: Sequence[str], prefix: str = "") -> dict[str, str]:
    """
    What people look at first in a log.

    Args:
        log (`Mapping`): A log of the trainer.
        agents (`list[str]`): Names of the agents whose rewards are shown; those of a single agent are the team's.
        prefix (`str`, *optional*, defaults to `""`): Prefix of the metrics of an evaluation, such as `"eval_"`.

    Returns:
        `dict[str, str]`: Values by name, without those that were not logged.
    """
    metrics = {"reward": "reward", "solved": "episodes/solved"}
    if prefix + "reward" not in log:
        metrics = {label: metric for metric, label in _OF_PREFERENCES.items() if prefix + metric in log}
    metrics |= {agent: f"agents/{agent}/reward" for agent in agents if len(agents) > 1}
    if not prefix:
        metrics |= {"entropy": "entropy", "tokens/s": "tokens_per_second"}
    found = {name: log.get(prefix + metric) for name, metric in metrics.items()}
    return {
        name: f"{value:,.0f}" if name == "tokens/s" else f"{value:.3f}"
        for name, value in found.items()
        if value is not None
    }


def evaluation_in(log: Mapping[str, Any]) -> str | None:
    """The prefix of the metrics of an evaluation, such as `"eval_"`; `None` in other logs."""
    prefixes = (name.removesuffix("runtime") for name in log if name.startswith("eval_") and name.endswith("_runtime"))
    return next(prefixes, None)


def _spaced(values: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items())


def _side_by_side(values: Mapping[str, str]) -> Columns:
    """Names and values, in as many lines as they need."""
    return Columns(
        [Text.assemble((name, "dim"), " ", (value, "bold")) for name, value in values.items()], padding=(0, 3)
    )


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, as the columns of the block show them."""
    return str(timedelta(seconds=round(seconds)))


# What others print meanwhile


class _LinesAbove:
    """
    Prints whole lines above the block. Half a line waits for its rest, as that of a progress bar does, of which only the last
    state is printed.
    """

    def __init__(self, console: Console, stream: TextIO):
        self._console = console
        self._stream = stream
        self._decoder = AnsiDecoder()
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest.rpartition("\r")[2]
        if lines:
            decoded = Text("\n").join(map(self._decoder.decode_line, lines))  # what follows the last "\r" of a line
            self._console.print(decoded, soft_wrap=True)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        """Prints half a line that still waits."""
        if self._rest:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _above_block(console: Console) -> Iterator[None]:
    """Lets what is printed to the terminal appear above a block that this console shows, also by loggers."""
    with ExitStack() as stack:
        above: dict[Any, _LinesAbove] = {}
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():
                above[stream] = _LinesAbove(console, stream)
                stack.enter_context(redirect(cast(TextIO, above[stream])))
        for handler in _stream_handlers():
            if handler.stream in above:
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(cast(TextIO, above[handler.stream]))
        try:
            yield
        finally:
            for proxy in above.values():
                proxy.finish()


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    for handler in {
        handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers
    }:
        if isinstance(handler, logging.StreamHandler):
            yield handler
