"""
Trains a team with MAGRPO, or, with `--advantage rloo | max | none`, with MARLOO, MAReMax or MAREINFORCE.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py

A Qwen2.5-Coder team on CoopHumanEval, in two turns:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_magrpo.py --config recipes/configs/coophumaneval.yaml \\
        --override magrpo.num_turns=2 magrpo.turn_gradient_weights=[1.5,0.5]
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "magrpo", *sys.argv[1:]])
