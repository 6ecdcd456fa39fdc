"""Metrics: an estimator, and modules for Hugging Face `evaluate`, one folder each."""

from marcog_trl.metrics.estimates import estimate_pass_at_k


__all__ = ["estimate_pass_at_k"]
