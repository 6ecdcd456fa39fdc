"""
Trains a team with a reward model that was learned from preferences between its own episodes (MARLHF), in one round or several.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_marlhf.py

Three rounds of a Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_marlhf.py --config recipes/configs/humaneval.yaml --num_rounds 3

The true reward (`reward`) makes the pairs, and is logged beside the reward model with weight 0.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "marlhf", *sys.argv[1:]])
