"""Reads rows from files, folders and the Hub, with `datasets`."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, ReadInstruction, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from marcog_trl.files import check_utf8


FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes


def rows_of(name_or_path: str, split: str, config: str | None = None) -> Dataset:
    """
    Read rows. Errors of `datasets` become one line.

    Args:
        name_or_path (`str`): A Hub id, or the path of a file or a folder.
        split (`str`): Split with an optional slice. A file, and a data set without splits, has one, under any name.
        config (`str`, *optional*): Configuration on the Hub.

    Raises:
        ValueError: If the rows cannot be read, or a file is not UTF-8.
    """
    check_file(name_or_path)
    path = Path(name_or_path).expanduser()
    try:
        if path.is_file():
            return _rows_of_file(path, split)
        if path.is_dir():
            return _rows_of_folder(path, split)
        return load_dataset(name_or_path, config, split=split)
    except (OSError, EOFError, ValueError, DatasetNotFoundError, DatasetGenerationError) as error:
        cause = str(error.__cause__ or error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"Cannot load problem set {name_or_path!r}, split={split!r}: {cause}. Use the name of a problem set of this package, "
            "such as 'builtin', a Hub id, or the path of a file or a folder."
        ) from error
    except StopIteration as error:
        raise ValueError(f"Problem set {name_or_path!r} has no rows: the file is empty.") from error


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
