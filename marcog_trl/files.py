"""Reads text, reads and writes JSON, and writes files atomically."""

import codecs
import gzip
import json
import os
from pathlib import Path
from typing import Any


_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def check_utf8(path: Path) -> None:
    """
    Checks the encoding of a text file, which may be compressed (`.gz`).

    Raises:
        ValueError: If it is not UTF-8. The error names the file, the encoding that it seems to have, and the line.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
        if marked is not None or b"\0" in start:
            raise _not_utf8(path, f"it seems to be {marked or 'UTF-16'}", marked or "UTF-16")
        while chunk := file.read(1 << 20):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                lines += error.object.count(b"\n", 0, error.start)
                byte = error.object[error.start]
                reason = (
                    f"line {lines} has the byte 0x{byte:02x}; it may be CP1252 (Western Windows), GB18030 or Shift JIS"
                )
                raise _not_utf8(path, reason, "CP1252") from None
            lines += chunk.count(b"\n")


def _not_utf8(path: Path, reason: str, encoding: str) -> ValueError:
    return ValueError(
        f"{str(path)!r} is not UTF-8 text: {reason}. Save it as UTF-8, for example with 'iconv -f {encoding} -t UTF-8'."
    )


def read_text(path: Path) -> str:
    """
    Reads a text file, with or without a byte order mark.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not UTF-8, as [`check_utf8`] says.
    """
    check_utf8(path)
    return path.read_text(encoding="utf-8-sig")


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """
    Reads a JSON file that contains a mapping with these keys.

    Raises:
        ValueError: If the file is not valid JSON, or does not contain such a mapping.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
