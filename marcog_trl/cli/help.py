"""
What `--help` of a command shows, as files: to make it takes seconds of imports.

`python -m marcog_trl.cli.help` writes the files anew.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Sequence
from pathlib import Path


FOLDER = Path(__file__).parent / "help"
WIDTH = "100"


def kept_help(argv: Sequence[str]) -> str | None:
    """Returns the help that a command line asks for, or `None` if it asks for something else, or it is not kept."""
    if argv[-1] not in ("--help", "-h"):
        return None
    file = FOLDER / f"{'-'.join(argv[:-1])}.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def made_help(words: Sequence[str]) -> str:
    """Returns the help of a command, such as `["train", "magrpo"]`, from its parser."""
    from marcog_trl.cli.console import RunStatus
    from marcog_trl.cli.main import COMMANDS

    os.environ["COLUMNS"] = WIDTH
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(COMMANDS[words[0]][0]).main([*words[1:], "--help"], RunStatus())
    text = said.getvalue()
    return text[text.index("usage:") :]  # after what is said while libraries load


def commands() -> list[list[str]]:
    """Returns the commands whose help is kept."""
    from marcog_trl.cli.recipe import RECIPES

    return [[name] for name in ("solve", "evaluate", "export", "plan")] + [["train", name] for name in RECIPES]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for words in commands():
        (FOLDER / f"{'-'.join(words)}.txt").write_text(made_help(words), encoding="utf-8")
