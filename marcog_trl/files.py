"""Files that are either whole or absent."""

import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """
    Reads a JSON file, which must be a mapping with these keys.

    Raises:
        ValueError: If it is something else; the message names the file.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}; one that this package wrote works") from None
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        raise ValueError(f"{str(path)!r} has {content!r:.60} and no {list(keys)}; one that this package wrote works")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that is either whole or absent."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is either whole or absent, or what it was before: it appears by rename."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
