"""
Measures how fast a critic learns what a prompt is worth, with models of several widths and rewards of several sizes.

    python recipes/benchmarks/critic.py
    python recipes/benchmarks/critic.py --hidden_sizes 64 --rewards 1 --critics team --steps 20
    python recipes/benchmarks/critic.py --evaluations outputs/evaluation.jsonl

Half of the prompts contain an "A", and every reply to them earns the same reward. All other replies earn 0. The model is a random
Qwen2 with two layers, and all settings of the critic are defaults. Measured is the explained variance of the returns: the first
step, on average over 5 steps, from which it is at least 0.9, and its mean over the last 10 steps.

`--evaluations` takes the samples of evaluations (see recipes/evaluate.py), at least two per problem, and says what a critic can explain of
their rewards: one that knows the mean reward W of every problem, ρ = Var(W) / Var(reward), and one that knows nothing but the mean
of three siblings and weights it as well as possible, ρ² / (ρ + (1 − ρ) / 3).
"""

import json
import random
import tempfile
from pathlib import Path
from statistics import fmean, variance

from common import ON_CPU, QUIET, make_parser, measure_apart, random_model, read_options, save_model, table


PROMPTS = 256
BAR = 0.9
WINDOW = 5


def make_problems():
    rng = random.Random(1)
    words = ["".join(rng.choices("BCDEFGH", k=4)) for _ in range(PROMPTS)]
    with_a = [word[:i] + "A" + word[i + 1 :] for word, i in zip(words, rng.choices(range(4), k=PROMPTS), strict=True)]
    return [{"prompt": f"Write {word}."} for pair in zip(words[::2], with_a[1::2], strict=True) for word in pair]


def run(task):
    """The explained variance of every step."""
    from datasets import Dataset

    from marcog_trl import MultiAgentPPOConfig, MultiAgentPPOTrainer
    from marcog_trl.embedded import make_tokenizer

    problems = make_problems()
    tokenizer = make_tokenizer([problem["prompt"] for problem in problems], 261)  # a token per letter
    size = task["hidden_size"]
    model = random_model(
        tokenizer, hidden_size=size, intermediate_size=2 * size, layers=2, heads=max(2, size // 64), kv_heads=2
    )

    def reward(prompts, **kwargs):
        return [task["reward"] * ("A" in prompt) for prompt in prompts]

    with tempfile.TemporaryDirectory() as folder:
        args = MultiAgentPPOConfig(
            folder,
            max_steps=task["steps"],
            critic=task["critic"],
            per_device_train_batch_size=32,
            num_generations=4,
            max_completion_length=8,
            **{**QUIET, **ON_CPU, "logging_steps": 1},
        )
        path = save_model(f"{folder}/model", model, tokenizer)
        trainer = MultiAgentPPOTrainer(path, reward, args, Dataset.from_list(problems))
        trainer.train()
    name = "critic/explained_variance"
    return [log[name] for log in trainer.state.log_history if name in log]


def summary(explained):
    means = [sum(explained[i : i + WINDOW]) / WINDOW for i in range(len(explained) - WINDOW + 1)]
    reached = next((step for step, mean in enumerate(means, WINDOW) if mean >= BAR), None)
    last = explained[-10:]
    return ["not" if reached is None else reached, f"{max(means):.2f}", f"{sum(last) / len(last):.2f}"]


def explainable(path, siblings=3):
    """A row for an evaluation: what critics can explain of the rewards of its samples."""
    records = [json.loads(line)["samples"] for line in path.read_text().splitlines()]
    rewards = [[sample["reward"] for sample in samples] for samples in records]
    if len(rewards) < 2 or len(rewards[0]) < 2:
        raise SystemExit(f"error: {path} needs two problems and two samples of each. Evaluate with --num_samples 8.")
    within = fmean(map(variance, rewards))
    between = max(0.0, variance(map(fmean, rewards)) - within / len(rewards[0]))
    share = between and between / (between + within)
    by_siblings = share and share**2 / (share + (1 - share) / siblings)
    return [
        path,
        len(rewards),
        len(rewards[0]),
        *(f"{x:.3f}" for x in (fmean(map(fmean, rewards)), share, by_siblings)),
    ]


def main():
    parser = make_parser(__doc__, steps=60)
    parser.add_argument("--hidden_sizes", type=int, nargs="+", default=[64, 256, 896])
    parser.add_argument("--rewards", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--critics", nargs="+", choices=("team", "agent"), default=["team", "agent"])
    parser.add_argument(
        "--evaluations", type=Path, nargs="+", metavar="FILE", help="evaluation.jsonl of recipes/evaluate.py"
    )
    options = read_options(parser, run)
    for path in options.evaluations or ():
        if not path.is_file():
            parser.error(f"--evaluations {path} is not a file. Pass the evaluation.jsonl of recipes/evaluate.py.")
    if options.evaluations:
        header = ["evaluation", "problems", "samples", "mean reward", "knows each mean", "knows three siblings"]
        print(table(header, *map(explainable, options.evaluations)))
        return
    rows = []
    for size in options.hidden_sizes:
        for reward in options.rewards:
            for critic in options.critics:
                task = {"hidden_size": size, "reward": reward, "critic": critic, "steps": options.steps}
                rows.append(
                    [size, f"{reward:g}", critic, *summary(measure_apart(__file__, task, OMP_NUM_THREADS="1"))]
                )
    print(table(["hidden size", "reward", "critic", f"at least {BAR}, step", "highest", "last 10 steps"], *rows))


if __name__ == "__main__":
    main()
