"""Measures a team on problems: pass@k, tests, rewards, tokens and time. An interrupted evaluation can resume."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from trl.trainer.utils import get_callable_name

from marcog_trl.checks import COUNT, check_choice, check_number
from marcog_trl.evaluation.estimates import which_k
from marcog_trl.evaluation.figures import EpisodeRecord, describe_episode, summarize
from marcog_trl.evaluation.journal import Journal, ProblemRecord
from marcog_trl.problems import check_problems, load_problems
from marcog_trl.processes import on_main, this_process
from marcog_trl.rewards import execution_reward
from marcog_trl.rewards.scoring import Scorer, is_over
from marcog_trl.rollout.records import Episode
from marcog_trl.team.data_checks import check_dataset, completed
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.team import Team
from marcog_trl.team.token_sampling import KeyedSampler
from marcog_trl.trainers.reward_functions import named_reward
from marcog_trl.trainers.trainer import MultiAgentTrainer


GREEDY = None  # stands for the greedy episode in place of a sample number
Sample = tuple[int, int | None]
"""Index of the problem, and number of the sample or [`GREEDY`]."""


class Evaluation(dict[str, float]):
    """
    The metrics of an evaluation.

    Attributes:
        records (`list[dict]` of length P): The record of each problem: code, replies and verdict of every episode.
    """

    def __init__(self, metrics: Mapping[str, float], records: list[ProblemRecord]):
        super().__init__(metrics)
        self.records = records


def evaluate_team(
    team: Team | MultiAgentTrainer,
    problems: Dataset | str,
    num_samples: int = 10,
    batch_size: int = 128,
    seed: int = 0,
    k: Sequence[int] | None = None,
    sampling: str = "keyed",
    output: str | Path | None = None,
    description: Mapping[str, Any] | None = None,
    overwrite_output: bool = False,
    reward_funcs: Any = None,
) -> Evaluation:
    """
    Measures a team on problems with tests.

    Plays `num_samples` sampled episodes and one greedy episode per problem. With several processes, call it on all of them:
    they share the problems and return the same metrics. Teams with latents use the means of the latents.

    Args:
        team ([`Team`] or [`MultiAgentTrainer`]): The team, or its trainer.
        problems (`Dataset` of P rows, or `str`): Problems with tests, or the name of a problem set, of which the split `test` is
            measured.
        num_samples (`int`, *optional*, defaults to `10`): n, number of sampled episodes per problem.
        batch_size (`int`, *optional*, defaults to `128`): Number of episodes that a process plays at once. The minimum is
            the episodes of one problem.
        seed (`int`, *optional*, defaults to `0`): Sampling seed. The random state is restored afterwards.
        k (`Sequence[int]`, *optional*): Values of k for pass@k. Defaults to 1, 5 and 10, without those above `num_samples`.
        sampling (`str`, *optional*, defaults to `"keyed"`): `"keyed"` seeds each reply by `seed`, the problem's `task_id`, the
            sample, the agent and the turn. The replies then do not depend on the number of processes, on interruptions or,
            up to rounding, on `batch_size`. `"stream"` draws from the random state of the process, as in training. Use it
            with vLLM and continuous batching.
        output (`str`, *optional*): A `.json` file for settings and metrics. Problems with their code and verdicts go to the
            `.jsonl` file of the same name, and all episodes, with the columns of those of a training, to the `.parquet` file.
            They are written at the end. Until then, finished problems are in
            `.jsonl.partial`; the same call resumes from it.
        description (`Mapping`, *optional*): Further entries for the settings in `output`, such as the name of the team.
        overwrite_output (`bool`, *optional*, defaults to `False`): Whether to replace an evaluation with other settings in
            `output`, finished or not.
        reward_funcs (`str`, `Callable` or `list`, *optional*): Reward functions to measure, or names of built-in ones.
            Defaults to the reward functions of the training.

    Returns:
        [`Evaluation`], a `dict[str, float]`: Metrics of the sampled episodes, unless noted otherwise:

        - `pass@k`; `solved` (share of episodes that pass all tests); `tests_passed` (share of tests); `parses` (share of
          episodes with valid Python); `turns` (mean); `samples` (number of episodes).
        - `solved_greedy`: share of greedy episodes that pass all tests.
        - `reward`, `rewards/...` (reward units), and the metrics that reward functions log with `log_metric`, as
          `logged/...` if the name is already used.
        - `tokens_per_problem`; `agents/.../tokens` (mean length of a reply); `agents/.../truncated` (share of replies cut
          off at the maximum length). For agents behind endpoints also `agents/.../requests_per_problem`,
          `.../prompt_tokens_per_problem` and `.../seconds_per_problem` (of the sampled episodes).
        - `seconds_per_problem`; `waiting_per_problem` (the part of it spent on verdicts and rewards, without generating).
        - `problems` (number); `infrastructure` (number of episodes for which the executor or an endpoint failed).
        - `..._interval` of `solved`, `solved_greedy` and `pass@k`: lower and upper bound of the 95 % confidence interval over
          problems, if there are several (see [`~marcog_trl.evaluation.estimates.share_interval`]).

    Raises:
        ValueError: If there are no problems, a problem has no valid tests, an argument is out of range, or `output` is
            being written, is not an evaluation, or has other settings and `overwrite_output` is false. Raised before any
            work starts.

    Source: pass@k of Chen et al. 2021 (https://huggingface.co/papers/2107.03374).
    """
    if not isinstance(team, Team | MultiAgentTrainer):
        raise TypeError(
            f"team={team!r:.80} is not a team. Pass one, such as Team.from_pretrained(path), or a trainer."
        )
    check_evaluation(num_samples, batch_size, k, sampling, output)
    trainer, team = (team, team.team) if isinstance(team, MultiAgentTrainer) else (None, team)
    if sampling == "keyed" and team.other_generation is not None:
        raise ValueError(f"sampling='keyed' does not support {team.other_generation}=True. Set sampling='stream'.")
    ks = which_k(k, num_samples)
    scorer, names = make_scorer(team, trainer, reward_funcs)
    rows = _check_problems(team, scorer, problems)
    accelerator = this_process()
    world, rank = accelerator.num_processes, accelerator.process_index
    journal = None
    if output is not None and accelerator.is_main_process:
        settings = _settings(team, names, rows, num_samples, seed, sampling, description or {})
        journal = Journal(Path(output), settings, overwrite_output)
    with journal or nullcontext():
        records = on_main(lambda: {} if journal is None else journal.resume())
        player = _SamplePlayer(team, scorer, names, rows, num_samples, batch_size, seed, sampling == "keyed")
        progress = tqdm(
            total=len(rows),
            initial=len(records),
            desc="Evaluating",
            unit="problem",
            disable=not accelerator.is_main_process or (trainer is not None and trainer.args.disable_tqdm),
            miniters=0,  # what the team does is shown while no problem is done
        )

        def tell(activity: str) -> None:
            progress.set_postfix_str(activity, refresh=False)
            # In a file, after 15 seconds without a line
            if sys.stderr.isatty() or time.time() >= progress.last_print_t + 15:
                progress.update(0)

        with progress, team.evaluating(None if progress.disable else tell), torch.random.fork_rng():
            torch.manual_seed(seed + rank)
            for new in _play_missing(player, frozenset(records), world, rank):
                records |= {record["index"]: record for record in new}
                if journal is not None:
                    journal.add(new)
                progress.update(len(new))
        in_order = [records[i] for i in range(len(rows))]
        figures = summarize(in_order, ks)
        if journal is not None:
            journal.finish(figures, in_order)
    accelerator.wait_for_everyone()
    return Evaluation(figures, in_order)


# Checks before any work starts


def make_scorer(team: Team, trainer: MultiAgentTrainer | None, reward_funcs: Any) -> tuple[Scorer, list[str]]:
    """Returns the scorer of the episodes, and the names of its reward functions."""
    if trainer is not None and reward_funcs is None:
        return trainer.scorer, trainer.reward_func_names
    given = _saved_rewards(team.description) if reward_funcs is None else reward_funcs
    given = given if isinstance(given, list) else [given]
    try:
        funcs = [named_reward(func) for func in given]
    except ValueError as error:
        if reward_funcs is not None:
            raise
        raise ValueError(
            f"The team was trained with a reward of its own: {error} Pass the function, reward_funcs=my_reward, or measure "
            "another reward (--reward execution_reward)."
        ) from error
    for func in funcs:
        if not callable(func) or isinstance(func, torch.nn.Module):
            raise ValueError(
                f"reward_funcs has {func!r:.80}, which is not a function. Pass reward_funcs='execution_reward', for example. "
                "To measure a reward model, pass the trainer as team."
            )
    return Scorer(funcs, team.workflow, lambda: team.executor), [get_callable_name(func) for func in funcs]


def _saved_rewards(description: TeamDescription) -> list[str]:
    """The names of the rewards of the training, with the paths of those that are in files beside the team."""
    paths = {file.path.name: file.path for file in description.reward_files}
    names = [(name, paths.get(name.rpartition(":")[0])) for name in description.rewards]
    if not description.trusted and (found := [path for _, path in names if path is not None]):
        raise ValueError(
            f"The team has its reward in {str(found[0])!r}, and to measure it runs this file. Read the file, then set "
            "trust_remote_code=True (--trust_remote_code), or measure another reward (--reward execution_reward)."
        )
    return [name if path is None else str(path.parent / name) for name, path in names]


def _check_problems(team: Team, scorer: Scorer, problems: Dataset | str) -> list[dict[str, Any]]:
    """The problems as rows. Those of a set are loaded, and columns that their tests tell are guessed."""
    if isinstance(problems, str):
        problems = load_problems(problems, "test")
    problems = completed("problems", problems, team.workflow, [*scorer.funcs, execution_reward])
    check_dataset("problems", problems, team.workflow, scorer.funcs, team.settings.packages)
    rows = [dict(row) for row in problems]
    packages = team.settings.packages or ()
    check_problems("problems", rows, {"test": "an evaluation", "test_format": "an evaluation"}, packages)
    return rows


def check_evaluation(
    num_samples: int, batch_size: int, k: Sequence[int] | None, sampling: str, output: str | Path | None
) -> None:
    """
    Checks the arguments of [`evaluate_team`] that do not need the team.

    Raises:
        ValueError: If a number is out of range, `sampling` is unknown, or `output` is not a valid path of a JSON file.
    """
    check_number("num_samples", num_samples, COUNT, whole=True, default=10)
    check_number("batch_size", batch_size, COUNT, whole=True, default=128)
    which_k(k, num_samples)
    check_choice("sampling", sampling, ("keyed", "stream"))
    if output is not None and Path(output).suffix != ".json":
        raise ValueError(f"output={str(output)!r} must end in .json. Set output='evaluation.json', for example.")
    for folder in Path(output).parents if output is not None else ():
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"output={str(output)!r} lies in {str(folder)!r}, which is a file. Choose another folder."
            )


def _settings(
    team: Team,
    reward_names: list[str],
    rows: list[dict[str, Any]],
    num_samples: int,
    seed: int,
    sampling: str,
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the metrics depend on, apart from rounding."""
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
        "rewards": reward_names,
    }
    return json.loads(json.dumps(settings))


