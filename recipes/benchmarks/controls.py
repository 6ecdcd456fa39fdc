"""
Controls of the quickstart: nothing can be learned, so figures should not rise.

    python recipes/benchmarks/controls.py zero       # a learning rate of 0
    python recipes/benchmarks/controls.py shuffled   # rewards shuffled across the episodes of a batch

Further flags are those of recipes/train_magrpo.py. The solved share of either must rise by less than 5 points.
"""

import random

from common import make_parser
from train_magrpo import RECIPE

from marcog_trl import execution_reward
from marcog_trl.cli.train import train


_rng = random.Random(0)


def shuffled_execution_reward(prompts, completions, **kwargs):
    rewards = execution_reward(prompts, completions, **kwargs)
    _rng.shuffle(rewards)
    return rewards


shuffled_execution_reward.needs_tests = True


def main():
    parser = make_parser(__doc__)
    parser.add_argument("control", choices=("zero", "shuffled"), help="a learning rate of 0, or rewards shuffled")
    parser.add_argument("--output_dir", "--save_dir", help="default: outputs/control-zero or outputs/control-shuffled")
    options, argv = parser.parse_known_args()
    argv += ["--advantage", "none", "--output_dir", options.output_dir or f"outputs/control-{options.control}"]
    if options.control == "zero":
        train(RECIPE, [*argv, "--learning_rate", "0"])
    else:
        train(RECIPE, argv, reward_funcs=shuffled_execution_reward)


if __name__ == "__main__":
    main()
