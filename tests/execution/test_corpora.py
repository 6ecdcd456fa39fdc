"""Published problem sets: reference solutions pass, and versions of them with one fault fail, where they do natively."""

import ast
import json
from pathlib import Path

import pytest

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import load_problems, make_job


DATA = Path(__file__).parents[1] / "data"
# ClassEval test methods that do not pass although the solution is the reference, with what their messages say
NO_FILES = "unable to open database file"  # all its tests write test.db: without Landlock, no program may write files
LONG_PAST = "Lists differ"  # takes 2024-01-02 for an upcoming date; fails natively as well
CLASSEVAL_EXCEPTIONS = {
    "ClassEval_14": {
        f"BookManagementDBTest{name}": NO_FILES
        for name in (
            *("CreateTable.test_create_table_1", "CreateTable.test_create_table_2", "AddBook.test_add_book"),
            *("RemoveBook.test_remove_book", "BorrowBook.test_borrow_book", "ReturnBook.test_return_book"),
            "SearchBooks.test_search_books",
        )
    },
    "ClassEval_17": {"CalendarTestGetUpcomingEvents.test_get_upcoming_events_5": LONG_PAST},
}


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=2, timeout=30.0, isolation="best_effort") as executor:
        yield executor


@pytest.fixture(scope="module")
def humaneval():
    return list(load_problems(str(DATA / "humaneval.jsonl.gz"), "test"))


@pytest.fixture(scope="module")
def mbpp():
    columns = {"prompt": "text", "test": "test_list", "setup": "test_setup_code", "canonical_solution": "code"}
    return list(load_problems(str(DATA / "mbpp_sanitized_60.jsonl"), "test", columns=columns))


@pytest.fixture(scope="module")
def classeval():
    columns = {"prompt": "skeleton", "entry_point": "class_name", "canonical_solution": "solution_code"}
    return list(load_problems(str(DATA / "classeval_20.json"), "test", columns=columns))


def classeval_exceptions(executor, row):
    files = executor.isolation.landlock_abi or not executor.isolation.seccomp  # whether there can be a scratch folder
    return {} if files and row["task_id"] == "ClassEval_14" else CLASSEVAL_EXCEPTIONS.get(row["task_id"], {})


def mutants(problems, name):
    """One broken solution per problem, in the order of the problems."""
    found = json.loads((DATA / f"{name}_mutants.json").read_text(encoding="utf-8"))
    assert set(found) == {str(problem["task_id"]) for problem in problems}
    ordered = [found[str(problem["task_id"])] for problem in problems]
    for problem, mutant in zip(problems, ordered, strict=True):
        assert mutant["code"] != problem["canonical_solution"], problem["task_id"]
    return ordered


def not_passed(problems, verdicts):
    return {
        problem["task_id"]: (verdict.status, verdict.message)
        for problem, verdict in zip(problems, verdicts, strict=True)
        if verdict.status != "passed"
    }


def not_plainly_failed(problems, verdicts):
    """Verdicts other than: some test failed, its message says why, and nothing worse happened."""
    return {
        problem["task_id"]: (verdict.status, verdict.message)
        for problem, verdict in zip(problems, verdicts, strict=True)
        if verdict.status != "failed" or verdict.passed == verdict.total or not verdict.message
    }


def test_humaneval_references_pass(executor, humaneval):
    assert len(humaneval) == 164 and {problem["test_format"] for problem in humaneval} == {"check"}
    verdicts = executor.run([make_job(row, row["prompt"] + row["canonical_solution"]) for row in humaneval])
    assert not_passed(humaneval, verdicts) == {}


def test_humaneval_mutants_fail(executor, humaneval):
    broken = mutants(humaneval, "humaneval")
    jobs = [make_job(row, row["prompt"] + mutant["code"]) for row, mutant in zip(humaneval, broken, strict=True)]
    assert not_plainly_failed(humaneval, executor.run(jobs)) == {}


def test_mbpp_references_pass(executor, mbpp):
    assert len(mbpp) == 60 and {problem["test_format"] for problem in mbpp} == {"asserts"}
    assert not_passed(mbpp, executor.run([make_job(row, row["canonical_solution"]) for row in mbpp])) == {}


def test_mbpp_mutants_fail_the_asserts_that_they_fail_natively(executor, mbpp):
    broken = mutants(mbpp, "mbpp")
    jobs = [make_job(row, mutant["code"]) for row, mutant in zip(mbpp, broken, strict=True)]
    verdicts = executor.run(jobs)
    assert not_plainly_failed(mbpp, verdicts) == {}
    for row, mutant, verdict in zip(mbpp, broken, verdicts, strict=True):
        failed = [k for k, result in enumerate(verdict.tests) if result.status != "passed"]
        assert failed == mutant["failed"], (row["task_id"], mutant["mutation"], verdict)


def by_method(jobs, verdicts):
    """For each job, the methods that did not pass, with their messages."""

    def methods(job):
        classes = sorted((n for n in ast.parse(job.tests).body if isinstance(n, ast.ClassDef)), key=lambda n: n.name)
        return [f"{c.name}.{m}" for c in classes for m in sorted(n.name for n in c.body if n.name.startswith("test"))]

    return [
        {
            name: result.message
            for name, result in zip(methods(job), verdict.tests, strict=True)
            if result.status != "passed"
        }
        for job, verdict in zip(jobs, verdicts, strict=True)
    ]


def test_classeval_references_pass(executor, classeval):
    assert len(classeval) == 20 and {problem["test_format"] for problem in classeval} == {"unittest"}
    jobs = [make_job(row, row["canonical_solution"]) for row in classeval]
    for row, failed in zip(classeval, by_method(jobs, executor.run(jobs)), strict=True):
        expected = classeval_exceptions(executor, row)
        assert set(failed) == set(expected), (row["task_id"], failed)
        for name, message in failed.items():
            assert expected[name] in message


def test_classeval_mutants_fail_the_methods_that_they_fail_natively(executor, classeval):
    broken = mutants(classeval, "classeval")
    jobs = [make_job(row, mutant["code"]) for row, mutant in zip(classeval, broken, strict=True)]
    verdicts = executor.run(jobs)
    assert not_plainly_failed(classeval, verdicts) == {}
    for row, mutant, failed in zip(classeval, broken, by_method(jobs, verdicts), strict=True):
        expected = {*mutant["failed"], *classeval_exceptions(executor, row)}
        assert set(failed) == expected, (row["task_id"], mutant["mutation"], failed)
