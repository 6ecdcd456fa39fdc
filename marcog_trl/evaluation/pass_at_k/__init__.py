"""pass@k as a module of Hugging Face `evaluate`."""

from marcog_trl.evaluation.pass_at_k.pass_at_k import PassAtK


__all__ = ["PassAtK"]
