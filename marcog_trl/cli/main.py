"""
The command line of the package, `marcog-trl COMMAND` or `python -m marcog_trl COMMAND`.

This module imports no library: they take seconds, in which Ctrl-C already ends with one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from marcog_trl.checks import nearest
from marcog_trl.cli.console import interrupts, warnings_once


# Command -> the module whose `main(argv)` runs it, and what it does
COMMANDS = {
    "solve": ("marcog_trl.cli.solve", "solve a problem with a saved team"),
    "evaluate": ("marcog_trl.cli.evaluate", "measure a saved team, its base model, or any model on problems"),
    "export": ("marcog_trl.cli.export", "write the agents of a saved team as ordinary adapters, and push them"),
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
        SystemExit: With one line, if the command or its flags are wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["--help"], ["-h"]):
        print(_USAGE.format(commands="\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())))
        return 0
    if not argv:
        sys.exit(f"error: no command is given. Use one of {', '.join(COMMANDS)}, or --help.")
    if argv[0] not in COMMANDS:
        near = nearest(argv[0], COMMANDS)
        sys.exit(
            f"error: unknown command {argv[0]}. " + (f"Did you mean {near}?" if near else "See marcog-trl --help.")
        )
    with warnings_once(), interrupts():
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
