"""Public problem sets: where they are, how they are split, and how their rows are converted."""

from __future__ import annotations

import base64
import io
import json
import pickle
import string
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marcog_trl.problems.tests import first_call, helpers_before


MOST_TESTS = 50  # generated tests of CodeContests are added to the public and private ones up to this number
MOST_SECONDS = 120.0  # limit for all tests of a problem of CodeContests
_READ = "Read from standard input and write to standard output."
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
        may_lack_tests (`bool`, *optional*, defaults to `False`): Whether to leave out rows without tests that can be run, with a warning.
    """

    hub_id: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    ambiguous: str | None = None
    may_lack_tests: bool = False

    def adapted(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the common columns. A column `test` of its own stays: MBPP+ has more tests in it than in `test_list`."""
        if self.adapt is None:
            return dict(row)
        own = {name: row.get(name) for name in ("test", "test_format")} if row.get("test") else {}
        return {**self.adapt(row), **own}


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
        "prompt": f"{row['description'].strip()}\n\n{_READ}",
        "entry_point": "",
        "test": tests,
        "test_format": "stdio",
        "canonical_solution": in_python[0] if in_python else "",
        "test_timeout": test_timeout,
        "timeout": min(test_timeout * len(tests), MOST_SECONDS) if test_timeout else None,
    }


def _with_starter(text: str, starter_code: str, name: str = "") -> str:
    """A prompt that says what to write: what begins with the starter code, a function, or a program."""
    if not starter_code.strip():
        return f"{text.strip()}\n\n" + (f"Write the function {name}." if name else _READ)
    return f"{text.strip()}\n\nComplete this code:\n```python\n{starter_code.rstrip()}\n```"


def _first_text(texts: Any) -> str:
    """The first of some solutions, which may be a text in JSON."""
    if isinstance(texts, str):
        texts = _json(texts) or []
    return texts[0] if texts and isinstance(texts, list) else ""


def _json(text: Any) -> Any:
    """What a text in JSON says; `None` if it is something else."""
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return None


def _apps(row: Mapping[str, Any]) -> dict[str, Any]:
    """APPS and TACO."""
    starter_code = row.get("starter_code") or ""
    given = row["input_output"]
    cases = (_json(given) if isinstance(given, str) else given) or {}
    name = cases.get("fn_name") or ""
    number = row.get("problem_id", row.get("id"))
    return {
        **({} if number is None else {"task_id": str(number)}),
        "prompt": _with_starter(row["question"], starter_code, name),
        "entry_point": f"Solution().{name}" if name and "class Solution" in starter_code else name,
        "test": json.dumps(cases) if cases.get("inputs") else "",
        "canonical_solution": _first_text(row.get("solutions")),
        "starter_code": starter_code,
    }


