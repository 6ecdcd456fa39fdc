"""Computes the metrics of an evaluation from its records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from marcog_trl.evaluation.estimates import estimate_pass_at_k, share_interval
from marcog_trl.evaluation.journal import ProblemRecord
from marcog_trl.execution import Verdict
from marcog_trl.parsing.extract import syntax_error
from marcog_trl.report.episodes import episode_row
from marcog_trl.rollout.records import Episode


EpisodeRecord = dict[str, Any]
"""The record of one episode, as JSON."""


def describe_episode(episode: Episode, reward_names: Sequence[str], eos_token_ids: Sequence[int]) -> EpisodeRecord:
    """Returns the record of an episode, as written to the journal: its row of a table, and what the figures need."""
    turn = episode.turns[-1]
    assert turn.tested is not None and turn.score is not None
    job, verdict = turn.tested
    agents: dict[str, dict[str, float]] = {}
    longest: dict[int, int] = {}  # stage -> tokens of its longest reply
    for row in episode.rows:
        longest[row.stage] = max(longest.get(row.stage, 0), row.num_tokens)
        spoken = agents.setdefault(row.slot.agent, {"replies": 0, "tokens": 0, "truncated": 0})
        spoken["replies"] += 1
        spoken["tokens"] += row.num_tokens
        if row.completion is None:
            spoken["truncated"] += not set(row.completion_ids[-1:]) & set(eos_token_ids)
            continue
        spoken["truncated"] += row.completion.truncated
        for name, paid in (
            ("prompt_tokens", row.completion.prompt_tokens),
            ("seconds", row.completion.seconds),
            ("requests", 1),
        ):
            spoken[name] = spoken.get(name, 0) + paid * row.completion.sent
    components = {
        f"rewards/{name}": value
        for name, value in zip(reward_names, turn.score.values, strict=True)
        if not math.isnan(value)
    }
    return {
        **episode_row(episode, reward_names, eos_token_ids),
        "failed_tests": [t for t, result in enumerate(verdict.tests) if result.status != "passed"],
        "code": job.code,
        "replies": dict(turn.replies),
        "parses": bool(job.code) and all(syntax_error(reply) is None for reply in turn.replies.values()),
        "components": {**turn.score.metrics, **components},
        "turns": len(episode.turns),
        "agents": agents,
        "tokens": sum(row.num_tokens for row in episode.rows),
        "prompt_tokens": sum(len(row.prompt_ids) for row in episode.rows),
        "critical_path": sum(longest.values()),
        "evaluations": sum(isinstance(found, Verdict) for response in episode.responses for found in response),
    }


def summarize(records: Sequence[ProblemRecord], k: Sequence[int]) -> dict[str, Any]:
    """
    Computes the metrics of an evaluation.

    Args:
        records (`Sequence[dict]` of length P): The lines of the evaluation's `.jsonl` file, one per problem.
        k (`Sequence[int]`): Values of k for pass@k.

    Returns:
        `dict[str, Any]`: See [`evaluate_team`].

    Raises:
        ValueError: If a problem has fewer samples than `max(k)`.
    """
    sampled = [episode for record in records for episode in record["samples"]]
    greedy = [record["greedy"] for record in records]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def solved(episodes: Sequence[EpisodeRecord]) -> list[float]:
        return [float(episode["status"] == "passed") for episode in episodes]

    correct = [(len(record["samples"]), int(sum(solved(record["samples"])))) for record in records]
    by_problem = {
        "solved": [c / n for n, c in correct],
        "solved_greedy": solved(greedy),
        **{f"pass@{size}": [estimate_pass_at_k(n, c, size) for n, c in correct] for size in k},
    }
    figures: dict[str, Any] = {}
    for name, values in by_problem.items():
        figures[name] = mean(values)
        if len(values) > 1:
            samples = len(greedy if name == "solved_greedy" else sampled)
            figures[f"{name}_interval"] = list(share_interval(values, samples))
    rewards = [episode["reward"] for episode in sampled if episode["reward"] is not None]
    figures |= {
        "reward": mean(rewards) if rewards else 0.0,
        "tests_passed": mean([episode["tests_passed"] / episode["tests"] for episode in sampled]),
        "parses": mean([float(episode["parses"]) for episode in sampled]),
        "turns": mean([episode["turns"] for episode in sampled]),
        "samples": len(sampled),
        "problems": len(records),
    }
    tokens = [spoken["tokens"] for episode in sampled for spoken in episode["agents"].values()]
    figures["tokens_per_problem"] = sum(tokens) / len(records)
    for agent in dict.fromkeys(agent for episode in sampled for agent in episode["agents"]):
        spoken = [episode["agents"][agent] for episode in sampled if agent in episode["agents"]]
        for name in ("tokens", "truncated"):
            figures[f"agents/{agent}/{name}"] = sum(s[name] for s in spoken) / sum(s["replies"] for s in spoken)
        for name in ("requests", "prompt_tokens", "seconds"):  # of endpoints
            if name in spoken[0]:
                figures[f"agents/{agent}/{name}_per_problem"] = sum(s[name] for s in spoken) / len(records)
    figures |= {
        "seconds_per_problem": mean([record["seconds"] for record in records]),
        "waiting_per_problem": mean([record["waiting_seconds"] for record in records]),
        "infrastructure": sum(episode["status"] == "infrastructure" for episode in [*sampled, *greedy]),
    }
    for name in dict.fromkeys(name for episode in sampled for name in episode["components"]):
        values = [episode["components"][name] for episode in sampled if name in episode["components"]]
        # A metric logged by a reward function never replaces one of the evaluation's own
        figures[f"logged/{name}" if name in figures else name] = mean(values)
    return figures
