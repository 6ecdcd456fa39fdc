"""
Trains a team with SHPPO.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "shppo", *sys.argv[1:]])
