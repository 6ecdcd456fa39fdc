"""
One agent with TRL's own `GRPOTrainer`, and a reward that runs the tests of MBPP:

    accelerate launch recipes/examples/plain_grpo.py
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.rewards import execution_reward


def as_problem(row):
    text = f"{row['text']} The function must pass this test: {row['test_list'][0]}"
    return {"prompt": [{"role": "user", "content": text}], "test": row["test_list"]}


if __name__ == "__main__":
    problems = load_dataset("google-research-datasets/mbpp", split="train").map(as_problem)
    trainer = GRPOTrainer("Qwen/Qwen2.5-Coder-0.5B-Instruct", execution_reward, GRPOConfig("outputs/grpo"), problems)
    trainer.train()
