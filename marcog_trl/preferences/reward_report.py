"""How good a reward model is: on pairs that it was not trained on, and against the reward that it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset

from marcog_trl.evaluation.estimates import share_interval
from marcog_trl.preferences.reward_model import TeamRewardModel
from marcog_trl.preferences.transcript import transcript_of


_GROUPS = 3  # of pairs, by their gap
_BINS = 5  # of the calibration


def reward_model_report(model: TeamRewardModel, pairs: Dataset) -> dict[str, Any]:
    """
    Measures a reward model on pairs of problems that it was not trained on.

    Intervals treat pairs as independent. Pairs of one problem are not, so that with few problems they are too narrow.

    Args:
        model ([`TeamRewardModel`]): The reward model.
        pairs ([`~datasets.Dataset`]): Held-out pairs, as `collect_preferences` returns them.

    Returns:
        `dict[str, Any]`:

        - `pairs`, `problems`: how many there are;
        - `accuracy`: share of pairs whose better side has the higher score, ties counting one half, with its Wilson
          `accuracy_interval` at 95 %;
        - `accuracy_by_gap`: the same for up to three groups of about equal size, from the smallest gap to the largest;
        - `calibration`: what the model claims, `predicted` = σ(|margin|), beside what is `observed`, in up to five bins, and
          `calibration_error`, their mean distance weighted by pairs;
        - `spearman`: rank correlation of score and reward over a problem's episodes, averaged over problems with at least
          three episodes and two different rewards; NaN without any;
        - `recovery`: how much of the best episode's lead over the mean episode the model's favourite has, averaged over
          problems: 1 is as good as choosing by reward, 0 as good as chance.

    Raises:
        ValueError: If there are no pairs.
    """
    if len(pairs) == 0:
        raise ValueError("the report of a reward model needs held-out pairs. Collect pairs on more problems.")
    transcripts: dict[tuple[int, ...], int] = {}
    rows = []
    for pair in pairs:
        places = [
            transcripts.setdefault(tuple(transcript_of(model.tokenizer, pair, side)), len(transcripts))
            for side in ("chosen", "rejected")
        ]
        node = json.dumps([pair["task_id"], [reply["completion_ids"] for reply in pair["history"]]])
        rows.append((pair["task_id"], node, *places, pair["chosen_score"], pair["rejected_score"]))
    scores = np.array(model.score([list(ids) for ids in transcripts]))
    table = pd.DataFrame(rows, columns=["task", "node", "chosen", "rejected", "chosen_gold", "rejected_gold"])
    margins = scores[table["chosen"]] - scores[table["rejected"]]
    report = {"pairs": len(table), "problems": int(table["task"].nunique())}
    report |= pair_figures(margins, (table["chosen_gold"] - table["rejected_gold"]).to_numpy())
    return report | episode_figures(table, scores)


def pair_figures(margins: np.ndarray, gaps: np.ndarray) -> dict[str, Any]:
    """
    The figures of pairs in [`reward_model_report`].

    Args:
        margins (`np.ndarray` of shape `(M,)`): Score of the better side minus that of the other one.
        gaps (`np.ndarray` of shape `(M,)`): The same of the rewards.

    Returns:
        `dict[str, Any]`: `accuracy` and what goes with it, and the calibration.
    """
    right = np.where(margins == 0, 0.5, margins > 0)
    values = pd.Series(gaps).round(9)  # sums of the same rewards may differ in their last digits
    if values.nunique() > _GROUPS:
        values = pd.qcut(values, _GROUPS, labels=False, duplicates="drop")
    groups = [np.flatnonzero(values == value) for value in sorted(values.unique())]
    claims = 1 / (1 + np.exp(-np.abs(margins)))
    place = np.minimum(((claims - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    bins = [np.flatnonzero(place == i) for i in range(_BINS)]
    calibration = [
        {"predicted": float(claims[own].mean()), "observed": float(right[own].mean()), "pairs": len(own)}
        for own in bins
        if len(own)
    ]
    error = sum(one["pairs"] * abs(one["predicted"] - one["observed"]) for one in calibration) / len(margins)
    return {
        **_accuracy(right),
        "accuracy_by_gap": [
            {"gap": [float(gaps[part].min()), float(gaps[part].max())], "pairs": len(part), **_accuracy(right[part])}
            for part in groups
        ],
        "calibration": calibration,
        "calibration_error": error,
    }


def _accuracy(right: np.ndarray) -> dict[str, Any]:
    return {"accuracy": float(right.mean()), "accuracy_interval": list(share_interval(right.tolist()))}


def episode_figures(table: pd.DataFrame, scores: np.ndarray) -> dict[str, float]:
    """
    The figures of whole problems in [`reward_model_report`].

    Args:
        table (`pd.DataFrame`): One row per pair: `node` (the problem and the turns before), `chosen` and `rejected` as places in `scores`, `chosen_gold` and
            `rejected_gold`.
        scores (`np.ndarray` of shape `(E,)`): Scores of the episodes.

    Returns:
        `dict[str, float]`: `spearman` and `recovery`.
    """
    sides = [
        table[["node", side, f"{side}_gold"]].set_axis(["node", "episode", "gold"], axis="columns")
        for side in ("chosen", "rejected")
    ]
    episodes = pd.concat(sides).drop_duplicates(["node", "episode"])
    correlations, recovered = [], []
    for _, own in episodes.groupby("node"):
        proxy, gold = pd.Series(scores[own["episode"]]), own["gold"].reset_index(drop=True)
        if gold.nunique() < 2:
            continue
        recovered.append(recovery(proxy.tolist(), gold.tolist()))
        if len(gold) >= 3:
            # Spearman's is Pearson's of ranks; equal scores say nothing
            correlations.append(0.0 if proxy.nunique() < 2 else proxy.rank().corr(gold.rank()))
    return {"spearman": _mean(correlations), "recovery": _mean(recovered)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def recovery(proxy: Sequence[float], gold: Sequence[float]) -> float:
    """
    How much of the best episode's lead over the mean one the model's favourite has.

    Args:
        proxy (`Sequence[float]` of length G): Scores r̂ of a problem's episodes.
        gold (`Sequence[float]` of length G): Their rewards, not all equal.

    Returns:
        `float`: `(gold[argmax r̂] - mean gold) / (max gold - mean gold)`, at most 1.
    """
    mean = sum(gold) / len(gold)
    return (gold[int(np.argmax(proxy))] - mean) / (max(gold) - mean)


def report_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The figures of a [`reward_model_report`] as a table of text: label, figure, interval."""
    low, high = report["accuracy_interval"]
    rows = [["accuracy on held-out pairs", f"{report['accuracy']:.3f}", f"{low:.3f} to {high:.3f}"]]
    for group in report["accuracy_by_gap"]:
        (small, large), (low, high) = group["gap"], group["accuracy_interval"]
        rows.append([f"  gaps {small:.2f} to {large:.2f}", f"{group['accuracy']:.3f}", f"{low:.3f} to {high:.3f}"])
    labels = {
        "calibration_error": "calibration error",
        "spearman": "rank correlation",
        "recovery": "best-of-G recovered",
    }
    rows += [[label, f"{report[name]:.3f}", ""] for name, label in labels.items()]
    return [*rows, ["held-out pairs, problems", f"{report['pairs']}, {report['problems']}", ""]]
