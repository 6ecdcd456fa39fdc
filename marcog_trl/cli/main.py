"""
The command line of the package, `marcog-trl COMMAND` or `python -m marcog_trl COMMAND`.

This module imports no library: they take seconds, in which Ctrl-C already ends with one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from marcog_trl.checks import instead_of
from marcog_trl.cli.console import interrupts, one_line, warnings_once
from marcog_trl.cli.help import kept_help


# Command -> the module whose `main(argv, status)` runs it, and what it does
COMMANDS = {
    "train": ("marcog_trl.cli.recipe", "train a team"),
    "solve": ("marcog_trl.cli.solve", "solve a problem with a saved team, or with any model"),
    "evaluate": ("marcog_trl.cli.evaluate", "measure a saved team, its base model, or any model on problems"),
    "compare": ("marcog_trl.cli.compare", "say which of several teams solves more, and what it spends"),
    "export": ("marcog_trl.cli.export", "write the agents of a saved team as ordinary adapters, and push them"),
    "episodes": ("marcog_trl.cli.episodes", "read the episodes of a training or an evaluation"),
    "plan": ("marcog_trl.cli.plan", "compute what a training run needs, without weights"),
}
_USAGE = "usage: marcog-trl COMMAND [flags]\n\n{commands}\n\n`marcog-trl COMMAND --help` shows the flags and examples."


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        argv (`list[str]`, *optional*): The command and its flags; defaults to the command line of the process.

    Returns:
        `int`: The exit status.

    Raises:
        SystemExit: With status 2 after one line, if the command or its flags are wrong; with 0 after the help of a command.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["--help"], ["-h"]):
        print(_USAGE.format(commands="\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())))
        return 0
    kept = kept_help(argv) if argv[:1] and argv[0] in COMMANDS else None
    if kept is not None:
        print(kept, end="")
        raise SystemExit(0)  # as a parser does
    with warnings_once(), interrupts() as status:
        with one_line(ValueError):
            if not argv:
                raise ValueError(f"no command is given. Use one of {', '.join(COMMANDS)}, or --help.")
            if argv[0] not in COMMANDS:
                raise ValueError(f"unknown command {argv[0]}. {instead_of(argv[0], COMMANDS)}")
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:], status)
