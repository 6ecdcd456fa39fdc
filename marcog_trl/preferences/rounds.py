"""
Rounds of learning from preferences: collect → further phases, such as a reward model → train → evaluate.

The folder of a run holds `round_00/policy` (the team that it begins with), `round_01/pairs.jsonl`, `round_01/policy`,
`round_01/evaluation.json` and so on, and `rounds.json`, which names the last finished phase. A phase writes to a `.partial` path,
which is renamed when it is whole; then `rounds.json` is replaced. A run that was killed repeats the phase that it was in, and
ends as if it had not been killed. This file knows nothing about losses: training is a function that it is given.
"""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset, concatenate_datasets

from marcog_trl.checks import COUNT, UNIT, Range, check_numbers
from marcog_trl.files import read_json, write_json
from marcog_trl.preferences.pairs import check_collection, read_pairs, write_pairs
from marcog_trl.processes import on_main, this_process


ROUNDS_FILE = "rounds.json"


@dataclass
class RoundsSettings:
    """
    Settings of rounds of pairs.

    Args:
        num_rounds (`int`, *optional*, defaults to `1`): Rounds. One is offline: pairs of the untrained team alone.
        num_candidates, pairing, pairs_per_problem, min_gap, unit: See [`collect_preferences`].
        min_pairs (`int`, *optional*, defaults to `32`): Fewer pairs end the run.
        replay_decay (`float`, *optional*, defaults to `1.0`): λ in [0, 1]. A round also trains on pairs of earlier rounds, which
            are drawn with weights ∝ (1 − λ)^age. With 1 it trains on its own pairs alone, with 0 on all alike.
        replay_pairs (`int`, *optional*): Pairs to draw where there is replay. Defaults to as many as the round has itself.
    """

    rounds_ranges: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("num_rounds", "min_pairs", "replay_pairs"), COUNT),
        "replay_decay": UNIT,
    }

    num_rounds: int = field(default=1, metadata={"help": "Rounds of pairs. One is offline."})
    num_candidates: int = field(default=8, metadata={"help": "Episodes per problem (children of a node of a tree)."})
    pairing: str = field(default="gap", metadata={"help": "'gap', 'best_worst', 'random' or 'all'."})
    pairs_per_problem: int = field(default=4, metadata={"help": "Maximum number of pairs per problem or node."})
    min_gap: float = field(default=0.0, metadata={"help": "Pairs whose returns differ by this or less are left out."})
    unit: str = field(default="auto", metadata={"help": "What is compared: 'episode', 'turn' or 'auto'."})
    min_pairs: int = field(default=32, metadata={"help": "Fewer pairs end the run."})
    replay_decay: float = field(
        default=1.0, metadata={"help": "λ: pairs of earlier rounds are drawn with weights (1 - λ)^age. 1: none."}
    )
    replay_pairs: int | None = field(
        default=None, metadata={"help": "Pairs to draw with replay. Default: as many as the round has."}
    )

    def check_rounds(self) -> None:
        """
        Checks the fields above.

        Raises:
            ValueError: If one is out of range.
        """
        check_numbers(self, self.rounds_ranges)
        check_collection(self.num_candidates, self.pairing, self.pairs_per_problem, self.min_gap, self.unit, 1.0)


@dataclass(frozen=True)
class Round:
    """
    One round, as its phases see it.

    Args:
        number (`int`): From 1.
        folder (`Path`): Folder of the round, which holds what earlier phases wrote under their names.
        initial (`Path`): Saved team that the first round began with.
        policy (`Path`): Saved team that this round begins with.
        pairs (`Dataset`): Pairs to train on, replayed ones included.
    """

    number: int
    folder: Path
    initial: Path
    policy: Path
    pairs: Dataset


Phase = Callable[[Round, Path], None]
"""Writes a file or folder to the given path, on all processes together. The path may hold what a killed run left."""


