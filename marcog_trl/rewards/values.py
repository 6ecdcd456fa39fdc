"""Floats with extra information, which reward functions return or log."""

from __future__ import annotations

from collections.abc import Sequence


class InfrastructureFailure(float):
    """
    Return value of a reward function that could not score an episode because of the infrastructure: the executor failed,
    or an external service did not answer. The trainers of this package leave the episode out, whatever the other rewards
    are. The value is NaN, which TRL's own trainers treat like `None`: the reward does not apply.

    Args:
        reason (`str`, *optional*, defaults to `""`): Text for the warning.
    """

    reason: str

    def __new__(cls, reason: str = "") -> InfrastructureFailure:
        failure = super().__new__(cls, "nan")
        failure.reason = reason
        return failure

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"


class EpisodeMean(float):
    """
    Mean over episodes, for `log_metric`. It keeps the values of the episodes, so that an evaluation can report them per
    problem.

    Args:
        values (`Sequence[float | None]` of length E): One value per episode, or `None`. At least one must be a number.
    """

    values: tuple[float | None, ...]

    def __new__(cls, values: Sequence[float | None]) -> EpisodeMean:
        known = [value for value in values if value is not None]
        mean = super().__new__(cls, sum(known) / len(known))
        mean.values = tuple(values)
        return mean
