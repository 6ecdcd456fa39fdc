import pytest

from marcog_trl.problems import load_problems, make_job


def test_job_carries_the_problem_and_the_limits():
    problem = load_problems("builtin", "test[:1]")[0]
    job = make_job(problem, problem["canonical_solution"], timeout=3.0, memory_mb=128)
    assert job.code == problem["canonical_solution"]
    assert list(job.tests) == problem["test"]
    assert (job.test_format, job.entry_point, job.timeout, job.memory_mb) == ("asserts", "solve", 3.0, 128)
    assert job == make_job(problem, problem["canonical_solution"], timeout=3.0, memory_mb=128)


@pytest.mark.parametrize("test", [None, "", []])
def test_a_missing_test_is_an_error(test):
    with pytest.raises(ValueError, match="'x/1' has test="):
        make_job({"task_id": "x/1", "test": test, "test_format": "asserts"}, "pass")
    with pytest.raises(ValueError, match="has test=None"):
        make_job({"test_format": "asserts"}, "pass")
    with pytest.raises(ValueError, match=r"has test_format=None\. Set 'test_format'\."):
        make_job({"test": ["assert f()"]}, "pass")
