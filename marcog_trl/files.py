"""Reads and writes JSON, and writes files atomically."""

import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """
    Reads a JSON file that contains a mapping with these keys.

    Raises:
        ValueError: If the file is not valid JSON, or does not contain such a mapping.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}. Use a file that marcog_trl wrote.") from None
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        needed = f"a mapping with {list(keys)}" if keys else "a mapping"
        raise ValueError(
            f"{str(path)!r} must contain {needed}, but has {content!r:.60}. Use a file that marcog_trl wrote."
        )
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with [`write_whole`]."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes to a temporary path and renames it, so that readers never see a partial file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
