"""
Trains a team with multi-agent actor-critic: one critic that also sees what the other agents were asked.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_maac.py

It is MultiAgentPPO with `critic="team"`, `gamma=1`, `lam=1`, `lam_turn=0` and `num_iterations=1`.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "maac", *sys.argv[1:]])
