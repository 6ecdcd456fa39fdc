"""
Trains a team with MAGRPO, or, with `--advantage rloo | max | none`, with MARLOO, MAReMax or MAREINFORCE.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

from train_ppo import train

from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer


def main():
    train(MultiAgentGRPOTrainer, MultiAgentGRPOConfig)


if __name__ == "__main__":
    main()
