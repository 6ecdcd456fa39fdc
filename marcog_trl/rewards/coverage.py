"""Reward for what an agent adds to what the others solve."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

from marcog_trl.agents import Prompt
from marcog_trl.checks import check_choice
from marcog_trl.execution import Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards.requirements import needs_hidden_tests, needs_tests
from marcog_trl.rewards.solutions import Completion, Solutions
from marcog_trl.rewards.values import InfrastructureFailure
from marcog_trl.workflows.coverage import Coverage


@needs_hidden_tests
@needs_tests
def coverage_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[Mapping[str, str]] | None = None,
    workflow: Any = None,
    of: Literal["selected", "any"] = "selected",
    all_or_nothing: bool = False,
    **given: Any,
) -> list[Any]:
    """
    Marginal contribution of each agent of the `coverage` workflow, in [-1, 1]: what the team earns, minus what it would earn
    without the agent.

    The team earns the share of the hidden tests that its solution passes. What it would earn without an agent does not depend on
    the agent's reply. So it is a baseline, and the policy gradient is that of what the team earns.

    Logs `coverage_reward/…`: `selected` and `any` (what the team earns by either rule), `mean` (mean over the agents of what
    their programs earn) and `alike` (share of pairs of agents with the same reply).

    Args:
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E): Agent → reply.
        workflow ([`Coverage`]): The workflow, as trainers pass it. It chooses the solution of each part of the team.
        of (`str`, *optional*, defaults to `"selected"`): Program that earns for the team: `"selected"`, the one that the visible
            tests choose, or `"any"`, the best one (pass@k).
        all_or_nothing (`bool`, *optional*, defaults to `False`): Whether a program earns 1 if it passes all hidden tests, else 0.

    Returns:
        `list[dict[str, float]]` of length E: Agent → reward; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the workflow is another one, or a problem has no hidden tests.

    Source: difference rewards (Wolpert and Tumer 2001, https://arxiv.org/abs/cs/9908014).
    """
    check_choice("of", of, ("selected", "any"))
    if not isinstance(workflow, Coverage) or replies is None:
        raise ValueError("coverage_reward compares the programs of several agents. Set workflow='coverage'.")
    solutions = Solutions("coverage_reward", prompts, completions, given)
    jobs = [
        solution_job(problem, reply)
        for problem, own in zip(solutions.problems, replies, strict=True)
        for reply in own.values()
    ]
    found = iter(solutions.run(jobs))  # the workflow has executed them
    rewards: list[Any] = []
    logged: dict[str, list[float | None]] = {name: [] for name in ("selected", "any", "mean", "alike")}
    for own in replies:
        verdicts = {agent: cast(Verdict, next(found)) for agent in own}
        failed = [verdict for verdict in verdicts.values() if verdict.status == "infrastructure"]
        if failed:
            rewards.append(InfrastructureFailure(failed[0].message))
            for values in logged.values():
                values.append(None)
            continue
        earned = {agent: _hidden_share(verdict, workflow, all_or_nothing) for agent, verdict in verdicts.items()}
        part = functools.partial(_earned_by, own, verdicts, earned, workflow)
        others = {agent: [other for other in own if other != agent] for agent in own}
        rewards.append({agent: part(own, of) - part(others[agent], of) for agent in own})
        pairs = list(itertools.combinations(own.values(), 2))
        logged["selected"].append(part(own, "selected"))
        logged["any"].append(part(own, "any"))
        logged["mean"].append(sum(earned.values()) / len(earned))
        logged["alike"].append(sum(one == other for one, other in pairs) / len(pairs))
    solutions.log(logged)
    return rewards


def _earned_by(
    replies: Mapping[str, str],
    verdicts: Mapping[str, Verdict],
    earned: Mapping[str, float],
    workflow: Coverage,
    agents: Collection[str],
    of: str,
) -> float:
    """What a part of the team earns, given what each program earns."""
    if of == "any":
        return max(earned[agent] for agent in agents)
    return earned[workflow.chosen({agent: replies[agent] for agent in agents}, verdicts)]


def _hidden_share(verdict: Verdict, workflow: Coverage, all_or_nothing: bool) -> float:
    """Share of the hidden tests that a program passes, or whether it passes all of them."""
    hidden = verdict.tests[workflow.visible_tests :]
    if not hidden:
        raise ValueError(
            f"coverage_reward needs hidden tests, but visible_tests={workflow.visible_tests} shows all {verdict.total} of a problem. "
            "Set a smaller visible_tests, or add tests."
        )
    passed = sum(result.status == "passed" for result in hidden)
    return float(passed == len(hidden)) if all_or_nothing else passed / len(hidden)
