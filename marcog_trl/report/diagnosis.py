"""Explains why a run fails: warns once of each way not to learn, with the setting to change. Reads only what was logged."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from marcog_trl.rewards.failures import FAILURES


LOGS = 5  # in a row, before something counts as wrong
CRITIC_LOGS = 20  # a critic learns more slowly
SAME_LATENTS = 0.01  # mean cosine distance, 0 to 2
EXPLAINED = 0.05  # share of the variance of the returns, which noise exceeds now and then
TRUNCATED = 0.5  # share of an agent's replies

Logs = Sequence[Mapping[str, Any]]


class Diagnosis(TrainerCallback):
    """
    Warns when a run does not learn. Every trainer of this package has this callback.

    There is one warning, once per run, for each of: a reward that stays 0, episodes of a problem that all earn the same,
    latents that do not differ, a critic that explains nothing, and replies that hit the length limit. Each says which
    setting to change.

    Attributes:
        found (`dict[str, str]`): The warnings so far, by the name of the check.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def on_log(self, args, state, control, **kwargs):
        logs = [log for log in state.log_history[-3 * CRITIC_LOGS :] if "reward" in log]  # those of training
        for name, check in CHECKS.items():
            if name in self.found:
                continue
            message = check(logs, args)
            if message is not None:
                self.found[name] = message
                if state.is_world_process_zero:
                    warnings.warn(message, stacklevel=2)


def _last(logs: Logs, name: str, number: int = LOGS) -> list[float]:
    """A metric in the last logs; empty unless all of them have it."""
    values = [log.get(name) for log in logs[-number:]]
    return [] if len(values) < number or None in values else values  # type: ignore[return-value]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _since(logs: Logs, number: int = LOGS) -> str:
    return f"in the last {number} logs (steps {logs[-number]['step']} to {logs[-1]['step']})"


# What can be wrong. Each check takes the logs of training so far and the trainer's configuration


def zero_reward(logs: Logs, args: Any) -> str | None:
    rewards = _last(logs, "reward")
    if not rewards or any(rewards):
        return None
    said = f"The reward was 0 {_since(logs)}: nothing is learned."
    shares = {kind: _mean(_last(logs, f"failures/{kind}") or [0.0]) for kind in FAILURES}
    kind = max(shares, key=lambda kind: shares[kind])
    if not shares[kind]:
        return f"{said} Check the reward function on replies (log_completions=True shows some), which are messages if prompts are chats."
    said += f" What fails most: {FAILURES[kind]}, in {shares[kind]:.0%} of the episodes."
    if kind in ("no_code", "syntax", "wrong_name") and truncated_replies(logs, args) is not None:
        return f"{said} Replies are cut off before the code ends: raise max_completion_length (now {args.max_completion_length})."
    advice = {
        "unusable": "This is not the model's fault. See why with marcog_trl.problems.check_problems, and name the packages that the "
        "tests import in the setting packages.",
        "no_code": "Ask for code in the role texts (roles), or use an instruction-tuned model (model_name_or_path).",
        "syntax": f"Lower temperature (now {args.temperature}), or use a model that writes Python (model_name_or_path).",
        "wrong_name": "Name the function to write in the prompts or the role texts (roles), or correct the column "
        "entry_point of the problems.",
        "crash": "See why with log_completions=True. If programs need more memory, raise execution_memory_mb (now "
        f"{args.execution_memory_mb}).",
        "timeout": f"Raise execution_timeout (now {args.execution_timeout}).",
        "tests": "Begin with easier problems (dataset_train_split, curriculum), use a larger model "
        "(model_name_or_path), or pay for parts of a solution (reward=graded_reward).",
    }[kind]
    return f"{said} {advice}"


def equal_siblings(logs: Logs, args: Any) -> str | None:
    zero = _last(logs, "advantages/zero")
    if not zero or min(zero) < 1 or not any(_last(logs, "reward")):
        return None
    return (
        f"All episodes of a problem earned the same {_since(logs)}: nothing is learned, because they are compared with each "
        f"other. Raise temperature (now {args.temperature}) or num_generations (now {args.num_generations}), or choose "
        "problems that the team solves sometimes."
    )


def equal_latents(logs: Logs, args: Any) -> str | None:
    distances = _last(logs, "latent/distance")
    if not distances or max(distances) >= SAME_LATENTS:
        return None
    return (
        f"The latents of the agents did not differ {_since(logs)} (latent/distance {_mean(distances):.2g}): agents with the "
        "same latent behave alike. Give them different role texts (roles), or raise latent_distance_coef (now "
        f"{args.latent_distance_coef:g})."
    )


def useless_critic(logs: Logs, args: Any) -> str | None:
    explained, rewards = (_last(logs, name, CRITIC_LOGS) for name in ("critic/explained_variance", "reward"))
    if not explained or max(explained) >= EXPLAINED or not any(rewards):
        return None
    return (
        f"The critic explained nothing of the returns {_since(logs, CRITIC_LOGS)}: critic/explained_variance was at most "
        f"{max(explained):.2g}, where 1 is perfect and 0 as good as their mean. Raise critic_learning_rate, or "
        "compare episodes with each other: critic_mix='auto' or critic='none'."
    )


def truncated_replies(logs: Logs, args: Any) -> str | None:
    names = (
        [match for name in logs[-1] if (match := re.fullmatch("agents/([^/]+)/clipped_ratio", name))] if logs else []
    )
    means = {match[1]: _mean(values) for match in names if (values := _last(logs, match[0]))}
    worst = max(means, key=lambda agent: means[agent], default=None)
    if worst is None or means[worst] < TRUNCATED:
        return None
    return (
        f"{means[worst]:.0%} of the replies of {worst!r} hit the length limit {_since(logs)}. Raise max_completion_length "
        f"(now {args.max_completion_length}), or ask for short replies in the role texts (roles)."
    )


CHECKS: dict[str, Callable[[Logs, Any], str | None]] = {
    "reward": zero_reward,
    "groups": equal_siblings,
    "latents": equal_latents,
    "critic": useless_critic,
    "length": truncated_replies,
}
