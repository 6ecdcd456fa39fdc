"""Measures a team on problems: pass@k, tests, rewards, tokens and time, problem by problem, so that it can be resumed."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import LogitsProcessor
from transformers.generation.configuration_utils import BaseWatermarkingConfig

from marcog_trl.evaluation.estimates import estimate_pass_at_k, which_k
from marcog_trl.files import write_json
from marcog_trl.parsing.extract import syntax_error
from marcog_trl.problems import check_problems
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.ranges import COUNT, check_number


GREEDY = None  # in place of a sample's number
Play = tuple[int, int | None]
"""Index of a problem, and number of the sample, or [`GREEDY`]."""
Record = dict[str, Any]


def evaluate_team(
    trainer: MultiAgentTrainer,
    problems: Dataset,
    num_samples: int = 10,
    batch_size: int = 128,
    seed: int = 0,
    k: Sequence[int] | None = None,
    sampling: str = "keyed",
    output: str | Path | None = None,
    description: Mapping[str, Any] | None = None,
    overwrite_output: bool = False,
) -> dict[str, float]:
    """
    Measures the trainer's team: `num_samples` episodes per problem at the trainer's temperature, and a greedy one.

    With several processes all of them call it, share the problems, and get the same figures. Latents are their means.

    Args:
        trainer ([`MultiAgentTrainer`]): Holds the team.
        problems (`Dataset` of P rows): Problems with tests.
        num_samples (`int`, *optional*, defaults to `10`): n, sampled episodes per problem.
        batch_size (`int`, *optional*, defaults to `128`): Episodes per process that are played at once; at least those of
            one problem are.
        seed (`int`, *optional*, defaults to `0`): Seed of the sampling; the random state is restored afterwards.
        k (`Sequence[int]`, *optional*): Which pass@k. By default those of 1, 5 and 10 that `num_samples` allows.
        sampling (`str`, *optional*, defaults to `"keyed"`): `"keyed"`: every reply draws from random numbers of its own, which
            depend on the seed, the problem's `task_id`, the sample, the agent and the turn, so that neither the number of
            processes nor where an evaluation was resumed changes them, nor, rounding aside, `batch_size`. `"stream"`: replies draw from the process's random
            stream in the order in which they are made, as in training; needed with vLLM and continuous batching.
        output (`str`, *optional*): A `.json` file for settings and figures. Problems with their code and verdicts are written
            beside it, as `.jsonl`. Both appear at the end; until then, problems that are done lie in `.jsonl.partial`, from
            which the same call goes on.
        description (`Mapping`, *optional*): What the settings in `output` should say besides, such as which team it is.
        overwrite_output (`bool`, *optional*, defaults to `False`): Whether an evaluation with other settings in `output`, done
            or begun, is replaced.

    Returns:
        `dict[str, float]`: Of the sampled episodes `pass@k`, `solved` (share that passes all tests), `tests_passed` (share),
        `parses` (share whose replies are valid Python), `reward` (reward units), `rewards/...` and what reward
        functions log with `log_metric` (`logged/...` where the name is one of these figures), `turns`, `samples` (number); `solved_greedy`; `tokens_per_problem` (generated, the greedy episode aside),
        `agents/.../tokens` and `agents/.../truncated` (length of a reply, and share that did not end by itself);
        `seconds_per_problem`, and, of these, `waiting_per_problem` (for verdicts and rewards, while nothing was generated);
        `problems` and `infrastructure` (numbers of problems, and of verdicts that the executor failed to give). Where there
        are several problems, `..._interval` is half the width of a 95 % interval, problems being the independent units.

    Raises:
        ValueError: Before any work starts, if there are no problems, one has no tests or tests that cannot be run, an
            argument is out of range, `output` or its `.jsonl` holds something else than an evaluation, or one with other settings
            (unless `overwrite_output`), or is being written.

    Source: pass@k of Chen et al. 2021 (https://huggingface.co/papers/2107.03374).
    """
    if not isinstance(trainer, MultiAgentTrainer):
        raise TypeError(
            f"trainer={trainer!r:.80} is not a trainer of a team. Pass one, such as Team.from_pretrained(path).trainer."
        )
    check_arguments(num_samples, batch_size, k, sampling, output)
    _check_sampling(trainer, sampling)
    ks = which_k(k, num_samples)
    rows = _check_problems(trainer, problems)
    accelerator = trainer.accelerator
    is_main, world, rank = accelerator.is_main_process, accelerator.num_processes, accelerator.process_index
    journal = None
    if output is not None and is_main:
        settings = _settings(trainer, rows, num_samples, seed, sampling, description or {})
        journal = _Journal(Path(output), settings, overwrite_output)
    with journal or nullcontext():
        records = {} if output is None else _from_main(journal)
        player = _Player(trainer, rows, num_samples, batch_size, seed, sampling == "keyed")
        # A block is played whole, also where a resumed evaluation lacks a part of it
        blocks = [block for block in player.blocks if not records.keys() >= set(block)]
        progress = tqdm(
            total=len(rows),
            initial=len(records),
            desc="Evaluating",
            unit="problem",
            disable=trainer.args.disable_tqdm or not is_main,
        )
        began = time.perf_counter()

        def note(finish: Callable[[], list[Record]]) -> None:
            """Waits for the verdicts of a round, and keeps what is new."""
            nonlocal began
            waited = time.perf_counter()
            own = finish()
            ended = time.perf_counter()
            parts = [(own, ended - began, ended - waited)]
            began = ended
            if world > 1:
                parts = gather_object(parts)
            new = [record for own, _, _ in parts for record in own if record["index"] not in records]
            for record in new:
                record["seconds"] = max(seconds for _, seconds, _ in parts) / len(new)
                record["waiting_seconds"] = max(seconds for _, _, seconds in parts) / len(new)
                records[record["index"]] = record
            if journal is not None:
                journal.add(new)
            progress.update(len(new))

        with progress, _measuring(trainer, seed + rank):
            # While one round is executed, the next one is generated
            finish: Callable[[], list[Record]] | None = None
            for start in range(0, len(blocks), world):
                begun = player.begin(blocks[start : start + world], rank)
                if finish is not None:
                    note(finish)
                finish = begun
            if finish is not None:
                note(finish)
        figures = summarize([records[i] for i in range(len(rows))], ks)
        if journal is not None:
            journal.finish(figures)
    accelerator.wait_for_everyone()
    return figures


# What is checked before any work starts


def _check_problems(trainer: MultiAgentTrainer, problems: Dataset) -> list[dict[str, Any]]:
    if len(problems) == 0:
        raise ValueError("problems is empty; a dataset with at least one problem works")
    for column in ("prompt", "test", "test_format"):
        if column not in problems.column_names:
            raise ValueError(
                f"problems has no column {column!r} but {problems.column_names}; the rows of load_problems work"
            )
    # What the trainer asks of problems, which may not be those that it was made with
    check_dataset("problems", problems, trainer.workflow, trainer._scorer.reward_funcs)
    rows = [dict(row) for row in problems]
    check_problems("problems", rows, {"test": "an evaluation", "test_format": "an evaluation"})
    return rows


def check_arguments(
    num_samples: int, batch_size: int, k: Sequence[int] | None, sampling: str, output: str | Path | None
) -> None:
    """
    Checks what [`evaluate_team`] is called with, without a team.

    Raises:
        ValueError: If a number is out of range, `sampling` is unknown, or `output` cannot be a JSON file.
    """
    check_number("num_samples", num_samples, COUNT, whole=True, default=10)
    check_number("batch_size", batch_size, COUNT, whole=True, default=128)
    ks = which_k(k, num_samples)
    for size in ks:
        if not 1 <= size <= num_samples:
            instead = f"num_samples={size}, or k={[num_samples]}" if size > 0 else "k=[1]"
            raise ValueError(f"k={ks} has {size}, which is not in 1 to num_samples={num_samples}. Set {instead}.")
    if sampling not in ("keyed", "stream"):
        raise ValueError(f"sampling={sampling!r} is unknown. Use 'keyed' or 'stream'.")
    if output is not None and Path(output).suffix != ".json":
        raise ValueError(f"output={str(output)!r} must end in .json. Set output='evaluation.json', for example.")
    for folder in Path(output).parents if output is not None else ():
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output={str(output)!r} lies in {str(folder)!r}, which is a file. Choose a folder.")


def _check_sampling(trainer: MultiAgentTrainer, sampling: str) -> None:
    """Refuses keyed samples of a generation whose random numbers cannot be set."""
    for name, other in (
        ("use_vllm", trainer.use_vllm),
        ("use_transformers_continuous_batching", trainer.use_transformers_continuous_batching),
    ):
        if sampling == "keyed" and other:
            raise ValueError(f"sampling='keyed' does not support {name}=True. Set sampling='stream'.")


def _settings(
    trainer: MultiAgentTrainer,
    rows: list[dict[str, Any]],
    num_samples: int,
    seed: int,
    sampling: str,
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """All that the figures depend on, apart from rounding."""
    args, weights = trainer.args, hashlib.sha256()
    assert args.max_completion_length is not None
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            weights.update(name.encode())
            weights.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    settings = {
        **description,
        "num_samples": num_samples,
        "seed": seed,
        "sampling": sampling,
        "problems": {"number": len(rows), "sha256": hashlib.sha256(repr(rows).encode()).hexdigest()},
        "most_tokens_per_solution": args.max_completion_length * len(trainer.workflow.slots),
        "weights": {"sha256": weights.hexdigest()},
        "execution": {"timeout": args.execution_timeout, "memory_mb": args.execution_memory_mb},
        **trainer.team_description(),
    }
    return json.loads(json.dumps(settings))


# What is kept on disk

_FIGURES = {"figures", "settings"}
_RECORD = {"index", "greedy", "samples", "seconds", "waiting_seconds"}


class _Journal:
    """
    The problems that are done, line by line, and at the end the results. Held by the main process.

    Args:
        output (`Path`): Where the figures go at the end.
        settings (`dict`): What a journal must agree in to be continued.
        overwrite (`bool`): Whether an evaluation with other settings is replaced.
    """

    def __init__(self, output: Path, settings: dict[str, Any], overwrite: bool):
        self.output = output
        self.problems = output.with_suffix(".jsonl")
        self.partial = output.with_suffix(".jsonl.partial")
        self.settings = settings
        self.overwrite = overwrite
        self._records: dict[int, Record] = {}
        self._lock: IO | None = None  # the partial file, locked for as long as it is open

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def resume(self) -> dict[int, Record]:
        """What an evaluation that was stopped has left; a line that it had not finished is dropped."""
        self._check_files()
        if self.output.is_file():
            self._same_settings(self.output, json.loads(self.output.read_text())["settings"])
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.partial.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output={str(self.output)!r} is being written by another evaluation; its end, or "
                f"{str(self.output.with_stem(self.output.stem + '2'))!r}, works"
            ) from None
        whole, newline, _ = self.partial.read_bytes().rpartition(b"\n")
        whole += newline
        lines = [_read_line(self.partial, i, line) for i, line in enumerate(whole.splitlines())]
        if lines and not self._same_settings(self.partial, lines[0]):
            whole, lines = b"", []
        if whole:
            os.truncate(self.partial, len(whole))
        else:
            self.partial.write_text(json.dumps(self.settings) + "\n")
        self._records = {record["index"]: record for record in lines[1:]}
        return dict(self._records)

    def _same_settings(self, path: Path, theirs: dict[str, Any]) -> bool:
        """Whether an evaluation on disk is this one; another one is refused, unless it may be replaced."""
        different = [name for name in self.settings | theirs if theirs.get(name) != self.settings.get(name)]
        if different and not self.overwrite:
            name = different[0]
            raise ValueError(
                f"{str(path)!r} is an evaluation with {name}={theirs.get(name)!r:.200}, and this one has "
                f"{name}={self.settings.get(name)!r:.200}. Set another output, or overwrite_output=True (--overwrite_output "
                "true) to replace it."
            )
        return not different

    def _check_files(self) -> None:
        """Refuses to replace what no evaluation wrote."""
        for path, parts in ((self.output, _FIGURES), (self.problems, _RECORD)):
            if path.is_dir():
                raise ValueError(f"output={str(self.output)!r}: {str(path)!r} is a folder; another name works")
            if path.exists() and not _is_ours(path, parts):
                raise ValueError(
                    f"output={str(self.output)!r} would replace {str(path)!r}, which no evaluation wrote; "
                    f"{str(self.output.with_stem(f'{self.output.stem}_evaluation'))!r} works"
                )

    def add(self, records: list[Record]) -> None:
        with self.partial.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        self._records |= {record["index"]: record for record in records}

    def finish(self, figures: Mapping[str, float]) -> None:
        """Problems in order, and figures; each file appears whole."""
        lines = [json.dumps(self._records[i]) + "\n" for i in sorted(self._records)]
        finished = self.problems.with_suffix(".jsonl.finished")
        finished.write_text("".join(lines))
        os.replace(finished, self.problems)
        write_json(self.output, {"figures": dict(figures), "settings": self.settings})
        self.partial.unlink()


def _is_ours(path: Path, keys: set[str]) -> bool:
    """Whether an evaluation wrote a file: its content, or the first of its lines, has the keys of one."""
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.readline() if path.suffix == ".jsonl" else file.read())
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() >= keys


def _read_line(path: Path, i: int, line: bytes) -> dict[str, Any]:
    """A line of a partial evaluation: settings first, then problems."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or (i and not found.keys() >= _RECORD):
        raise ValueError(
            f"{str(path)!r} has a line {i + 1} that no evaluation wrote, {line.decode(errors='replace')!r:.60}; another "
            "output works, or deleting that file"
        )
    return found


def _from_main(journal: _Journal | None) -> dict[int, Record]:
    """What the main process's journal holds, in all processes; so is its error."""
    found: list[Any] = [None]
    if journal is not None:
        try:
            found = [journal.resume()]
        except (ValueError, OSError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


# Playing


@contextmanager
def _measuring(trainer: MultiAgentTrainer, seed: int) -> Iterator[None]:
    """Evaluation mode, and a random state of which nothing stays."""
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            trainer.model.train(was_training)


class _Player:
    """
    Plays blocks of problems: all samples of a problem, and its greedy episode, in the same block.

    Args:
        trainer (`MultiAgentTrainer`): Holds the team.
        rows (`list[dict]` of length P): The problems.
        num_samples (`int`): Sampled episodes per problem.
        batch_size (`int`): Episodes that are played at once.
        seed (`int`): Seed of keyed sampling.
        keyed (`bool`): Whether sampling is.

    Attributes:
        blocks (`list[list[int]]`): Indices of the problems, whatever the number of processes.
    """

    def __init__(
        self,
        trainer: MultiAgentTrainer,
        rows: list[dict[str, Any]],
        num_samples: int,
        batch_size: int,
        seed: int,
        keyed: bool,
    ):
        self.trainer = trainer
        self.rows = rows
        self.num_samples = num_samples
        self.seed = seed
        self.keyed = keyed
        # Keyed, greedy episodes are generated together with samples; otherwise they have batches of their own
        size = max(1, batch_size // (num_samples + keyed))
        if keyed:
            size = math.ceil(len(rows) / math.ceil(len(rows) / size))
        indices = list(range(len(rows)))
        self.blocks = [indices[start : start + size] for start in range(0, len(rows), size)]

    def begin(self, blocks: list[list[int]], rank: int) -> Callable[[], list[Record]]:
        """
        Generates this process's block of at most as many as there are processes; what it returns waits for the verdicts.

        Generation and scoring are collective operations: a process without a block plays another one's once more, and a
        smaller block is filled up. Keyed, blocks are equally large with any number of processes, so that rounding is, too.
        """
        block = blocks[rank] if rank < len(blocks) else []
        width = max(map(len, self.blocks if self.keyed else blocks))
        filled = [*block, *[blocks[0][0]] * (width - len(block))]
        if self.keyed:
            plays = [(i, sample) for i in filled for sample in (GREEDY, *range(self.num_samples))]
            with _keyed(self.trainer, [self._key(play) for play in plays]):
                # Rewards see greedy episodes and samples apart, so that what they log of a call is of one kind
                groups = [
                    [i for i, (_, sample) in enumerate(plays) if (sample is GREEDY) == kind] for kind in (False, True)
                ]
                parts = [self._begin(plays, len(block) * (1 + self.num_samples), groups)]
        else:
            plays = [(i, sample) for i in filled for sample in range(self.num_samples)]
            parts = [self._begin(plays, len(block) * self.num_samples)]
            with self.trainer.greedy():
                parts.append(self._begin([(i, GREEDY) for i in filled], len(block)))

        def finish() -> list[Record]:
            episodes = {play: record for part in parts for play, record in part()}
            return [
                {
                    "index": i,
                    "task_id": self.rows[i].get("task_id", i),
                    "greedy": episodes[i, GREEDY],
                    "samples": [episodes[i, sample] for sample in range(self.num_samples)],
                }
                for i in block
            ]

        return finish

    def _key(self, play: Play) -> str | None:
        i, sample = play
        return None if sample is GREEDY else repr((self.seed, self.rows[i].get("task_id", i), sample))

    def _begin(
        self, plays: list[Play], count: int, groups: list[list[int]] | None = None
    ) -> Callable[[], list[tuple[Play, Record]]]:
        """Generates episodes; what it returns waits for the verdicts, and describes the first `count`."""
        finish = self.trainer.begin_episodes([self.rows[i] for i, _ in plays], groups)

        def describe() -> list[tuple[Play, Record]]:
            episodes = finish()
            return [(plays[e], _describe(self.trainer, episodes[e])) for e in range(count)]

        return describe


@contextmanager
def _keyed(trainer: MultiAgentTrainer, keys: list[str | None]) -> Iterator[None]:
    """Lets every reply draw from random numbers of its own: those of its episode's key; `None` takes the likeliest token."""
    speak, config = trainer._generate_rows, trainer.generation_config

    def speak_keyed(rows: list[Row]):
        draws = np.zeros((max(1, len(rows)), config.max_new_tokens))
        for draw, row in zip(draws, rows, strict=False):  # a process without rows generates one that nobody reads
            key = keys[row.episode]
            seed = hashlib.sha256(repr((key, row.slot.agent, row.slot.turn, row.slot.act)).encode()).digest()
            draw[:] = math.nan if key is None else np.random.default_rng(list(seed)).random(draw.shape)
        trainer.generation_config = copy.deepcopy(config)
        trainer.generation_config.watermarking_config = _Draws(torch.from_numpy(draws))
        return speak(rows)

    trainer._generate_rows = speak_keyed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer._generate_rows
        trainer.generation_config = config


class _Draws(BaseWatermarkingConfig):
    """
    What every row draws with, `(R, T)`. Watermarks are the one thing that transformers lets act on the final distribution,
    after temperature and top-p.
    """

    def __init__(self, draws: torch.Tensor):
        self.draws = draws

    def validate(self) -> None:
        pass

    def construct_processor(self, vocab_size: int, device: Any = None) -> LogitsProcessor:
        return _Draw(self.draws.to(device))


class _Draw(LogitsProcessor):
    """Leaves one token: that at which the cumulative distribution passes the row's number, or the likeliest one."""

    def __init__(self, draws: torch.Tensor):
        self.draws = draws
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.size(1)
        draw = self.draws[:, input_ids.size(1) - self.prompt_length, None]
        cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
        token = torch.where(draw.isnan(), scores.argmax(-1, keepdim=True), drawn)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)


# What came of it


def _describe(trainer: MultiAgentTrainer, episode: Episode) -> Record:
    """One episode as the journal has it."""
    turn = episode.turns[-1]
    assert turn.tested is not None and turn.score is not None
    job, verdict = turn.tested
    agents: dict[str, dict[str, int]] = {}
    for row in episode.rows:
        spoken = agents.setdefault(row.slot.agent, {"replies": 0, "tokens": 0, "truncated": 0})
        spoken["replies"] += 1
        spoken["tokens"] += len(row.completion_ids)
        spoken["truncated"] += not set(row.completion_ids[-1:]) & set(trainer.eos_token_ids)
    components = {
        f"rewards/{name}": value
        for name, value in zip(trainer.reward_func_names, turn.score.values, strict=True)
        if not math.isnan(value)
    }
    return {
        "status": verdict.status,
        "tests_passed": verdict.passed,
        "tests": verdict.total,
        "message": verdict.message,
        "failed_tests": [t for t, result in enumerate(verdict.tests) if result.status != "passed"],
        "execution_seconds": verdict.seconds,
        "code": job.code,
        "replies": dict(turn.replies),
        "parses": bool(job.code) and all(syntax_error(reply) is None for reply in turn.replies.values()),
        "reward": None if turn.rewards is None else sum(turn.rewards.values()) / len(turn.rewards),
        "components": {**turn.score.metrics, **components},
        "turns": len(episode.turns),
        "agents": agents,
    }


def summarize(records: Sequence[Record], k: Sequence[int]) -> dict[str, float]:
    """
    Figures of an evaluation.

    Args:
        records (`Sequence[dict]` of length P): The lines of the evaluation's `.jsonl`, one per problem.
        k (`Sequence[int]`): Which pass@k.

    Returns:
        `dict[str, float]`: See [`evaluate_team`].

    Raises:
        ValueError: If a problem has fewer samples than `max(k)`.
    """
    sampled = [episode for record in records for episode in record["samples"]]
    greedy = [record["greedy"] for record in records]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def solved(episodes: Sequence[Record]) -> list[float]:
        return [float(episode["status"] == "passed") for episode in episodes]

    correct = [(len(record["samples"]), int(sum(solved(record["samples"])))) for record in records]
    by_problem = {
        "solved": [c / n for n, c in correct],
        "solved_greedy": solved(greedy),
        **{f"pass@{size}": [estimate_pass_at_k(n, c, size) for n, c in correct] for size in k},
    }
    figures: dict[str, float] = {}
    for name, values in by_problem.items():
        figures[name] = mean(values)
        if len(values) > 1:
            figures[f"{name}_interval"] = _half_interval(values)
    rewards = [episode["reward"] for episode in sampled if episode["reward"] is not None]
    figures |= {
        "reward": mean(rewards) if rewards else 0.0,
        "tests_passed": mean([episode["tests_passed"] / episode["tests"] for episode in sampled]),
        "parses": mean([float(episode["parses"]) for episode in sampled]),
        "turns": mean([episode["turns"] for episode in sampled]),
        "samples": len(sampled),
        "problems": len(records),
    }
    tokens = [spoken["tokens"] for episode in sampled for spoken in episode["agents"].values()]
    figures["tokens_per_problem"] = sum(tokens) / len(records)
    for agent in dict.fromkeys(agent for episode in sampled for agent in episode["agents"]):
        spoken = [episode["agents"][agent] for episode in sampled if agent in episode["agents"]]
        for name in ("tokens", "truncated"):
            figures[f"agents/{agent}/{name}"] = sum(s[name] for s in spoken) / sum(s["replies"] for s in spoken)
    figures |= {
        "seconds_per_problem": mean([record["seconds"] for record in records]),
        "waiting_per_problem": mean([record["waiting_seconds"] for record in records]),
        "infrastructure": sum(episode["status"] == "infrastructure" for episode in [*sampled, *greedy]),
    }
    for name in dict.fromkeys(name for episode in sampled for name in episode["components"]):
        values = [episode["components"][name] for episode in sampled if name in episode["components"]]
        # What a reward function logs never replaces a figure of the evaluation
        figures[f"logged/{name}" if name in figures else name] = mean(values)
    return figures


def _half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean of independent values (normal approximation)."""
    n, mean = len(values), sum(values) / len(values)
    return 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
