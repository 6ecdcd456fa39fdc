"""Reads rows from files and folders, with `datasets`."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, ReadInstruction, concatenate_datasets, load_dataset, load_from_disk

from marcog_trl.files import check_utf8


FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes


def local_rows(path: Path, split: str) -> Dataset:
    """
    Read the rows of a file or a folder.

    Args:
        path (`Path`): The file or folder, also one that `save_to_disk` wrote.
        split (`str`): Split with an optional slice. A file, and a saved `Dataset`, has one, under any name.

    Raises:
        ValueError: If a file is not UTF-8, or of another type. Other errors are those of `datasets`.
    """
    return _rows_of_file(path, split) if path.is_file() else _rows_of_folder(path, split)


def check_file(name_or_path: str) -> None:
    """Raises a `ValueError` if a problem set is named like a file or a folder that is not there. Asks no network."""
    path = Path(name_or_path).expanduser()
    looks_like_path = path.suffix in (*FILE_TYPES, ".gz") or name_or_path.startswith(("/", "./", "../", "~"))
    if looks_like_path and not path.exists():
        raise ValueError(
            f"Problem set {name_or_path!r} is not there: {str(path.absolute())!r} does not exist. Correct the path."
        )


def _rows_of_file(path: Path, split: str) -> Dataset:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in FILE_TYPES:
        raise ValueError(f"its name does not end in {', '.join(FILE_TYPES)} or .jsonl.gz")
    if FILE_TYPES[suffix] == "json":
        check_utf8(path)
    split_name = re.split(r"\W", split)[0] or "train"
    # `datasets` takes a path for a pattern
    return load_dataset(FILE_TYPES[suffix], data_files={split_name: glob.escape(str(path))}, split=split)


def _rows_of_folder(path: Path, split: str) -> Dataset:
    if any((path / name).is_file() for name in _SAVED):
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else {re.split(r"\W", split)[0] or "train": saved}
        return _select(splits, split)
    for name in FILE_TYPES:
        for file in path.rglob(f"*{name}") if FILE_TYPES[name] == "json" else ():
            check_utf8(file)
    path = path.absolute()
    first = Path(*path.parts[:2])
    if glob.has_magic(str(first)):
        raise ValueError(f"{str(first)!r} has a character of patterns in its name ([, * or ?). Rename or move it")
    if glob.has_magic(str(path)):  # `datasets` takes it for a pattern
        return load_dataset(str(first), data_dir=glob.escape(str(path.relative_to(first))), split=split)
    return load_dataset(str(path), split=split)


def _select(splits: Mapping[Any, Dataset], split: str) -> Dataset:
    """The rows of a split with slices, such as `"train[:10]+test"`."""
    spans = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return concatenate_datasets([splits[span.splitname].select(range(span.from_, span.to)) for span in spans])
