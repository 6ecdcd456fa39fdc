"""Reward for a team that completes a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.parsing.classes import read_part, skeleton_of
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.verdicts import (
    Completion,
    log_means,
    problems_of,
    reward_or_failure,
    run_tests,
    test_components,
    text_of,
)


TESTS_PASSED = 6.0
OVERLAP = -1.0


@needs_entry_point
@needs_tests
def class_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    verdicts: list[list[tuple[Job, Verdict]]] | None = None,
    turn: list[int] | None = None,
    executor: CodeExecutor | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    Reward of the `classeval` workflow, at most 6.0:

    * + 6 · fraction of the tests that the class passes;
    * − share of the methods to write that more than one agent wrote (stubs do not count).

    Which methods an agent wrote is logged, but earns nothing: a method may be `x = 0`, and only tests tell.

    In trainers of a single agent, the completion holds the class.

    Logs `class_reward/…`: `methods`, `overlap`, `agents/<name>/methods` (shares of the methods), `tests_passed`,
    `tests_total`, `pass_rate`, `solved`, `timeouts`.

    Args:
        prompts, completions, verdicts, turn, executor, log_metric, **columns: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests or entry points, or a problem has no class with methods to write.
    """
    problems = problems_of(prompts, columns, needed=("test", "test_format", "entry_point"))
    solutions = [text_of(completion) for completion in completions]
    methods: list[float | None] = []
    overlap: list[float | None] = []
    by_agent: dict[str, list[float | None]] = {}
    for i, problem in enumerate(problems):
        skeleton = skeleton_of(problem)
        texts = {"": solutions[i]} if replies is None else replies[i]
        authors = dict.fromkeys(skeleton.asked, 0)
        for agent, text in texts.items():
            found = [name for name in skeleton.asked if name in read_part(text, skeleton).methods]
            for name in found:
                authors[name] += 1
            if replies is not None:
                by_agent.setdefault(f"agents/{agent}/methods", [None] * len(problems))[i] = len(found) / len(authors)
        methods.append(sum(count > 0 for count in authors.values()) / len(authors))
        overlap.append(sum(count > 1 for count in authors.values()) / len(authors))

    results = run_tests(problems, solutions, verdicts, executor)
    rewards = []
    for verdict, shared in zip(results, overlap, strict=True):
        assert verdict is not None and shared is not None
        reward = TESTS_PASSED * verdict.passed / verdict.total + OVERLAP * shared
        rewards.append(reward_or_failure(verdict, reward))
    components = {"methods": methods, "overlap": overlap, **by_agent, **test_components(results)}
    log_means(log_metric, "class_reward", components, turn)
    return rewards
