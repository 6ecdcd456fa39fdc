"""
Reward for a tester and a fixer who correct code that has a bug. See the README of this folder.
"""

import ast
import itertools
import re
from contextlib import suppress

from marcog_trl.parsing.asserts import assert_in
from marcog_trl.parsing.prompts import messages_of
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import combine, parse
from marcog_trl.problems import solution_job
from marcog_trl.rewards import InfrastructureFailure, execution_reward, needs_entry_point, needs_tests
from marcog_trl.rewards.experiments import experiment
from marcog_trl.rewards.solutions import Solutions


FACTS = ("fails_on_bug", "passes_on_reference", "fails_on_others", "discriminates")


@needs_entry_point
@needs_tests
def bugfix_reward(prompts, completions, *, replies=None, **given):
    """
    Reward by agent, in [0, 1]:

    * fixer: R, the fraction of the tests that the solution passes;
    * tester: ½ R + ½ · D. D is 1 if its assert discriminates: it fails on `buggy_solution`, passes on `canonical_solution`, and
      fails on two other wrong programs. These are right about the examples in the prompt only; otherwise they return another
      value of the same type. So an assert passes on them if it repeats an example, or says what the result is not. Otherwise
      D is 0, also if an assert times out.

    In trainers of a single agent, which corrects the code alone, the reward is R.

    Logs `bugfix_reward/…`, as shares of the testers: `usable_assert` (those that wrote an assert which could be run),
    `fails_on_bug`, `passes_on_reference`, `fails_on_others` and `discriminates`; and all that [`execution_reward`] logs.

    Args:
        prompts, completions, **given: See [`execution_reward`].
        replies (`list[dict[str, str]]` of length E, *optional*): Agent → reply, with one of `"tester"`. Trainers of a single
            agent pass none.

    Returns:
        `list[dict[str, float]]` of length E: Agent → reward; [`InfrastructureFailure`] if the executor failed. `list[float]` in
        trainers of a single agent.

    Raises:
        ValueError: If the dataset has no tests, or, with `replies`, no entry points, buggy or reference solutions.
    """
    rates = execution_reward(prompts, completions, **given)
    if replies is None:
        return rates
    needed = ("entry_point", "buggy_solution", "canonical_solution")
    solutions = Solutions("bugfix_reward", prompts, completions, given, needed)
    jobs = [jobs_of(problem, texts["tester"]) for problem, texts in zip(solutions.problems, replies, strict=True)]
    found = iter(solutions.run([job for own in jobs for job in own]))  # of all episodes, in one call
    outcomes = [outcome_of(list(itertools.islice(found, len(own)))) for own in jobs]
    facts = {name: [None if outcome is None else outcome[name] for outcome in outcomes] for name in FACTS}
    solutions.log({"usable_assert": [float(bool(own)) for own in jobs], **facts})
    rewards = []
    for rate, outcome, texts in zip(rates, outcomes, replies, strict=True):
        if outcome is None:
            rate = InfrastructureFailure("the assert could not be run")
        failed = isinstance(rate, InfrastructureFailure)
        rewards.append(
            rate if failed else {**dict.fromkeys(texts, rate), "tester": (rate + outcome["discriminates"]) / 2}
        )
    return rewards


def jobs_of(problem, reply):
    """The jobs of an assert on the code with the bug, the reference solution, and two wrong programs; none without an assert."""
    name = problem["entry_point"]
    test = assert_in(reply, name)
    if test is None:
        return []
    tested = {**problem, "test": [test], "test_format": "asserts", "setup": ""}
    reference = code_in(problem, problem["canonical_solution"])
    examples = examples_in("\n".join(str(message["content"]) for message in messages_of(problem["prompt"])), name)
    wrong = (combine(reference, experiment(kind, name, examples)) for kind in ("above", "below"))
    return [solution_job(tested, code) for code in (problem["buggy_solution"], reference, *wrong)]


def outcome_of(verdicts):
    """Outcome of an assert that was run on the programs of `jobs_of`; `None` if the executor failed."""
    if not verdicts:
        return dict.fromkeys(FACTS, 0.0)
    bug, reference, *others = (verdict.status for verdict in verdicts)
    if "infrastructure" in (bug, reference, *others):
        return None
    facts = (bug == "failed", reference == "passed", all(status == "failed" for status in others))
    return dict(zip(FACTS, map(float, (*facts, all(facts))), strict=True))


def examples_in(text, function):
    """
    Finds the calls of a function in a text, such as the examples in a docstring.

    Returns:
        `list[tuple[list, dict]]`: The positional and the named arguments of each call, if they are literals.
    """
    found = []
    for start in re.finditer(rf"\b{re.escape(function)}\(", text):
        rest = text[start.start() : start.start() + 2000]
        ends = itertools.islice(re.finditer(r"\)", rest), 40)
        call = next((tree.body[0].value for end in ends if (tree := parse(rest[: end.end()])) is not None), None)
        if isinstance(call, ast.Call):
            with suppress(ValueError):  # not a literal
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                found.append(([ast.literal_eval(value) for value in call.args], named))
    return found
