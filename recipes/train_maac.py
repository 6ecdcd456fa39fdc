"""
Trains a team with multi-agent actor-critic: one critic that also sees what the other agents were asked.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_maac.py

It is MultiAgentPPO with `critic="team"`, `gamma=1`, `lam=1`, `lam_turn=0` and `num_iterations=1`.
"""

from pathlib import Path

from marcog_trl.cli.recipe import TEAM, TrainingRecipe


RECIPE = TrainingRecipe(
    "MultiAgentPPOTrainer",
    default_config=Path(__file__).parent / "configs" / "builtin.yaml",
    sections=("maac", "mappo"),
    defaults=TEAM,
    fixed={"critic": "team", "gamma": 1, "lam": 1, "lam_turn": 0, "num_iterations": 1},
    elsewhere="train_ppo.py",
)

if __name__ == "__main__":
    RECIPE.run()