class Rounds:
    """
    Runs rounds, and continues those that were begun.

    Args:
        folder (`Path`): Folder of the run.
        settings ([`RoundsSettings`]): Settings.
        identity (`Mapping`): What another run in the same folder must agree on, as JSON can hold it.
        start (`Callable`): `start(path)` saves the team that the first round begins with. Called on one process.
        collect (`Callable`): `collect(policy, number)` returns the pairs that the team saved in `policy` plays.
        train (`Phase`): Saves the trained team.
        evaluate (`Callable`, *optional*): `evaluate(policy, path)` measures a saved team, writes the JSON file `path`, and returns
            its metrics; an interrupted call must be able to continue.
        before_training (`Mapping[str, Phase]`, *optional*): Further phases, by the name of what they write, such as
            `"reward_model"`.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: RoundsSettings,
        identity: Mapping[str, Any],
        start: Callable[[Path], None],
        collect: Callable[[Path, int], Dataset],
        train: Phase,
        evaluate: Callable[[Path, Path], dict[str, float]] | None = None,
        before_training: Mapping[str, Phase] | None = None,
    ):
        settings.check_rounds()
        self.folder = Path(folder)
        self.settings = settings
        self.identity = json.loads(json.dumps(dict(identity)))
        self._start = start
        self._collect = collect
        self._evaluation = evaluate
        self._phases: dict[str, Phase] = {**(before_training or {}), "policy": train}

    def run(self) -> list[dict[str, float]]:
        """
        Runs all rounds, on all processes together.

        Returns:
            `list[dict[str, float]]`: Metrics of the team before the first round and after each; without `evaluate`, empty.

        Raises:
            ValueError: If the folder is another run's, or the first round has fewer than `min_pairs` pairs.
        """
        done = on_main(self._read)
        results: list[dict[str, float]] = []
        initial = self._path(0) / "policy"
        if "00/policy" not in done:
            self._whole(initial, lambda partial: on_main(lambda: self._start(partial)), fresh=True)
            self._finish("00/policy", done)
        self._measure(0, done, results)
        for number in range(1, self.settings.num_rounds + 1):
            pairs = self._pairs(number, done)
            if len(pairs) < self.settings.min_pairs:
                why = (
                    f"Round {number} has {len(pairs)} pairs, fewer than min_pairs={self.settings.min_pairs}. Raise num_candidates, "
                    "use more problems or a finer reward, or lower min_pairs."
                )
                if number == 1:
                    raise ValueError(why)
                if this_process().is_main_process:
                    warnings.warn(f"{why} The run ends with the team of round {number - 1}.", stacklevel=2)
                break
            this = Round(number, self._path(number), initial, self.policy(number - 1), pairs)
            for name, phase in self._phases.items():
                key = f"{number:02}/{name}"
                if key not in done:
                    self._whole(self._path(number) / name, functools.partial(phase, this))
                    self._finish(key, done)
            self._measure(number, done, results)
        return results

    def policy(self, number: int) -> Path:
        """Folder of the team after a round."""
        return self._path(number) / "policy"

    def last(self) -> int:
        """Number of the last round that has trained."""
        done = on_main(self._read)
        return max((int(key[:2]) for key in done if key.endswith("/policy")), default=0)

    def _path(self, number: int) -> Path:
        return self.folder / f"round_{number:02}"

    # What is finished

    def _read(self) -> list[str]:
        """The finished phases, such as `01/pairs.jsonl`."""
        file = self.folder / ROUNDS_FILE
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, {"run": self.identity, "finished": []})
        content = read_json(file, "run", "finished")
        theirs = content["run"]
        for key in {**theirs, **self.identity}:
            if theirs.get(key) != self.identity.get(key):
                raise ValueError(
                    f"{str(self.folder)!r} holds rounds of another run: {key} is {theirs.get(key)!r}, but "
                    f"{self.identity.get(key)!r} in this run. Set another output_dir."
                )
        return content["finished"]

    def _finish(self, key: str, done: list[str]) -> None:
        done.append(key)
        on_main(lambda: write_json(self.folder / ROUNDS_FILE, {"run": self.identity, "finished": done}))

    @staticmethod
    def _whole(path: Path, work: Callable[[Path], None], fresh: bool = False) -> None:
        """Lets `work` write to a `.partial` path, and renames it. `fresh`: whether it cannot continue what is there."""
        partial = path.with_name(f"{path.name}.partial")

        def prepare() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh and partial.exists():
                _delete(partial)

        def rename() -> None:
            if path.exists():  # killed before `rounds.json` was replaced
                _delete(path)
            partial.rename(path)

        on_main(prepare)
        work(partial)
        this_process().wait_for_everyone()
        on_main(rename)

    # Pairs

    def _pairs(self, number: int, done: list[str]) -> Dataset:
        """The pairs of a round, which are collected if they are not there yet, with those that are replayed."""
        path, key = self._path(number) / "pairs.jsonl", f"{number:02}/pairs.jsonl"
        earlier = [read_pairs(self._path(n) / "pairs.jsonl") for n in range(1, number)]
        if key not in done:
            pairs = self._collect(self.policy(number - 1), number)
            self._whole(path, lambda partial: on_main(lambda: write_pairs(pairs, partial)), fresh=True)
            self._finish(key, done)
        return replay([*earlier, read_pairs(path)], self.settings.replay_decay, self.settings.replay_pairs, number)

    def _measure(self, number: int, done: list[str], results: list[dict[str, float]]) -> None:
        if self._evaluation is None:
            return
        path, key = self._path(number) / "evaluation.json", f"{number:02}/evaluation.json"
        if key not in done:
            results.append(self._evaluation(self.policy(number), path))
            self._finish(key, done)
        else:
            results.append(on_main(lambda: read_json(path, "figures")["figures"]))


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replay_weights(num_shards: int, decay: float) -> list[float]:
    """
    Shares of the rounds in what a round is trained on.

    Args:
        num_shards (`int`): Number of rounds so far, the oldest first.
        decay (`float`): λ in [0, 1].

    Returns:
        `list[float]`: ∝ (1 − λ)^age, with sum 1.
    """
    weights = [(1 - decay) ** age for age in reversed(range(num_shards))]
    return [weight / math.fsum(weights) for weight in weights]


def replay(shards: Sequence[Dataset], decay: float, total: int | None = None, seed: int = 0) -> Dataset:
    """
    Draws pairs of several rounds, each at most once.

    Args:
        shards (`Sequence[Dataset]`): Pairs of the rounds so far, the oldest first.
        decay (`float`): λ, see [`replay_weights`]. With 1 the result is the last shard.
        total (`int`, *optional*): Pairs to draw. Defaults to as many as the last shard has.
        seed (`int`, *optional*, defaults to `0`): Seed.

    Returns:
        `Dataset`: At most `total` pairs.
    """
    if decay == 1 or len(shards) == 1:
        return shards[-1]
    dice = random.Random(seed)
    weights = replay_weights(len(shards), decay)
    left = [dice.sample(range(len(shard)), len(shard)) for shard in shards]
    drawn: list[list[int]] = [[] for _ in shards]
    for _ in range(len(shards[-1]) if total is None else total):
        open_shards = [i for i, indices in enumerate(left) if indices]
        if not open_shards:
            break
        [i] = dice.choices(open_shards, [weights[i] for i in open_shards])
        drawn[i].append(left[i].pop())
    # A shard without pairs does not know the type of its prompts
    parts = [shard.select(sorted(own)) for shard, own in zip(shards, drawn, strict=True) if own]
    return concatenate_datasets(parts) if parts else shards[-1].select([])
