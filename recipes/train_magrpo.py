"""
Trains a team with MAGRPO, or, with `--advantage rloo | max | none`, with MARLOO, MAReMax or MAREINFORCE.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py

A Qwen2.5-Coder team on CoopHumanEval, in two turns:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py --config recipes/configs/coophumaneval.yaml \\
        --override magrpo.num_turns=2 magrpo.turn_gradient_weights=[1.5,0.5]
"""

from train_ppo import TEAM, train

from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer
from marcog_trl.cli.launch import Recipe


def main():
    sections = ("magrpo", "marloo", "maremax", "mareinforce")
    train(MultiAgentGRPOTrainer, MultiAgentGRPOConfig, recipe=Recipe(sections, defaults=TEAM))


if __name__ == "__main__":
    main()
