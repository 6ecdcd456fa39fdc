"""
Trains a team with independent actor-critic: one critic that sees the agent's own row, and advantages `return − V`.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_iac.py

It is MultiAgentPPO with `critic="agent"`, `gamma=1`, `lam=1`, `lam_turn=0` and `num_iterations=1`. With
`--workflow single`, or the settings of a section `ac`, it is a single-agent actor-critic.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "iac", *sys.argv[1:]])
