"""Reward for helpers and a main agent that divide the work, found out by executing what would happen without either."""

from __future__ import annotations

import re
from math import isnan
from typing import Any, NamedTuple

from marcog_trl.agents import Prompt
from marcog_trl.execution import Verdict
from marcog_trl.parsing.syntax import combine
from marcog_trl.problems.schema import make_job
from marcog_trl.rewards.division import Division, test_divisions
from marcog_trl.rewards.experiments import experiment
from marcog_trl.rewards.requirements import needs_entry_point, needs_tests
from marcog_trl.rewards.solutions import Completion, Solutions, or_failure
from marcog_trl.rewards.values import InfrastructureFailure


RUNS = 0.5
DIVIDED = 1.5


@needs_entry_point
@needs_tests
def divided_work_reward(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    replies: list[dict[str, str]] | None = None,
    **given: Any,
) -> list[float]:
    """
    Reward of the `collaboration` workflow, at most 4.0, from the tests and from what happens to them without each agent's work:

    * +0.4 if the helper's reply defines `aux` and it returns a value;
    * +0.6 if the main agent's reply defines the entry point and it returns a value; otherwise nothing more is added;
    * +0.5 if both replies and their combination have no syntax error, and the solution returns a value in at least one test:
      it raises no exception there and keeps to the limits;
    * + fraction of the tests that the solution passes;
    * + 1.5 · this fraction if the work is divided: the helper matters and the main agent matters.

    If the entry point reads none of its arguments, the reward is the fraction of the tests that the solution passes and nothing else:
    whoever copies the result of an example earns the example's share of the tests.

    The helper matters if the solution loses a test that it passes in each of two experiments: `aux` always returns what it
    returned first; and `aux` returns another value of the same type, unless it only hands on its arguments. The first shows
    that the solution needs different values, not one constant; the second that it needs these values, not their truth, their
    keys or the absence of an error. A test is lost if its result is wrong or it raises an exception, not if time or memory
    run out. The main agent matters if the helper alone, called as the entry point, does not pass all tests that the solution
    passes.

    For each program that passes a test and names the helper, three more jobs are executed, all of a batch in one call. With
    several helpers, three for each, and the bonus is averaged. Each `stdio` test is a process of its own, in which what `aux`
    returned for another test is not known: if `aux` is called once there, no work counts as divided.

    What remains open: a password (the helper returns its argument in another form, and the main agent, which needs nothing,
    compares it or turns it back), a constant that reads the arguments and makes nothing of them, a helper that gives the whole answer in another form, and a program that looks for the
    experiments, which run in its process.

    In trainers of a single agent, the completion holds both functions.

    Logs `divided_work_reward/…`: `helper_definition`, `main_definition`, `syntax`, `runs` (shares of the episodes),
    `helper_matters` (share of the episodes; 0 if nothing was tried), `main_matters` (share of the episodes with experiments),
    `tests_passed`, `tests_total`, `timeouts` (over the executed solutions), `pass_rate`, `solved` (over all solutions).

    Args:
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply, of `"main"` and one or
            more helpers. Trainers of a single agent pass none.

    Returns:
        `list[float]` of length E: Rewards; [`InfrastructureFailure`] if the executor failed.

    Raises:
        ValueError: If the dataset has no tests or entry points, or `replies` are not those of a main agent and helpers.
    """
    solutions = Solutions("divided_work_reward", prompts, completions, given, ("test", "entry_point"))
    divisions, results, tests = test_divisions(solutions, "divided_work_reward", replies)

    tried = [
        (i, verdict, name)
        for i, (division, verdict) in enumerate(zip(divisions, results, strict=True))
        if verdict is not None and verdict.passed
        for name in _named(division)
    ]
    programs = [(i, code) for i, _, name in tried for code in _programs(divisions[i], name)]
    jobs = [make_job(solutions.problems[i], code) for i, code in programs]
    found = [verdict for verdict in solutions.run(jobs) if verdict is not None]  # all in one call
    outcomes: list[list[_Outcome | None]] = [[] for _ in divisions]
    for k, (i, original, _) in enumerate(tried):
        outcomes[i].append(_outcome(original, *found[3 * k : 3 * k + 3]))

    rewards: list[float] = []
    helper_matters: list[float | None] = []
    main_matters: list[float | None] = []
    for division, verdict, tries in zip(divisions, results, outcomes, strict=True):
        known = [outcome for outcome in tries if outcome is not None]
        failed, count = len(known) < len(tries), len(division.helpers)
        reward = _reward(division, verdict, sum(map(all, known)) / count)
        rewards.append(InfrastructureFailure("an experiment could not be run") if failed else reward)
        helper_matters.append(None if failed else sum(outcome.helper_matters for outcome in known) / count)
        mains = [outcome.main_matters for outcome in known]
        main_matters.append(None if failed or not known else sum(mains) / len(mains))

    runs = [None if isnan(reward) else float(_runs(of)) for reward, of in zip(rewards, results, strict=True)]
    solutions.log({**tests, "runs": runs, "helper_matters": helper_matters, "main_matters": main_matters})
    return rewards


def _reward(division: Division, verdict: Verdict | None, divided: float) -> float:
    if verdict is None:
        return division.definition_reward
    passed = verdict.passed / verdict.total
    if division.main_is_constant:
        return or_failure(verdict, passed)
    tests = (1 + DIVIDED * divided) * passed
    return or_failure(verdict, division.definition_reward + RUNS * _runs(verdict) + tests)


def _runs(verdict: Verdict | None) -> bool:
    """Whether the solution returned in at least one test, if only a wrong value."""
    tests = () if verdict is None else verdict.tests
    return any(test.status in ("passed", "failed") and not test.raised for test in tests)


def _named(division: Division) -> list[str]:
    """The helpers' functions that are defined and whose name occurs in the code that could call them."""
    code, least = (division.solution, 2) if division.by_one_agent else (division.main, 1)  # one is the definition
    return [name for name in division.defined if len(re.findall(rf"\b{name}\b", code)) >= least]


def _programs(division: Division, name: str) -> tuple[str, str, str]:
    """The programs of the three experiments: `aux` frozen, changed, and alone."""
    before, after = division.around(name)
    helpers = combine(before, after) if division.by_one_agent else combine(*division.helpers.values())
    return (
        combine(before, experiment("frozen", name), after),
        combine(before, experiment("changed", name), after),
        combine(helpers, experiment("alone", name, target=division.entry_point)),
    )


class _Outcome(NamedTuple):
    helper_matters: bool
    main_matters: bool


def _outcome(verdict: Verdict, frozen: Verdict, changed: Verdict, alone: Verdict) -> _Outcome | None:
    """Result of the experiments on a solution with this verdict; `None` if the executor failed."""
    if any(each.status == "infrastructure" for each in (frozen, changed, alone)):
        return None
    helper_matters = all("failed" in _where_passed(verdict, each) for each in (frozen, changed))
    return _Outcome(helper_matters, bool(_where_passed(verdict, alone) - {"passed"}))


def _where_passed(verdict: Verdict, other: Verdict) -> set[str]:
    """Results of another program in the tests that the solution passes."""
    pairs = zip(verdict.tests, other.tests, strict=False)  # a program may change how many subtests there are
    return {theirs.status for ours, theirs in pairs if ours.status == "passed"}
