"""
Writes each agent of a saved team as an ordinary LoRA adapter, and pushes the folder to the Hub. It is `marcog-trl export` as a
script:

    python recipes/export.py --adapter outputs/quickstart --output_dir outputs/team --push user/team

`--help` shows the flags and more examples.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
