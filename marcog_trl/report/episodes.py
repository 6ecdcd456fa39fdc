"""
Episodes as rows of a table: what was asked, replied, executed and earned.

Training writes them to `episodes/` in its output folder, and an evaluation beside its figures, as Parquet files with the
columns of [`COLUMNS`]. `datasets.load_dataset("parquet", data_dir="outputs/run/episodes")` reads them, also while a run goes on.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features
from transformers import TrainerCallback

from marcog_trl.execution import Job, Verdict
from marcog_trl.parsing.prompts import messages_of
from marcog_trl.report.episode_files import EPISODES_FOLDER, FILES, SCHEMA
from marcog_trl.report.episode_files import read_rows as read_rows
from marcog_trl.rollout.records import Episode, Row, Turn


logger = logging.getLogger(__name__)

# As `datasets` reads them
COLUMNS = Features.from_arrow_schema(SCHEMA)


@dataclass(frozen=True)
class Learned:
    """
    Facts that training adds to a reply.

    Args:
        logprob (`float`, *optional*): Mean log-probability of its tokens.
        advantage (`float`, *optional*): Its advantage, averaged over its tokens.
        left_out (`str`): Why it is not in the loss; empty if it is.
    """

    logprob: float | None = None
    advantage: float | None = None
    left_out: str = ""


def episode_row(
    episode: Episode,
    reward_names: Sequence[str],
    end_tokens: Collection[int],
    learned: Mapping[int, Learned] | None = None,
    **where: Any,
) -> dict[str, Any]:
    """
    Describes a scored episode.

    Args:
        episode ([`Episode`]): The episode.
        reward_names (`Sequence[str]`): Names of the reward functions.
        end_tokens (`Collection[int]`): Tokens that end a reply that is not cut off.
        learned (`Mapping[int, Learned]`, *optional*): What a training knows of replies, by `id` of the row.
        **where: `step`, `split`, `process` and `generation`.

    Returns:
        `dict`: The columns of [`COLUMNS`].
    """
    last = episode.turns[-1]
    job, verdict = _tested(last)
    tests = () if job is None else job.tests
    names = [str(test) for test in tests] if isinstance(tests, tuple) else []
    results = () if verdict is None else verdict.tests
    return {
        **where,
        "task_id": str(episode.problem.get("task_id", "")),
        "problem": _text(episode.problem["prompt"]),
        "messages": [
            _message(row, episode, end_tokens, (learned or {}).get(id(row), Learned())) for row in episode.rows
        ],
        **_verdict(last, episode),
        "earlier_turns": [_verdict(turn, episode) for turn in episode.turns[:-1]],
        "results": [
            {"test": names[i] if len(names) == len(results) else f"test {i + 1}", "status": result.status}
            for i, result in enumerate(results)
        ],
        "reward": None if last.rewards is None else sum(last.rewards.values()) / len(last.rewards),
        "rewards": [
            {"turn": k + 1, "function": name, "agent": agent, "value": value}
            for k, turn in enumerate(episode.turns)
            if turn.score is not None
            for agent, values in turn.score.by_agent.items()
            for name, value in zip(reward_names, values, strict=True)
            if not math.isnan(value)
        ],
        "masked": episode.masked,
        "execution_seconds": None if verdict is None else verdict.seconds,
    }


def _tested(turn: Turn) -> tuple[Job, Verdict] | tuple[None, None]:
    """The job and the verdict of a turn: all tests on its solution, else what its workflow ran last."""
    return turn.tested or (turn.verdicts[-1] if turn.verdicts else (None, None))


def _verdict(turn: Turn, episode: Episode) -> dict[str, Any]:
    _, verdict = _tested(turn)
    return {
        "solution": turn.solution,
        "status": "" if verdict is None else "infrastructure" if episode.unanswered else verdict.status,
        "message": episode.failure or ("" if verdict is None else verdict.message),
        "tests_passed": None if verdict is None else verdict.passed,
        "tests": None if verdict is None else verdict.total,
    }


def _message(row: Row, episode: Episode, end_tokens: Collection[int], learned: Learned) -> dict[str, Any]:
    rewards = episode.turns[row.slot.turn].rewards if row.slot.turn < len(episode.turns) else None
    cut = row.completion.truncated if row.completion else not set(row.completion_ids[-1:]) & set(end_tokens)
    return {
        "agent": row.slot.agent,
        "turn": row.slot.turn + 1,
        "prompt": _text(row.prompt),
        "reply": row.text,
        "tokens": row.num_tokens,
        "truncated": cut,
        "logprob": learned.logprob,
        "advantage": learned.advantage,
        "left_out": learned.left_out,
        "reward": None if rewards is None else rewards[row.slot.agent],
    }


def _text(prompt: Any) -> str:
    """A prompt as text. Several messages are under their roles."""
    messages = messages_of(prompt)
    texts = [str(message["content"]).strip() for message in messages]
    if len(messages) > 1:
        texts = [f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True)]
    return "\n\n".join(texts)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as a Parquet file. Readers never see a partial file."""
    table = pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in rows], COLUMNS.arrow_schema)
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pq.write_table(table, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def spread(count: int, number: int) -> list[int]:
    """This number of indices of `count` episodes, with equal distances: siblings are neighbours."""
    number = min(number, count)
    return [i * count // number for i in range(number)]


class EpisodeLog(TrainerCallback):
    """
    Writes episodes of a training to `episodes/` in its output folder, in the background. A resumed run drops those after its
    checkpoint, a new run all of them. If they cannot be written, one warning is logged, and training goes on.

    Args:
        folder (`Path`): The output folder.
        every (`int`, *optional*): Steps between two steps whose episodes are written. Defaults to `logging_steps`.
        most (`int`): Episodes per step, over all processes.
        process, num_processes (`int`): Number of this process, and of all.
    """

    def __init__(self, folder: Path, every: int | None, most: int, process: int = 0, num_processes: int = 1):
        self.folder = folder / EPISODES_FOLDER
        self._every = every
        self._most = max(1, most // num_processes)
        self._process = process
        self._interval = self._train_step = self._step = -1
        self._count = 0
        self._split = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="marcog_trl-episodes")
        self._works = True

    def on_train_begin(self, args, state, control, **kwargs):
        self._every = self._every or max(1, int(state.logging_steps))
        self._interval = -1
        if state.is_world_process_zero:
            for file in self.folder.glob(FILES):
                if int(file.name.split("-")[1]) > state.global_step:
                    file.unlink(missing_ok=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.wait()

    def wait(self) -> None:
        """Waits until everything is written."""
        self._pool.submit(lambda: None).result()

    def chosen(self, episodes: Sequence[Episode], step: int, split: str) -> list[int]:
        """Indices of the episodes of a batch that are to be written, spread over its problems."""
        if split == "train":
            interval = step // (self._every or 1)
            if interval == self._interval and step != self._train_step:
                return []
            self._interval, self._train_step = interval, step
        if (split, step) != (self._split, self._step):
            self._split, self._step, self._count = split, step, 0
        return spread(len(episodes), self._most - self._count) if self._works else []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows of the step and split of the last call of [`EpisodeLog.chosen`], in the background."""
        if not rows:
            return
        name = f"{self._split}-{self._step:07d}-{self._process}-{self._count}.parquet"
        self._count += len(rows)
        self._pool.submit(self._write, self.folder / name, rows)

    def _write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            if self._works:
                write_rows(path, rows)
        except Exception as error:  # a run must not fail because of its log
            self._works = False
            logger.warning("Episodes are no longer written, since %s cannot be: %s", path, error)


# Episodes to read


KINDS = ("learnt", "forgotten", "not solved", "most reward without passing", "solved")


def side_by_side(rows: Iterable[Mapping[str, Any]], problems: int = 6) -> list[dict[str, Any]]:
    """
    Chooses problems to read, and an episode of each at the first, a middle and the last step at which it was written.

    Args:
        rows (`Iterable[dict]`): Episodes.
        problems (`int`, *optional*, defaults to `6`): Number of problems. They are taken in turn from those that training
            solved, forgot, never solved, in which an episode earned most without passing its tests, and the others.

    Returns:
        `list[dict]`: `kind`, `problem`, and `episodes`, a list of rows.
    """
    by_problem: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        key = (row["task_id"], row["problem"])
        by_problem.setdefault(key, {}).setdefault(row["step"] or 0, []).append(row)
    kinds: dict[str, list[tuple[float, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for (_, problem), steps in by_problem.items():
        order = sorted(steps)
        shown = list(dict.fromkeys((order[0], order[len(order) // 2], order[-1])))
        share = [sum(row["status"] == "passed" for row in steps[step]) / len(steps[step]) for step in order]
        unpassed = [row for step in order for row in steps[step] if row["status"] != "passed"]
        cheat = max(unpassed, key=lambda row: row["reward"] or 0.0, default=None)
        episodes = [steps[step][0] for step in shown]
        found = {"problem": problem, "episodes": episodes}
        change = share[-1] - share[0]
        kind = "learnt" if change > 0 else "forgotten" if change < 0 else "solved" if share[-1] else "not solved"
        kinds[kind].append((len(order) * abs(change), {"kind": kind, **found}))
        if cheat is not None and (cheat["reward"] or 0) > 0:
            kind = "most reward without passing"
            kinds[kind].append((cheat["reward"], {"kind": kind, "problem": problem, "episodes": [cheat]}))
    queues = [sorted(of_kind, key=lambda pair: -pair[0]) for of_kind in kinds.values()]
    chosen: list[dict[str, Any]] = []
    while len(chosen) < problems and any(queues):
        for queue in queues:
            while queue:
                found = queue.pop(0)[1]
                if found["problem"] not in [other["problem"] for other in chosen]:
                    chosen.append(found)
                    break
    return chosen[:problems]