# Playing


def play_and_score(
    team: Team,
    scorer: Scorer,
    problems: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Callable[[], list[Episode]]:
    """
    Plays one episode per problem. Returns before the solutions are executed, so that the caller can play more episodes in the
    meantime.

    A collective operation: all processes must pass the same number of problems.

    Args:
        team ([`Team`]): The team that plays.
        scorer ([`Scorer`]): Its rewards.
        problems (`Sequence[Mapping]` of length E): Dataset rows with tests.
        groups (`Sequence[Sequence[int]]`, *optional*): Indices of the episodes to pass to reward functions together. All
            processes need the same number and sizes of groups. Defaults to one group of all episodes.
        **options: Arguments of [`Team.engine_functions`].

    Returns:
        `Callable[[], list[Episode]]`: Waits for the verdicts, scores the episodes, and returns them, with rewards and the
        verdict on the solution of every turn. Call it once, in the same order on all processes.
    """
    groups = [range(len(problems))] if groups is None else groups
    last, threshold = team.workflow.num_turns - 1, team.settings.early_termination_threshold
    # Turns are scored as they are played only if rewards can end episodes
    scored_first = last if threshold is not None else 0

    def score(episodes: list[Episode], turns: Sequence[int], wait: Callable[[], None] | None) -> None:
        for turn, group in itertools.product(turns, groups):
            scorer.score([episodes[e] for e in group], turn, wait)
            wait = None

    def end_turn(episodes: list[Episode], turn: int) -> None:
        if turn < scored_first:
            score(episodes, [turn], scorer.execute(episodes, [turn]))

    ends = None if threshold is None else lambda episode: is_over(episode, threshold)
    episodes = team.play(problems, end_turn, ends, **options)
    turns = range(scored_first, last + 1)
    wait = scorer.execute(episodes, turns)

    def finish() -> list[Episode]:
        score(episodes, turns, wait)
        return episodes

    return finish


def _play_missing(player: _SamplePlayer, done: frozenset[int], world: int, rank: int) -> Iterator[list[ProblemRecord]]:
    """
    Plays the problems that have no record yet, and yields the new records of all processes, round by round.

    In a round, every process plays one block. The tests of a round run while the next round is generated.

    Args:
        player ([`_SamplePlayer`]): Plays the blocks.
        done (`frozenset[int]`): Indices of the problems that have a record.
        world, rank (`int`): Number of processes, and index of this one.
    """
    # Play a block as a whole, even if only some of its problems are missing
    blocks = [block for block in player.blocks if not done >= set(block)]
    began = time.perf_counter()
    finish: Callable[[], list[ProblemRecord]] | None = None
    for start in range(0, len(blocks) + world, world):  # the last round only waits for verdicts
        begun = player.begin(blocks[start : start + world], rank) if start < len(blocks) else None
        if finish is not None:
            waited = time.perf_counter()
            own = finish()
            ended = time.perf_counter()
            parts = [(own, ended - began, ended - waited)]
            began = ended
            if world > 1:
                parts = gather_object(parts)
            new = [record for own, _, _ in parts for record in own if record["index"] not in done]
            for record in new:
                record["seconds"] = max(seconds for _, seconds, _ in parts) / len(new)
                record["waiting_seconds"] = max(seconds for _, _, seconds in parts) / len(new)
            yield new
        finish = begun


@dataclass
class _SamplePlayer:
    """
    Plays problems in blocks. All samples of a problem and its greedy episode are in the same block.

    Args:
        team ([`Team`]): The team.
        scorer ([`Scorer`]): Scores the episodes.
        reward_names (`list[str]`): Names of the reward functions.
        rows (`list[dict]` of length P): The problems.
        num_samples (`int`): Number of sampled episodes per problem.
        batch_size (`int`): Number of episodes played at once.
        seed (`int`): Seed of keyed sampling.
        keyed (`bool`): Whether to use keyed sampling.

    Attributes:
        blocks (`list[list[int]]`): Indices of the problems of each block. They do not depend on the number of processes.
    """

    team: Team
    scorer: Scorer
    reward_names: list[str]
    rows: list[dict[str, Any]]
    num_samples: int
    batch_size: int
    seed: int
    keyed: bool

    def __post_init__(self) -> None:
        # With keyed sampling, greedy episodes share a batch with samples; otherwise they have their own batch
        number, size = len(self.rows), max(1, self.batch_size // (self.num_samples + self.keyed))
        if self.keyed:
            size = math.ceil(number / math.ceil(number / size))
        indices = list(range(number))
        self.blocks = [indices[start : start + size] for start in range(0, number, size)]

    def begin(self, blocks: list[list[int]], rank: int) -> Callable[[], list[ProblemRecord]]:
        """
        Generates this process's block, and returns a function that waits for the verdicts and returns the records.

        Generation and scoring are collective operations. A process without a block therefore repeats a problem of the first
        block, and smaller blocks are padded. With keyed sampling, the block size does not depend on the number of
        processes, so rounding does not either.

        Args:
            blocks (`list[list[int]]`): At most one block per process.
            rank (`int`): Index of this process.
        """
        block = blocks[rank] if rank < len(blocks) else []
        width = max(map(len, self.blocks if self.keyed else blocks))
        filled = [*block, *[blocks[0][0]] * (width - len(block))]
        if self.keyed:
            plays = [(i, sample) for i in filled for sample in (GREEDY, *range(self.num_samples))]
            # Score greedy episodes and samples in separate calls, so the metrics that rewards log do not mix them
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
                    "task_id": self._task_id(i),
                    "greedy": episodes[i, GREEDY],
                    "samples": [episodes[i, sample] for sample in range(self.num_samples)],
                }
                for i in block
            ]

        return finish

    def _key(self, play: Sample) -> str | None:
        i, sample = play
        return None if sample is GREEDY else repr((self.seed, self._task_id(i), sample))

    def _task_id(self, i: int) -> Any:
        found = self.rows[i].get("task_id")
        return i if found in (None, "") else found

    def _begin(
        self,
        plays: list[Sample],
        count: int,
        groups: list[list[int]] | None = None,
        sampler: KeyedSampler | None = None,
    ) -> Callable[[], list[tuple[Sample, EpisodeRecord]]]:
        """Generates episodes. The returned function waits for the verdicts, and returns the first `count` records."""
        finish = play_and_score(self.team, self.scorer, [self.rows[i] for i, _ in plays], groups, sampler=sampler)

        def describe() -> list[tuple[Sample, EpisodeRecord]]:
            episodes = finish()
            return [
                (plays[e], describe_episode(episodes[e], self.reward_names, self.team.eos_token_ids))
                for e in range(count)
            ]

        return describe
