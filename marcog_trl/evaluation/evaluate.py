"""Measures a team on problems: pass@k, tests, rewards, tokens and time, problem by problem, so that it can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from trl.trainer.utils import get_callable_name

from marcog_trl.checks import COUNT, check_number
from marcog_trl.evaluation.estimates import which_k
from marcog_trl.evaluation.figures import EpisodeRecord, describe_episode, summarize
from marcog_trl.evaluation.journal import Journal, ProblemRecord, resume_on_all
from marcog_trl.problems import check_problems
from marcog_trl.processes import this_process
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.keyed_sampling import KeyedSampler
from marcog_trl.team.team import Team
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.scoring import Scorer, ScoringSettings, named_reward


GREEDY = None  # in place of a sample's number
Sample = tuple[int, int | None]
"""Index of a problem, and number of the sample, or [`GREEDY`]."""


def evaluate_team(
    team: Team | MultiAgentTrainer,
    problems: Dataset,
    num_samples: int = 10,
    batch_size: int = 128,
    seed: int = 0,
    k: Sequence[int] | None = None,
    sampling: str = "keyed",
    output: str | Path | None = None,
    description: Mapping[str, Any] | None = None,
    overwrite_output: bool = False,
    reward_funcs: Any = None,
) -> dict[str, float]:
    """
    Measures a team: `num_samples` episodes per problem at the team's temperature, and a greedy one.

    With several processes all of them call it, share the problems, and get the same figures. Latents are their means.

    Args:
        team ([`Team`] or [`MultiAgentTrainer`]): The team, or the trainer that has it.
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
        reward_funcs (`str`, `Callable` or `list`, *optional*): Rewards that are measured, functions or names of this package's. By
            default those of the training.

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
    if not isinstance(team, Team | MultiAgentTrainer):
        raise TypeError(
            f"team={team!r:.80} is not a team. Pass one, such as Team.from_pretrained(path), or a trainer."
        )
    check_arguments(num_samples, batch_size, k, sampling, output)
    trainer, team = (team, team.team) if isinstance(team, MultiAgentTrainer) else (None, team)
    if sampling == "keyed" and team.other_generation is not None:
        raise ValueError(f"sampling='keyed' does not support {team.other_generation}=True. Set sampling='stream'.")
    ks = which_k(k, num_samples)
    scorer, names = _make_scorer(team, trainer, reward_funcs)
    rows = _check_problems(team, scorer, problems)
    accelerator = this_process()
    is_main, world, rank = accelerator.is_main_process, accelerator.num_processes, accelerator.process_index
    journal = None
    if output is not None and is_main:
        settings = _settings(team, rows, num_samples, seed, sampling, description or {})
        journal = Journal(Path(output), settings, overwrite_output)
    with journal or nullcontext():
        records = {} if output is None else resume_on_all(journal)
        player = _SamplePlayer(team, scorer, names, rows, num_samples, batch_size, seed, sampling == "keyed")
        # A block is played whole, also where a resumed evaluation lacks a part of it
        blocks = [block for block in player.blocks if not records.keys() >= set(block)]
        progress = tqdm(
            total=len(rows),
            initial=len(records),
            desc="Evaluating",
            unit="problem",
            disable=not is_main or (trainer is not None and trainer.args.disable_tqdm),
        )
        began = time.perf_counter()

        def note(finish: Callable[[], list[ProblemRecord]]) -> None:
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

        with progress, _measuring(team, seed + rank):
            # While one round is executed, the next one is generated
            finish: Callable[[], list[ProblemRecord]] | None = None
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


def _make_scorer(team: Team, trainer: MultiAgentTrainer | None, reward_funcs: Any) -> tuple[Scorer, list[str]]:
    """What scores the episodes, and the names of its reward functions."""
    if trainer is not None and reward_funcs is None:
        return trainer.scorer, trainer.reward_func_names
    given = team.description.rewards if reward_funcs is None else reward_funcs
    given = given if isinstance(given, list) else [given]
    funcs = [named_reward(func) for func in given]
    for func in funcs:
        if not callable(func) or isinstance(func, torch.nn.Module):
            raise ValueError(
                f"The reward {func!r:.80} is not a function. Pass reward_funcs='execution_reward', for example, or evaluate a trainer, "
                "which calls reward models."
            )
    scorer = Scorer(funcs, team.agents, ScoringSettings(), lambda: team.executor)
    return scorer, [get_callable_name(func) for func in funcs]


