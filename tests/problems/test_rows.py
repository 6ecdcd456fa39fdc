"""Rows come from the file or folder that was named, or an error names it."""

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict

from marcog_trl.problems import load_problems


def row(name):
    return {"prompt": f"Write {name}.", "test": [f"assert {name}() == 1"]}


def write(path, name, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row(name), ensure_ascii=False) + "\n", encoding=encoding)
    return str(path)


NAMES = [
    "x[1].jsonl",
    "[!a].jsonl",
    "a*b.jsonl",
    "q?.jsonl",
    "two words.jsonl",
    "{a,b}.jsonl",
    "ü#%.jsonl",
    ".hidden/x.jsonl",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_no_pattern(tmp_path, name):
    for other in ("x1.jsonl", "b.jsonl", "aab.jsonl", "qx.jsonl", "a.jsonl"):
        write(tmp_path / other, "another")
    assert load_problems(write(tmp_path / name, "wanted"))["entry_point"][:] == ["wanted"]


@pytest.mark.parametrize("name", ["set[1]", "s*", "set 1"])
def test_a_folder_is_no_pattern(tmp_path, name):
    write(tmp_path / "set1" / "train.jsonl", "another")
    write(tmp_path / name / "train.jsonl", "wanted")
    write(tmp_path / name / "test.jsonl", "held_out")
    assert load_problems(str(tmp_path / name))["entry_point"][:] == ["wanted"]
    assert load_problems(str(tmp_path / name), "test")["entry_point"][:] == ["held_out"]


def test_parents_are_no_patterns(tmp_path):
    write(tmp_path / "run1" / "set" / "train.jsonl", "another")
    write(tmp_path / "run[1]" / "set" / "train.jsonl", "wanted")
    assert load_problems(str(tmp_path / "run[1]" / "set"))["entry_point"][:] == ["wanted"]


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data" / "train.jsonl", "wanted")
    assert load_problems("~/data/train.jsonl")["entry_point"][:] == ["wanted"]
    assert load_problems("~/data")["entry_point"][:] == ["wanted"]
    with pytest.raises(ValueError, match=r"'~/missing.jsonl' is not there: .*missing.jsonl' does not exist"):
        load_problems("~/missing.jsonl")


@pytest.mark.parametrize("name", ["saved", "saved[1]"])
def test_folders_of_save_to_disk(tmp_path, name):
    rows = [row(f"f{i}") for i in range(4)]
    Dataset.from_list(rows).save_to_disk(tmp_path / name)
    assert load_problems(str(tmp_path / name), "train[1:3]")["entry_point"][:] == ["f1", "f2"]
    assert len(load_problems(str(tmp_path / name), "test")) == 4
    DatasetDict(train=Dataset.from_list(rows[:3]), test=Dataset.from_list(rows[3:])).save_to_disk(
        tmp_path / f"{name}s"
    )
    assert load_problems(str(tmp_path / f"{name}s"), "test")["entry_point"][:] == ["f3"]
    assert load_problems(str(tmp_path / f"{name}s"), "train[:1]+test")["entry_point"][:] == ["f0", "f3"]
    with pytest.raises(ValueError, match=r"Cannot load problem set .*saved.*, split='other': .*other"):
        load_problems(str(tmp_path / f"{name}s"), "other")


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("latin-1", r"line 2 has the byte 0xe9; it may be CP1252"),
        ("gb18030", r"line 2 has the byte 0x.*GB18030"),
        ("utf-16", "it seems to be UTF-16"),
        ("utf-16-le", "it seems to be UTF-16"),
        ("utf-32", "it seems to be UTF-32"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "folder", "compressed"])
def test_files_that_are_not_utf8_are_named(tmp_path, encoding, said, kind):
    text = "\n".join(json.dumps(row(name), ensure_ascii=False) for name in ("f", "é"))
    path = tmp_path / ("train.jsonl.gz" if kind == "compressed" else "train.jsonl")
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if kind == "compressed" else content)
    with pytest.raises(ValueError, match=rf"train.jsonl\S*' is not UTF-8 text: {said}.*Save it as UTF-8") as error:
        load_problems(str(tmp_path if kind == "folder" else path))
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_of_utf8_is_no_part_of_the_text(tmp_path):
    assert load_problems(write(tmp_path / "set.jsonl", "é", "utf-8-sig"))["prompt"][:] == ["Write é."]


def test_paths_are_relative_to_the_working_folder(tmp_path, monkeypatch):
    write(tmp_path / "x[1].jsonl", "wanted")
    monkeypatch.chdir(tmp_path)
    assert load_problems("x[1].jsonl")["entry_point"][:] == ["wanted"]