class _TextOnly(pickle.Unpickler):
    """Reads a pickle of text, and refuses any other."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the tests hold {module}.{name}, but must be text")


def _cases(given: Any) -> list[dict[str, str]]:
    """Tests of LiveCodeBench: a list, JSON, or JSON that is pickled, compressed and encoded."""
    if not given or isinstance(given, list):
        return given or []
    text, cases = given, _json(given)
    if cases is None:
        packed = zlib.decompress(base64.b64decode(text))
        cases = json.loads(_TextOnly(io.BytesIO(packed)).load())
    return cases


def _livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = row.get("metadata") or {}
    metadata = _json(metadata) or {} if isinstance(metadata, str) else metadata
    cases = [*_cases(row["public_test_cases"]), *_cases(row.get("private_test_cases"))]
    name, starter_code = metadata.get("func_name") or "", row.get("starter_code") or ""
    return {
        "task_id": f"livecodebench/{row['question_id']}",
        "prompt": _with_starter(row["question_content"], starter_code, name),
        "entry_point": f"Solution().{name}" if name and "class Solution" in starter_code else name,
        "test": json.dumps(cases) if cases else "",
        "starter_code": starter_code,
    }


def _prime(row: Mapping[str, Any]) -> dict[str, Any]:
    """Eurus-2-RL-Data, which also has problems of mathematics: they have no tests."""
    given = row["reward_model"]["ground_truth"]
    cases = given if isinstance(given, dict) else _json(given)
    has_tests = isinstance(cases, dict) and "inputs" in cases
    return {
        "entry_point": (cases.get("fn_name") or "") if has_tests else "",
        "test": json.dumps(cases) if has_tests else "",
    }


def _verifiable(row: Mapping[str, Any]) -> dict[str, Any]:
    """verifiable-coding-problems and SYNTHETIC-1, of Prime Intellect and Open R1. Only problems in Python have tests here."""
    found = row["verification_info"]
    found = (_json(found) if isinstance(found, str) else found) or {}
    cases = found.get("test_cases") or []
    is_python = (found.get("language") or "python") == "python"
    return {
        "task_id": str(row["problem_id"]),
        "test": json.dumps(cases) if cases and is_python else "",
        "canonical_solution": row.get("gold_standard_solution") or "",
    }


def _deepcoder(row: Mapping[str, Any]) -> dict[str, Any]:
    starter_code = row.get("starter_code") or ""
    cases = row["tests"] if isinstance(row["tests"], list | dict) else _json(row["tests"])
    first = cases[0] if isinstance(cases, list) and cases else cases
    metadata = (first.get("metadata") or {}) if isinstance(first, dict) else {}
    name = (first.get("fn_name") or metadata.get("func_name") or "") if isinstance(first, dict) else ""
    return {
        "prompt": _with_starter(row["problem"], starter_code, name),
        "entry_point": f"Solution().{name}" if name and "class Solution" in starter_code else name,
        "test": row["tests"] if isinstance(row["tests"], str) else json.dumps(cases),
        "canonical_solution": _first_text(row.get("solutions")),
        "starter_code": starter_code,
    }


def _leetcode(row: Mapping[str, Any]) -> dict[str, Any]:
    """LeetCodeDataset, whose prompt is the imports and classes that solutions and tests use."""
    given = row.get("prompt") or ""
    starter_code = f"{given.rstrip()}\n\n\n{row['starter_code'].rstrip()}\n"
    return {
        "prompt": _with_starter(row.get("problem_description") or row["query"], row["starter_code"]),
        "setup": helpers_before(given, given.count("\n") + 2),
        "test": row["test"],
        "canonical_solution": row.get("completion") or "",
        "starter_code": starter_code,
    }


def _kodcode(row: Mapping[str, Any]) -> dict[str, Any]:
    """KodCode, whose questions do not always name the function that the tests import."""
    declared = [info["function_declaration"] for info in row["test_info"] or ()]
    listed = "\n".join(f"{each.rstrip().rstrip(':')}: ..." for each in declared)
    names = [info["function_name"] for info in row["test_info"] or ()]
    return {
        "task_id": str(row["question_id"]),
        "prompt": f"{row['question'].strip()}\n\nIt has to define:\n```python\n{listed}\n```"
        if listed
        else row["question"],
        "entry_point": names[0] if names else "",
        "test": row["test"],
        "canonical_solution": row["solution"],
    }


def _bigcodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row["complete_prompt"]
    return {
        "prompt": prompt,
        "test_format": "unittest",
        "canonical_solution": row["code_prompt"] + row["canonical_solution"],
        "starter_code": prompt,
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
    "humanevalplus": KnownSet("evalplus/humanevalplus"),
    "mbppplus": KnownSet("evalplus/mbppplus", adapt=_mbpp),
    "bigcodebench": KnownSet(
        "bigcode/bigcodebench",
        marks=frozenset({"complete_prompt", "instruct_prompt", "code_prompt", "test"}),
        adapt=_bigcodebench,
        may_lack_tests=True,
    ),
    "apps": KnownSet(
        "codeparrot/apps", marks=frozenset({"question", "input_output"}), adapt=_apps, may_lack_tests=True
    ),
    "taco": KnownSet("BAAI/TACO", adapt=_apps, may_lack_tests=True),
    "livecodebench": KnownSet(
        "livecodebench/code_generation_lite",
        marks=frozenset({"question_content", "public_test_cases", "question_id"}),
        adapt=_livecodebench,
        may_lack_tests=True,
    ),
    "prime": KnownSet(
        "PRIME-RL/Eurus-2-RL-Data",
        marks=frozenset({"prompt", "reward_model", "data_source"}),
        adapt=_prime,
        may_lack_tests=True,
    ),
    "verifiable_coding": KnownSet(
        "open-r1/verifiable-coding-problems-python",
        marks=frozenset({"prompt", "verification_info", "problem_id"}),
        adapt=_verifiable,
        may_lack_tests=True,
    ),
    "deepcoder": KnownSet(
        "agentica-org/DeepCoder-Preview-Dataset",
        marks=frozenset({"problem", "tests", "solutions"}),
        adapt=_deepcoder,
        may_lack_tests=True,
    ),
    "leetcode": KnownSet(
        "newfacade/LeetCodeDataset",
        marks=frozenset({"query", "starter_code", "entry_point", "test"}),
        adapt=_leetcode,
        may_lack_tests=True,
    ),
    "kodcode": KnownSet(
        "KodCode/KodCode-V1",
        marks=frozenset({"question", "solution", "test", "test_info"}),
        adapt=_kodcode,
        may_lack_tests=True,
    ),
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
