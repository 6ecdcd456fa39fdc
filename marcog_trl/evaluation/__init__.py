"""Evaluation of teams on problem sets, and pass@k."""

from marcog_trl.evaluation.estimates import estimate_pass_at_k


__all__ = ["estimate_pass_at_k"]
