"""Compares evaluations of teams on the same problems: paired differences, and what each team spent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marcog_trl.evaluation.figures import EpisodeRecord
from marcog_trl.evaluation.journal import ProblemRecord
from marcog_trl.workflows.coverage import text_order


RESAMPLES = 10_000
BUDGETS = {  # name in a record -> what a verdict calls it
    "tokens": "tokens",
    "prompt_tokens": "prompt tokens",
    "evaluations": "programs run for the team",
    "critical_path": "critical path",
    "seconds": "seconds",
}
LARGEST_DEVIATION = 0.05  # of budgets that a verdict does not name


@dataclass
class Difference:
    """
    The paired difference of two teams, A minus B.

    Args:
        a, b (`str`): Names of the teams.
        solved, solved_greedy (`float`): Difference of the shares of episodes that pass all tests, sampled and greedy.
        solved_interval, solved_greedy_interval (`tuple[float, float]`): Their 95 % intervals over problems.
        budgets (`dict[str, float]`): What A spent, as a multiple of what B spent, by name in [`BUDGETS`]; without those that B
            did not spend.
        problems (`int`): Number of common problems.
    """

    a: str
    b: str
    solved: float
    solved_interval: tuple[float, float]
    solved_greedy: float
    solved_greedy_interval: tuple[float, float]
    budgets: dict[str, float]
    problems: int

    @property
    def verdict(self) -> str:
        """The difference of sampled episodes in one line, with the budgets that differ."""
        low, high = (100 * bound for bound in self.solved_interval)
        if low > 0 or high < 0:
            sign, word = (1, "more") if low > 0 else (-1, "fewer")
            bounds = sorted((sign * low, sign * high))
            found = f"{self.a} solves {abs(100 * self.solved):.1f} points {word} than {self.b} ({bounds[0]:.1f} to {bounds[1]:.1f})"
        else:
            found = f"no difference between {self.a} and {self.b} ({low:.1f} to {high:.1f} points)"
        others = [
            f"{ratio:.2f} × its {BUDGETS[name]}"
            for name, ratio in self.budgets.items()
            if abs(ratio - 1) > LARGEST_DEVIATION
        ]
        return f"{found}, with {' and '.join(others) or 'equal budgets'}"


def read_evaluation(path: str | Path) -> list[ProblemRecord]:
    """
    Reads the records of a finished evaluation.

    Args:
        path (`str` or `Path`): The `.json` file that [`evaluate_team`] wrote as `output`.

    Raises:
        ValueError: If it is not a finished evaluation.
    """
    lines = Path(path).with_suffix(".jsonl")
    try:
        records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a finished evaluation: {lines.name}: {error}.") from error
    if not records or "critical_path" not in records[0].get("greedy", {}):
        raise ValueError(f"{str(path)!r} is not a finished evaluation. Make one: marcog-trl evaluate --output {path}.")
    return records


def select_samples(record: ProblemRecord, size: int, visible_tests: int) -> ProblemRecord:
    """
    Makes samples of one agent into episodes of a team of `size` that reads one prompt: the visible tests choose, as in the workflow
    `coverage`.

    Args:
        record (`dict`): The record of a problem.
        size (`int`): k, number of samples of which one is chosen. Samples that fill no group of k are left out.
        visible_tests (`int`): Number of tests that choose.

    Returns:
        `dict`: A record with an episode for each k samples. They are written at the same moment, so the critical path is the longest.

    Raises:
        ValueError: If there are fewer than k samples.
    """
    samples = record["samples"]
    if len(samples) < size:
        raise ValueError(
            f"--samples {size} needs as many samples of each problem, but task_id {record['task_id']!r} has {len(samples)}. Evaluate with "
            f"--num_samples {size}, or a multiple of it."
        )
    groups = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    return {**record, "samples": [_chosen(group, visible_tests) for group in groups]}


def _chosen(samples: Sequence[EpisodeRecord], visible_tests: int) -> EpisodeRecord:
    def rank(sample: Any) -> tuple[int, str]:
        return sum(test < visible_tests for test in sample["failed_tests"]), text_order(sample["solution"])

    spent = {name: sum(sample[name] for sample in samples) for name in ("tokens", "prompt_tokens")}
    spent["critical_path"] = max(sample["critical_path"] for sample in samples)
    return {**min(samples, key=rank), **spent, "evaluations": len(samples)}


def compare(a: str, b: str, records: Mapping[str, Sequence[ProblemRecord]], seed: int = 0) -> Difference:
    """
    Compares two teams on the problems that both have played.

    Args:
        a, b (`str`): Names of the teams.
        records (`Mapping[str, Sequence[dict]]`): The records of each team, one per problem.
        seed (`int`, *optional*, defaults to `0`): Seed of the bootstrap.

    Returns:
        [`Difference`].

    Raises:
        ValueError: If they have no common problem.
    """
    by_problem = [{str(record["task_id"]): record for record in records[name]} for name in (a, b)]
    common = [task for task in by_problem[0] if task in by_problem[1]]
    if not common:
        raise ValueError(f"{a} and {b} have no common problem. Compare evaluations of the same problems.")
    ours, theirs = ([found[task] for task in common] for found in by_problem)
    solved = np.array([_solved(x["samples"]) - _solved(y["samples"]) for x, y in zip(ours, theirs, strict=True)])
    greedy = np.array([_solved([x["greedy"]]) - _solved([y["greedy"]]) for x, y in zip(ours, theirs, strict=True)])
    spent, their = budgets(ours), budgets(theirs)
    return Difference(
        a,
        b,
        float(solved.mean()),
        bootstrap_interval(solved, seed),
        float(greedy.mean()),
        bootstrap_interval(greedy, seed),
        {name: spent[name] / their[name] for name in BUDGETS if their[name]},
        len(common),
    )


def _solved(episodes: Sequence[EpisodeRecord]) -> float:
    return sum(episode["status"] == "passed" for episode in episodes) / len(episodes)


def budgets(records: Sequence[ProblemRecord]) -> dict[str, float]:
    """Returns what a team spends on a sampled episode, on average, by name in [`BUDGETS`]."""
    episodes = [episode for record in records for episode in record["samples"]]
    spent = {name: sum(episode[name] for episode in episodes) / len(episodes) for name in BUDGETS if name != "seconds"}
    played = len(episodes) + len(records)  # with the greedy ones
    return spent | {"seconds": sum(record["seconds"] for record in records) / played}


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """
    The 95 % interval of a mean over problems: percentiles of the means of resampled problems.

    Args:
        values (`np.ndarray` of shape `(P,)`): One value per problem.
        seed (`int`, *optional*, defaults to `0`): Seed of the resamples.

    Returns:
        `tuple[float, float]`: Lower and upper bound, in the units of the values.

    Source: Efron 1979 (https://doi.org/10.1214/aos/1176344552).
    """
    count = len(values)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    # The spread of resampled means is too small by this factor
    means = values.mean() + (weights @ values - values.mean()) * np.sqrt(count / max(count - 1, 1))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def as_json(differences: Sequence[Difference], records: Mapping[str, Sequence[ProblemRecord]]) -> dict[str, Any]:
    """Returns what `marcog-trl compare` writes: the budgets of each team, and all differences with their verdicts."""
    return {
        "teams": {name: budgets(own) for name, own in records.items()},
        "differences": [{**asdict(difference), "verdict": difference.verdict} for difference in differences],
    }
