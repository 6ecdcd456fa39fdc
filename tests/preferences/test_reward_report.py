"""The figures of a reward model, against numbers worked by hand."""

import math

import numpy as np
import pairs as made
import pandas as pd
import pytest

from marcog_trl.preferences.reward_report import (
    episode_figures,
    pair_figures,
    recovery,
    report_rows,
    reward_model_report,
)


class TestPairs:
    def test_ties_count_one_half(self):
        figures = pair_figures(np.array([1, -0.2, 0]), np.array([0.1, 0.2, 0.3]))
        assert figures["accuracy"] == 0.5
        assert [group["accuracy"] for group in figures["accuracy_by_gap"]] == [1, 0, 0.5]
        assert [group["gap"] for group in figures["accuracy_by_gap"]] == [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]]

    def test_calibration_compares_claims_with_what_is_observed(self):
        odds = math.log(0.75 / 0.25)
        honest = pair_figures(np.array([odds, odds, odds, -odds]), np.ones(4))
        assert honest["calibration"] == [{"predicted": pytest.approx(0.75), "observed": 0.75, "pairs": 4}]
        assert honest["calibration_error"] == pytest.approx(0)
        boastful = pair_figures(np.array([9.0, -9.0]), np.ones(2))
        assert boastful["calibration_error"] == pytest.approx(0.5, abs=1e-3)
        assert pair_figures(np.array([0.0]), np.ones(1))["calibration"][0]["predicted"] == 0.5


class TestEpisodes:
    def test_recovery(self):
        assert recovery([0.1, 0.9, 0.3], [1, 0.5, 0]) == 0
        assert recovery([0.9, 0.1, 0.3], [1, 0.5, 0]) == 1
        assert recovery([0.1, 0.2, 0.3], [1, 0.5, 0]) == -1

    def test_are_taken_by_problem_and_count_once(self):
        # Problem f: episodes 0, 1, 2 in three pairs, ranked as by gold; g: two episodes, the wrong way round
        table = pd.DataFrame(
            [("f", 0, 1, 1.0, 0.5), ("f", 0, 2, 1.0, 0.0), ("f", 1, 2, 0.5, 0.0), ("g", 3, 4, 1.0, 0.0)],
            columns=["node", "chosen", "rejected", "chosen_gold", "rejected_gold"],
        )
        figures = episode_figures(table, np.array([3.0, 2.0, -9.0, 0.0, 1.0]))
        assert figures == {"spearman": pytest.approx(1), "recovery": pytest.approx((1 - 1) / 2)}
        assert episode_figures(table, np.zeros(5))["spearman"] == 0

    def test_of_two_episodes_have_no_rank_correlation(self):
        table = pd.DataFrame(
            [("g", 0, 1, 1.0, 0.0)], columns=["node", "chosen", "rejected", "chosen_gold", "rejected_gold"]
        )
        assert math.isnan(episode_figures(table, np.array([1.0, 0.0]))["spearman"])


class CountsTokens:
    """Scores a transcript by how often it has the token 40."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def score(self, transcripts):
        return [float(ids.count(40)) for ids in transcripts]


def test_report_of_a_model_that_knows_the_answer(tiny_model):
    from transformers import AutoTokenizer

    pairs = made.dataset(tiny_model, 6, 3)
    report = reward_model_report(CountsTokens(AutoTokenizer.from_pretrained(tiny_model)), pairs)
    assert report["pairs"] == 18 and report["problems"] == 6 and report["accuracy"] > 0.9
    assert sum(group["pairs"] for group in report["accuracy_by_gap"]) == 18
    gaps = [bound for group in report["accuracy_by_gap"] for bound in group["gap"]]
    assert gaps == sorted(gaps)
    assert report["spearman"] > 0.5 and report["recovery"] > 0.5
    rows = report_rows(report)
    assert rows[0][0] == "accuracy on held-out pairs" and rows[-1][1] == "18, 6"
    with pytest.raises(ValueError, match="needs held-out pairs"):
        reward_model_report(None, pairs.select([]))
