"""Problems with code that has a bug: the built-in ones, and the job that runs an assert on a program."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from marcog_trl.execution import Job
from marcog_trl.parsing.asserts import assert_in
from marcog_trl.parsing.replies import code_in
from marcog_trl.parsing.syntax import combine
from marcog_trl.problems.builtin import STEPS, generate, write_aux, write_main
from marcog_trl.problems.schema import make_job


@lru_cache
def generate_bugs(split: str, seed: int = 0) -> tuple[dict[str, Any], ...]:
    """
    Generate a split of the built-in problems with bugs: every built-in problem, with a reference solution in which one step
    has one of its mistakes. Such a program fails at least one of the tests, because the tests of a built-in problem tell its
    solution from those with a mistake in one step.

    Args:
        split (`str`): `train`, `validation` or `test`.
        seed (`int`, *optional*, defaults to `0`): Seed of the problems and of the mistakes.

    Returns:
        `tuple[dict, ...]`: Rows of [`~marcog_trl.problems.builtin.generate`] with `buggy_solution`, `mistake_in` (`first` or
        `second`: the step with the mistake) and `mistake` (the wrong expression).
    """
    rng = random.Random(f"bugs {split} {seed}")
    rows = []
    for row in generate(split, seed):
        first, second = STEPS[row["first"]], STEPS[row["second"]]
        mistake_in, mistake = rng.choice(
            [("first", mistake) for mistake in first.mistakes] + [("second", mistake) for mistake in second.mistakes]
        )
        aux = write_aux(first, row["first_k"], mistake if mistake_in == "first" else None)
        main = write_main(second, row["second_k"], first.takes, mistake if mistake_in == "second" else None)
        rows.append(
            row
            | {
                "task_id": row["task_id"].replace("builtin", "builtin_bugs", 1),
                "buggy_solution": f"{combine(aux, main)}\n",
            }
            | {"mistake_in": mistake_in, "mistake": mistake}
        )
    return tuple(rows)


def assert_job(problem: Mapping[str, Any], solution: str, reply: str) -> Job | None:
    """
    Make the job that runs the assert of a tester on a solution.

    Args:
        problem (`Mapping`): One dataset row, with an `entry_point`.
        solution (`str`): The program to test, such as the problem's `buggy_solution` or `canonical_solution`.
        reply (`str`): The tester's reply.

    Returns:
        [`Job`] or `None`: `None` if the reply has no usable assert, see [`~marcog_trl.parsing.asserts.assert_in`].
    """
    test = assert_in(reply, problem["entry_point"])
    if test is None:
        return None
    tested = {**problem, "test": [test], "test_format": "asserts", "setup": ""}
    return make_job(tested, code_in(problem, solution))
