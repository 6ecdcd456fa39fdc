"""Standard output is compared as judges do."""

import json

import pytest

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import check_problems, load_problems, solution_job


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, isolation="best_effort") as made:
        yield made


def passes(executor, expected, printed, **columns):
    problem = {"prompt": "p", "test": [["1\n", expected]], "test_format": "stdio", **columns}
    (verdict,) = executor.run([solution_job(problem, f"input()\nprint({printed!r}, end='')")])
    return verdict.status == "passed"


@pytest.mark.parametrize(
    ("expected", "printed", "exact", "near"),
    [
        ("1 2\n3\n", "1 2  \n3\n\n\n", True, True),
        ("1 2\n3", "1 2\r\n3\r\n", True, True),
        ("0.3333333333\n", "0.33333333\n", False, True),
        ("0.5\n", "0.50001\n", False, False),
        ("1000000000\n", "1000000000.5\n", False, True),  # relative
        ("0\n", "1e-9\n", False, True),
        ("YES 1.0", "YES 1.0000001", False, True),
        ("YES 1.0", "NO 1.0", False, False),
        ("1.0", "1.0 2.0", False, False),
        ("1.0", "nan", False, False),
        ("1.0", "inf", False, False),
        ("1.0", "", False, False),
        ("inf", "inf", True, True),
    ],
)
def test_numbers_within_a_tolerance(executor, expected, printed, exact, near):
    assert passes(executor, expected, printed) is exact
    assert passes(executor, expected, printed, float_tolerance=None) is exact
    assert passes(executor, expected, printed, float_tolerance=1e-6) is near


ANY_ORDER = "def check(input, output, expected):\n    return sorted(output.split()) == sorted(expected.split())\n"


def test_a_checker_decides(executor):
    assert not passes(executor, "1 2 3", "3 1 2")
    assert passes(executor, "1 2 3", "3 1 2", checker=ANY_ORDER)
    assert not passes(executor, "1 2 3", "3 1", checker=ANY_ORDER)
    assert passes(
        executor, "", "1", checker="def check(input, output, expected):\n    return int(input) == int(output)"
    )
    assert not passes(executor, "1", "1", checker="def check(input, output, expected):\n    return output / 0")
    with_helper = f"import math\n\n{ANY_ORDER}".replace("return", "return math.pi > 3 and")
    assert passes(executor, "1 2", "2 1", checker=with_helper)


def test_a_program_cannot_reach_its_checker(executor):
    problem = {"prompt": "p", "test": [["1\n", "2\n"]], "test_format": "stdio", "checker": ANY_ORDER}
    cheat = "import builtins, sys\nbuiltins.sorted = lambda x: 0\nsys.modules['__main__'].check = lambda *a: True\nprint(3)"
    assert executor.run([solution_job(problem, cheat)])[0].status == "failed"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"checker": "def check(output): pass"},
            r"defines no function check of three arguments\. Write 'def check\(input",
        ),
        ({"checker": "def check("}, "is not Python"),
        ({"checker": ANY_ORDER, "float_tolerance": 1e-6}, "it has checker and float_tolerance. Set one of them"),
        ({"float_tolerance": 2}, "float_tolerance=2 must be a number between 0 and 1, such as 1e-6"),
        ({"float_tolerance": True}, "float_tolerance=True must be a number"),
    ],
)
def test_unusable_comparisons_are_refused(columns, message):
    rows = [{"prompt": "p", "test": [["1\n", "2\n"]], "test_format": "stdio", **columns}]
    with pytest.raises(ValueError, match=message):
        check_problems("set", rows, {"prompt": "agents", "test": "reward"})


def test_arguments_of_load_problems_become_columns(tmp_path, executor):
    row = {"prompt": "Print a third.", "test": [["1\n", "0.333333\n"]]}
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n")
    problem = load_problems(str(tmp_path / "set.jsonl"), float_tolerance=1e-5)[0]
    assert executor.run([solution_job(problem, "print(1 / 3)")])[0].status == "passed"
    problem = load_problems(str(tmp_path / "set.jsonl"), checker=ANY_ORDER)[0]
    assert problem["checker"] == ANY_ORDER
    (tmp_path / "set.jsonl").write_text(json.dumps({"prompt": "p", "test": ["assert f() == 1"]}) + "\n")
    with pytest.raises(
        ValueError, match=r"float_tolerance=1e-06 compares standard output, but problem set .* has no such tests"
    ):
        load_problems(str(tmp_path / "set.jsonl"), float_tolerance=1e-6)
