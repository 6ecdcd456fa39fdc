"""
Trains a team on preferences between its own episodes (MADPO), in one round or several.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_madpo.py

Three rounds of a Qwen2.5-Coder team on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_madpo.py --config recipes/configs/humaneval.yaml --num_rounds 3
"""

from pathlib import Path

from marcog_trl.cli.recipe import TEAM, TrainingRecipe


RECIPE = TrainingRecipe(
    "MADPOTrainer",
    default_config=Path(__file__).parent / "configs" / "builtin-madpo.yaml",
    sections=("madpo", "madpo_iter"),
    defaults=TEAM,
    module="rounds",
    config_name="IterativeMADPOConfig",
)

if __name__ == "__main__":
    RECIPE.run()
