"""
What a training step of a team costs beside TRL's GRPOTrainer: equal rows, prompts, completion lengths, model and reward.

    python recipes/benchmarks/step_cost.py

Trainers take turns in one process, a few steps each, for several rounds; the table has medians over all steps, and their
ratios to GRPO's.
"""

import argparse
import statistics
import tempfile
import time
import warnings

from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from marcog_trl import Agent, MultiAgentPPOConfig, MultiAgentPPOTrainer, SHPPOConfig, SHPPOTrainer, Workflow
from marcog_trl.embedded import load_default_model


warnings.filterwarnings("ignore", category=FutureWarning)


class Pair(Workflow):
    """Two agents that see the same prompt, so that prompts are as long as GRPO's."""

    agents = (Agent("first", "Write the first half."), Agent("second", "Write the second half."))

    def play(self, problem):
        yield {agent.name: problem["prompt"] for agent in self.agents}

    def solution(self, problem, replies):
        return replies["first"] + replies["second"]


class Clock(TrainerCallback):
    """Wall-clock seconds of every step, and of its update: what is not generation and scoring."""

    def __init__(self, trainer):
        self.steps, self.updates, self.rollout = [], [], 0.0
        generate_and_score = trainer._generate_and_score_completions

        def timed(inputs):
            started = time.perf_counter()
            output = generate_and_score(inputs)
            self.rollout += time.perf_counter() - started
            return output

        trainer._generate_and_score_completions = timed
        trainer.add_callback(self)

    def on_step_begin(self, *args, **kwargs):
        self.rollout, self.started = 0.0, time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        seconds = time.perf_counter() - self.started
        self.steps.append(seconds)
        self.updates.append(seconds - self.rollout)


def reward(prompts, completions, **kwargs):
    return [len(set(completion)) / 100 for completion in completions]


def make_trainers(options):
    _, tokenizer = load_default_model()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 32,
        num_key_value_heads=options.hidden_size // 32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    folder = tempfile.mkdtemp()
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt = "def f(xs): " + "add one to every number " * 200
    prompt = tokenizer.decode(tokenizer(prompt)["input_ids"][: options.prompt_length])
    dataset = Dataset.from_dict({"prompt": [prompt] * 256})
    common = {
        "per_device_train_batch_size": options.rows,
        "num_generations": options.generations,
        "max_completion_length": options.completion_length,
        "generation_kwargs": {"min_new_tokens": options.completion_length},
        "max_steps": options.steps + 1,
        "beta": 0.02,
        "learning_rate": 1e-5,
        "use_cpu": options.cpu,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": folder,
    }
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    kinds = {
        "GRPO (TRL)": lambda: GRPOTrainer(folder, reward, GRPOConfig(**common), dataset, peft_config=lora),
        "team, critic='none'": lambda: MultiAgentPPOTrainer(
            folder, reward, MultiAgentPPOConfig(critic="none", **common), dataset, peft_config=lora, workflow=Pair()
        ),
        "team, critic='team'": lambda: MultiAgentPPOTrainer(
            folder, reward, MultiAgentPPOConfig(**common), dataset, peft_config=lora, workflow=Pair()
        ),
        "SHPPO": lambda: SHPPOTrainer(
            folder, reward, SHPPOConfig(**common), dataset, peft_config=lora, workflow=Pair()
        ),
    }
    return kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rounds", 5), ("steps", 4), ("rows", 32), ("generations", 4), ("prompt_length", 96), ("completion_length", 48),
        ("hidden_size", 256), ("layers", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    kinds = make_trainers(options)
    steps, updates = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, make in kinds.items():
            trainer = make()
            clock = Clock(trainer)
            trainer.train()
            steps[kind] += clock.steps[1:]  # the first one warms up
            updates[kind] += clock.updates[1:]
    base = "GRPO (TRL)"
    print(f"{options}\n{'':22} {'step s':>8} {'ratio':>6} {'update s':>9} {'ratio':>6}")
    for kind in kinds:
        step, update = statistics.median(steps[kind]), statistics.median(updates[kind])
        ratios = step / statistics.median(steps[base]), update / statistics.median(updates[base])
        print(f"{kind:22} {step:8.3f} {ratios[0]:6.2f} {update:9.3f} {ratios[1]:6.2f}")


if __name__ == "__main__":
    main()
