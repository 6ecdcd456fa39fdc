"""
`accelerate launch` without the launcher's own traceback: the processes that it starts say why they end.

    python recipes/launch.py --config_file recipes/zero2.yaml recipes/train_shppo.py --seed 1
"""

from __future__ import annotations

import logging
import signal
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from marcog_trl.cli.console import INTERRUPTED


def main() -> None:
    """Launches a script with the flags of `accelerate launch`, and ends with the exit status of the first that failed."""
    logging.disable(logging.ERROR)  # the launcher's own account of a process that failed
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            sys.exit(
                f"error: process {failure.local_rank} was ended by {name}. SIGKILL often means too little memory."
            )
        sys.exit(failure.exitcode)
    except (SignalException, KeyboardInterrupt):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
