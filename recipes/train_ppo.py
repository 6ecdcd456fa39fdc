"""
Trains a team with multi-agent PPO.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_ppo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_ppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "ppo", *sys.argv[1:]])
