"""
Trains one agent with GRPO: the baseline of the teams.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py

Qwen2.5-Coder on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py --config recipes/configs/humaneval.yaml

It is MultiAgentGRPO with `workflow="single"`, `advantage="mean"` and, unless another is given, `scale_rewards="group"`.
"""

from pathlib import Path

from marcog_trl.cli.recipe import TrainingRecipe


RECIPE = TrainingRecipe(
    "MultiAgentGRPOTrainer",
    default_config=Path(__file__).parent / "configs" / "builtin.yaml",
    sections=("grpo",),
    defaults={"scale_rewards": "group"},
    fixed={"workflow": "single", "advantage": "mean"},
    elsewhere="train_magrpo.py",
)

if __name__ == "__main__":
    RECIPE.run()
