"""
Trains one agent with GRPO: the baseline of the teams.

The embedded default, without network or GPU:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py

Qwen2.5-Coder on HumanEval:

    accelerate launch --config_file recipes/zero2.yaml recipes/train_grpo.py --config recipes/configs/humaneval.yaml

It is MultiAgentGRPO with `workflow="single"`, `advantage="mean"` and, unless another is given, `scale_rewards="group"`.
"""

import sys

from marcog_trl.cli.main import main


if __name__ == "__main__":
    main(["train", "grpo", *sys.argv[1:]])
