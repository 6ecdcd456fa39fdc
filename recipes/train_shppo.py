"""
Trains a team with SHPPO.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py

A Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml
"""

from pathlib import Path

from marcog_trl.cli.recipe import TEAM, TrainingRecipe


RECIPE = TrainingRecipe(
    "SHPPOTrainer",
    default_config=Path(__file__).parent / "configs" / "builtin.yaml",
    sections=("shppo", "ppo"),
    defaults=TEAM,
)

if __name__ == "__main__":
    RECIPE.run()
