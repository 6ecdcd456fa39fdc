"""Numbers that say more than a float: what a reward function returns where it cannot score, and what it logs."""

from __future__ import annotations

from collections.abc import Sequence


class InfrastructureFailure(float):
    """
    What a reward function returns for an episode that it could not score through no fault of the solution: the executor
    failed, a judge did not answer. Trainers of this package leave the episode out, whatever other rewards say. It is NaN,
    so that TRL's own trainers treat it as they treat `None`: the reward does not apply.

    Args:
        reason (`str`, *optional*, defaults to `""`): What failed, for the warning.
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
    A mean over episodes, for `log_metric`, that keeps what it is the mean of, so that an evaluation can tell it problem by
    problem. Elsewhere it is a number like any other.

    Args:
        values (`Sequence[float | None]` of length E): One value per episode; `None` where there is none. At least one is
            a number.
    """

    values: tuple[float | None, ...]

    def __new__(cls, values: Sequence[float | None]) -> EpisodeMean:
        known = [value for value in values if value is not None]
        mean = super().__new__(cls, sum(known) / len(known))
        mean.values = tuple(values)
        return mean