def _check_problems(team: Team, scorer: Scorer, problems: Dataset) -> list[dict[str, Any]]:
    if len(problems) == 0:
        raise ValueError("problems is empty; a dataset with at least one problem works")
    for column in ("prompt", "test", "test_format"):
        if column not in problems.column_names:
            raise ValueError(
                f"problems has no column {column!r} but {problems.column_names}; the rows of load_problems work"
            )
    check_dataset("problems", problems, team.workflow, scorer.reward_funcs)
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


def _settings(
    team: Team,
    rows: list[dict[str, Any]],
    num_samples: int,
    seed: int,
    sampling: str,
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """All that the figures depend on, apart from rounding."""
    weights = hashlib.sha256()
    for name, tensor in sorted(team.own_weights().items()):
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    settings = {
        **description,
        "num_samples": num_samples,
        "seed": seed,
        "sampling": sampling,
        "problems": {"number": len(rows), "sha256": hashlib.sha256(repr(rows).encode()).hexdigest()},
        "most_tokens_per_solution": team.settings.max_completion_length * len(team.workflow.slots),
        "weights": {"sha256": weights.hexdigest()},
        "execution": {"timeout": team.settings.execution_timeout, "memory_mb": team.settings.execution_memory_mb},
        **team.description.to_dict(),
    }
    return json.loads(json.dumps(settings))


# Playing


@contextmanager
def _measuring(team: Team, seed: int) -> Iterator[None]:
    """Evaluation mode, and a random state of which nothing stays."""
    with team.evaluating(), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class _SamplePlayer:
    """
    Plays blocks of problems: all samples of a problem, and its greedy episode, in the same block.

    Args:
        team ([`Team`]): The team.
        scorer ([`Scorer`]), reward_names (`list[str]`): What scores the episodes, and the names of its reward functions.
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
        team: Team,
        scorer: Scorer,
        reward_names: list[str],
        rows: list[dict[str, Any]],
        num_samples: int,
        batch_size: int,
        seed: int,
        keyed: bool,
    ):
        self.team = team
        self.scorer = scorer
        self.reward_names = reward_names
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

    def begin(self, blocks: list[list[int]], rank: int) -> Callable[[], list[ProblemRecord]]:
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
            # Rewards see greedy episodes and samples apart, so that what they log of a call is of one kind
            groups = [
                [i for i, (_, sample) in enumerate(plays) if (sample is GREEDY) == kind] for kind in (False, True)
            ]
            sampler = KeyedSampler([self._key(play) for play in plays], self.team.generation_config)
            parts = [self._begin(plays, len(block) * (1 + self.num_samples), groups, sampler)]
        else:
            plays = [(i, sample) for i in filled for sample in range(self.num_samples)]
            parts = [self._begin(plays, len(block) * self.num_samples)]
            with self.team.greedy():
                parts.append(self._begin([(i, GREEDY) for i in filled], len(block)))

        def finish() -> list[ProblemRecord]:
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

    def _key(self, play: Sample) -> str | None:
        i, sample = play
        return None if sample is GREEDY else repr((self.seed, self.rows[i].get("task_id", i), sample))

    def _begin(
        self,
        plays: list[Sample],
        count: int,
        groups: list[list[int]] | None = None,
        sampler: KeyedSampler | None = None,
    ) -> Callable[[], list[tuple[Sample, EpisodeRecord]]]:
        """Generates episodes; what it returns waits for the verdicts, and describes the first `count`."""
        finish = self.scorer.begin(self.team, [self.rows[i] for i, _ in plays], groups, sampler=sampler)

        def describe() -> list[tuple[Sample, EpisodeRecord]]:
            episodes = finish()
            return [
                (plays[e], describe_episode(episodes[e], self.reward_names, self.team.eos_token_ids))
                for e in range(count)
            ]

        return describe
