"""
Trains a team with SHPPO.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

from train_ppo import TEAM, train

from marcog_trl import SHPPOConfig, SHPPOTrainer
from marcog_trl.cli.launch import Recipe


def main():
    train(SHPPOTrainer, SHPPOConfig, recipe=Recipe(("shppo", "ppo"), defaults=TEAM))


if __name__ == "__main__":
    main()
