"""
Measures a team on problems. It is `marcog-trl evaluate` as a script, for `accelerate launch`:

    python recipes/evaluate.py --adapter outputs/quickstart --output outputs/quickstart/evaluation.json
    accelerate launch --config_file recipes/ddp.yaml --num_processes 8 recipes/evaluate.py --adapter outputs/quickstart

Several processes share the problems and give the same figures as one. `--help` shows the flags and more examples.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
