"""
Trains a team on preferences between its own episodes (MADPO), in one round or several.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_madpo.py

Three rounds of a Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_madpo.py --config recipes/configs/humaneval.yaml --num_rounds 3
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "madpo", *sys.argv[1:]])
