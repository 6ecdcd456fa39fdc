"""Files that are either whole or absent."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that is either whole or absent."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is either whole or absent, or what it was before: it appears by rename."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
