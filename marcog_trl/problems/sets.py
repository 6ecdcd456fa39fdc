"""Public problem sets: where they are, how they are split, and how their rows are converted."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marcog_trl.problems.tests import first_call


MOST_TESTS = 50  # generated tests of CodeContests are added to the public and private ones up to this number
MOST_SECONDS = 120.0  # limit for all tests of a problem of CodeContests
_PYTHON3 = 3  # number of the language in CodeContests


@dataclass(frozen=True)
class KnownSet:
    """
    A public problem set.

    Args:
        hub_id (`str`): Its repository on the Hub.
        config (`str`, *optional*): Its configuration there.
        splits (`Mapping[str, str]`, *optional*): Name of a split → other split, or slice of one, that it stands for.
        marks (`frozenset[str]`, *optional*): Columns by which a copy of it, such as a local file, is recognised.
        adapt (`Callable`, *optional*): Converts one of its rows to the common columns.
        ambiguous (`str`, *optional*): A split of which slices raise an error, because other copies have all rows in it.
        may_lack_tests (`bool`, *optional*, defaults to `False`): Whether to leave out rows without tests, instead of an error.
    """

    hub_id: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    ambiguous: str | None = None
    may_lack_tests: bool = False


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    """MBPP has no signatures: function and number of arguments are taken from the first assert."""
    tests = list(row["test_list"] or ())
    text = row.get("text") or row.get("prompt") or ""
    call = first_call(tests[0], row.get("code") or "") if tests else None
    name = "" if call is None else call.func.id  # type: ignore[attr-defined]
    prompt = text
    if call is not None:
        names = [*string.ascii_lowercase[: len(call.args)], *(str(keyword.arg) for keyword in call.keywords)]
        docstring = text.strip().replace("\\", "\\\\").replace('"""', "'''")
        prompt = f'def {name}({", ".join(names)}):\n    """{docstring}"""\n'
    imports = row.get("test_imports") or []
    return {
        "task_id": f"mbpp/{row['task_id']}",
        "prompt": prompt,
        "entry_point": name,
        "test": tests,
        "test_format": "asserts",
        "setup": row.get("test_setup_code") or "\n".join(imports),
        "canonical_solution": row.get("code") or "",
    }


def _classeval(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": row["skeleton"],
        "entry_point": row["class_name"],
        "test": row["test"],
        "setup": "\n".join(row.get("import_statement") or []),
        "test_format": "unittest",
        "canonical_solution": row.get("solution_code") or "",
        "starter_code": row["skeleton"],
    }


def _code_contests(row: Mapping[str, Any]) -> dict[str, Any]:
    tests: list[list[str]] = []
    for kind in ("public_tests", "private_tests", "generated_tests"):
        found = row.get(kind) or {"input": [], "output": []}
        pairs = [[given, expected] for given, expected in zip(found["input"], found["output"], strict=True)]
        tests += pairs if kind != "generated_tests" else pairs[: max(0, MOST_TESTS - len(tests))]
    solutions = row.get("solutions") or {"language": [], "solution": []}
    in_python = [
        text
        for language, text in zip(solutions["language"], solutions["solution"], strict=True)
        if language == _PYTHON3
    ]
    limit = row.get("time_limit") or {}
    seconds = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9
    # The limits are meant for one test and for C++, so Python gets more time
    test_timeout = max(5.0, 5.0 * seconds) if seconds else None
    return {
        "task_id": f"code_contests/{row['name']}",
        "prompt": f"{row['description'].strip()}\n\nRead from standard input and write to standard output.",
        "entry_point": "",
        "test": tests,
        "test_format": "stdio",
        "canonical_solution": in_python[0] if in_python else "",
        "test_timeout": test_timeout,
        "timeout": min(test_timeout * len(tests), MOST_SECONDS) if test_timeout else None,
    }


SETS: dict[str, KnownSet] = {
    "humaneval": KnownSet("openai/openai_humaneval", splits={"train": "test[33:163]", "validation": "test[:32]"}),
    "coophumaneval": KnownSet(
        "CoMLRL/CoopHumanEval", splits={"train": "test[16:]", "validation": "test[:16]"}, ambiguous="train"
    ),
    "mbpp": KnownSet(
        "google-research-datasets/mbpp", "full", marks=frozenset({"test_list", "task_id", "code"}), adapt=_mbpp
    ),
    "mbpp_sanitized": KnownSet("google-research-datasets/mbpp", "sanitized", adapt=_mbpp),
    "classeval": KnownSet(
        "FudanSELab/ClassEval",
        splits={"train": "test[:66]", "validation": "test[66:82]"},
        marks=frozenset({"skeleton", "class_name", "test"}),
        adapt=_classeval,
    ),
    "code_contests": KnownSet(
        "deepmind/code_contests",
        splits={"validation": "valid"},
        marks=frozenset({"description", "public_tests", "name"}),
        adapt=_code_contests,
        may_lack_tests=True,
    ),
}
