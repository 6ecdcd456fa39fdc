"""The built-in problems with bugs, and the job of an assert."""

import pytest

from marcog_trl import load_problems
from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import solution_job
from marcog_trl.problems.bugs import assert_job, generate_bugs
from marcog_trl.problems.builtin import SIZES, STEPS, generate


PROBLEM = {
    "prompt": "Write f(x), which adds 1.",
    "entry_point": "f",
    "test": "",
    "setup": "import nothing",
    "timeout": 3.0,
}


@pytest.fixture(scope="module")
def rows():
    return load_problems("builtin_bugs", "train[:60]+validation[:30]+test[:30]")


def test_bugs_fail_a_test_and_reference_solutions_pass(rows):
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        verdicts = executor.run(
            [solution_job(row, row[column]) for column in ("buggy_solution", "canonical_solution") for row in rows]
        )
    assert [verdict.status for verdict in verdicts] == ["failed"] * len(rows) + ["passed"] * len(rows)


@pytest.mark.parametrize("split", SIZES)
def test_every_bug_is_one_built_in_mistake(split):
    bugs, problems = generate_bugs(split), generate(split)
    assert len(bugs) == SIZES[split]
    for bug, problem in zip(bugs, problems, strict=True):
        assert bug["task_id"] == problem["task_id"].replace("builtin", "builtin_bugs")
        assert {key: bug[key] for key in problem if key != "task_id"} == {
            key: problem[key] for key in problem if key != "task_id"
        }
        assert bug["mistake"] in STEPS[bug[bug["mistake_in"]]].mistakes
        parts = bug["buggy_solution"].strip().split("\n\n\n")
        wrong = [part != problem[name] for part, name in zip(parts, ("aux", "main"), strict=True)]
        assert wrong == [bug["mistake_in"] == "first", bug["mistake_in"] == "second"]
    assert {bug["mistake_in"] for bug in bugs} == {"first", "second"}


def test_bugs_depend_on_the_seed():
    assert generate_bugs("test", 1) != generate_bugs("test")
    assert load_problems("builtin_bugs", "test[:3]", seed=1)["prompt"] == [
        row["prompt"] for row in generate("test", 1)[:3]
    ]


def test_split_errors_name_the_set():
    with pytest.raises(ValueError, match="split='nope' of problem set 'builtin_bugs' is invalid"):
        load_problems("builtin_bugs", "nope")


def test_job_of_an_assert():
    job = assert_job(PROBLEM, "```python\ndef f(x):\n    return x\n```", "The assert:\nassert f(1) == 2")
    assert job.code == "def f(x):\n    return x"
    assert (job.tests, job.test_format, job.entry_point) == (("assert f(1) == 2",), "asserts", "f")
    assert job.setup == "" and job.timeout == 3.0
    assert assert_job(PROBLEM, "def f(x):\n    return x", "assert g(1) == 2") is None
