"""Modules of several functions, made from the built-in problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from marcog_trl.problems.builtin import ENTRY_POINT, SIZES, generate


MODULE_SIZE = 4  # functions of a module
MODULE_SIZES = {split: size // MODULE_SIZE for split, size in SIZES.items()}


@lru_cache
def generate_modules(split: str, seed: int = 0) -> tuple[dict[str, Any], ...]:
    """
    Generate modules: each asks for four functions at once, the problems of [`generate`] in groups.

    Args:
        split (`str`): `train`, `validation` or `test`, as in [`generate`].
        seed (`int`, *optional*, defaults to `0`): Seed of the problems.

    Returns:
        `tuple[dict, ...]`: Rows with the columns of all problem sets, and `functions`, the names of the functions. A module has the
        tests of its functions, and no `entry_point`.
    """
    rows = generate(split, seed)
    return tuple(
        _module(f"modules/{split}/{i}", rows[i * MODULE_SIZE : (i + 1) * MODULE_SIZE])
        for i in range(len(rows) // MODULE_SIZE)
    )


def _module(task_id: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names, prompts, tests, solutions = list[str](), list[str](), list[str](), list[str]()
    for i, row in enumerate(rows, start=1):
        name = f"{ENTRY_POINT}_{i}"
        names.append(name)
        prompts.append(_renamed(row["prompt"], ENTRY_POINT, name))
        tests += [_renamed(test, ENTRY_POINT, name) for test in row["test"]]
        solution = _renamed(row["canonical_solution"], ENTRY_POINT, name)
        solutions.append(_renamed(solution, "aux", f"aux_{i}"))
    prompt = "\n\n".join(prompts)
    return {
        "task_id": task_id,
        "prompt": prompt,
        "functions": names,
        "test": tests,
        "test_format": "asserts",
        "setup": "",
        "canonical_solution": "\n\n".join(solutions),
        "starter_code": prompt,
    }


def _renamed(code: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\(", f"{new}(", code)
