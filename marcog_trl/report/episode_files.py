"""
The Parquet files of episodes: their columns, and how to read them. It imports no library that takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


EPISODES_FOLDER = "episodes"
FILES = f"[!.]*-{7 * '[0-9]'}-*-*.parquet"  # split, step, process, episodes before
_TEXT, _NUMBER, _COUNT, _TRUTH = pa.string(), pa.float32(), pa.int32(), pa.bool_()
_VERDICT = {
    "solution": _TEXT,
    "status": _TEXT,  # empty without tests
    "message": _TEXT,
    "tests_passed": _COUNT,
    "tests": _COUNT,
}


def _list_of(fields: dict[str, pa.DataType]) -> pa.DataType:
    return pa.list_(pa.struct(list(fields.items())))


SCHEMA = pa.schema(
    {
        "step": _COUNT,  # the optimizer step that learns from it, or before which it was evaluated
        "split": _TEXT,  # "train" or "eval"; in files of an evaluation, "greedy" or "sampled"
        "process": _COUNT,
        "task_id": _TEXT,
        "problem": _TEXT,
        "generation": _COUNT,  # number among the episodes of the problem in its batch
        "messages": _list_of(
            {
                "agent": _TEXT,
                "turn": _COUNT,  # counted from 1
                "prompt": _TEXT,
                "reply": _TEXT,
                "tokens": _COUNT,
                "truncated": _TRUTH,
                "logprob": _NUMBER,  # mean over the tokens of the reply, if it is known
                "advantage": _NUMBER,
                "left_out": _TEXT,  # why the reply is not in the loss; empty if it is
                "reward": _NUMBER,  # of the agent in this turn
            }
        ),
        **_VERDICT,  # of the last turn
        "earlier_turns": _list_of(_VERDICT),
        "results": _list_of({"test": _TEXT, "status": _TEXT}),
        "reward": _NUMBER,  # of the last turn, averaged over agents
        "rewards": _list_of({"turn": _COUNT, "function": _TEXT, "agent": _TEXT, "value": _NUMBER}),
        "masked": _TRUTH,
        "execution_seconds": _NUMBER,
    }
)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """
    Reads the episodes of a run or of an evaluation.

    Args:
        path (`str`): The output folder of a run, its `episodes` folder, or a `.parquet` file.

    Returns:
        `list[dict]`: The rows, sorted by step, split, problem and generation.

    Raises:
        ValueError: If there are none.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted((path / EPISODES_FOLDER).glob(FILES)) or sorted(path.glob(FILES))
    if not files or (path.suffix not in ("", ".parquet") and path.is_file()):
        raise ValueError(
            f"{str(path)!r} has no episodes. Name the output folder of a training with max_logged_episodes above 0, or the "
            ".parquet file of an evaluation."
        )
    try:
        rows = [row for file in files for row in pq.read_table(file, schema=SCHEMA).to_pylist()]
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"The episodes of {str(path)!r} cannot be read: {error}") from error
    return sorted(rows, key=lambda row: (row["step"] or 0, row["split"] or "", row["task_id"], row["generation"] or 0))
