"""Reward for a team that completes a class."""

from __future__ import annotations

from typing import Any

from marcog_trl.agents import Prompt
from marcog_trl.parsing.classes import read_part, skeleton_of
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.solutions import Completion, Components, Solutions, or_failure, test_components


TESTS_PASSED = 6.0
OVERLAP = -1.0


@needs_entry_point
@needs_tests
def class_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    **given: Any,
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
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests or entry points, or a problem has no class with methods to write.
    """
    solutions = Solutions("class_reward", prompts, completions, given, ("test", "entry_point"))
    methods: list[float] = []
    overlap: list[float] = []
    by_agent: Components = {}
    for i, problem in enumerate(solutions.problems):
        skeleton = skeleton_of(problem)
        authors = dict.fromkeys(skeleton.asked, 0)
        for agent, text in ({"": solutions.texts[i]} if replies is None else replies[i]).items():
            found = [name for name in skeleton.asked if name in read_part(text, skeleton).methods]
            for name in found:
                authors[name] += 1
            if replies is not None:
                by_agent.setdefault(f"agents/{agent}/methods", [None] * len(prompts))[i] = len(found) / len(authors)
        methods.append(sum(count > 0 for count in authors.values()) / len(authors))
        overlap.append(sum(count > 1 for count in authors.values()) / len(authors))
    results = solutions.test()
    solutions.log({"methods": methods, "overlap": overlap, **by_agent, **test_components(results)})
    return [
        or_failure(verdict, TESTS_PASSED * verdict.passed / verdict.total + OVERLAP * shared)
        for verdict, shared in zip(results, overlap, strict=True)
    ]
