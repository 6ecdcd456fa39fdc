"""JSON files, and files that are never partial."""

import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """
    Read a JSON file, which must contain a mapping with these keys.

    Raises:
        ValueError: If it does not.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}. Use a file that marcog_trl wrote.") from None
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        needed = f"a mapping with {list(keys)}" if keys else "a mapping"
        raise ValueError(
            f"{str(path)!r} must contain {needed}, but has {content!r:.60}. Use a file that marcog_trl wrote."
        )
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as [`write_whole`] does."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary path, then rename, so that readers never see a partial file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
