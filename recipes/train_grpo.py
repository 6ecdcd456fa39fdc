"""
Trains one agent with GRPO: the baseline of the teams.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py

Qwen2.5-Coder on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py --config recipes/configs/humaneval.yaml

It is MultiAgentGRPO with `workflow="single"`, `advantage="mean"` and, unless another is given, `scale_rewards="group"`.
"""

from train_ppo import train

from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer
from marcog_trl.cli.launch import Recipe


def main():
    recipe = Recipe(
        ("grpo",),
        defaults={"scale_rewards": "group"},
        fixed={"workflow": "single", "advantage": "mean"},
        elsewhere="train_magrpo.py",
    )
    train(MultiAgentGRPOTrainer, MultiAgentGRPOConfig, recipe=recipe)


if __name__ == "__main__":
    main()
