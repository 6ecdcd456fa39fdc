"""
Throughput of team trainers beside TRL's GRPOTrainer and, where it is installed, CoMLRL.

    python recipes/benchmarks/throughput.py
    python recipes/benchmarks/throughput.py --comlrl-python comlrl/bin/python   # see comlrl.py
    python recipes/benchmarks/throughput.py --shape 1.5b --no-cpu --rows 32 --completion-length 256

Every measurement is a process of its own; the trainers take turns, round by round. Rows, prompts, completion lengths, model,
adapter and reward are the same for all, and no reply ends early. The first step of a process warms up. Figures are medians
over all other steps; ratios are to GRPOTrainer's median.

Phases: `generate` (with the workflow, prompts and decoding), `execute` (waiting for rewards), `log-probs` (passes without
gradient and credit), `update` (everything else: forward, backward, optimizer).

Cases:

* `steps`: GRPOTrainer, MAGRPO, PPO without and with a critic and SHPPO with 2 agents, SHPPO also with 4 and 8; and the
  generation phase beside a loop that only calls the same model with a KV cache and samples, at the same batch.
* `execution`: what running code costs a step of the embedded default team on the built-in problems.
* `comlrl`: MAGRPO with one turn and with a vocabulary of 32,000, as in comlrl.py (with `--comlrl-python` only).
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path


PHASES = ("generate", "execute", "log-probs", "update")
BASE = "GRPO (TRL)"
KINDS = {
    BASE: ("grpo", 1),
    "2 agents, MAGRPO": ("magrpo", 2),
    "2 agents, critic='none'": ("none", 2),
    "2 agents, critic='team'": ("team", 2),
    "2 agents, SHPPO": ("shppo", 2),
    "4 agents, SHPPO": ("shppo", 4),
    "8 agents, SHPPO": ("shppo", 8),
}
# hidden size, MLP size, layers, heads, KV heads, vocabulary (None: the embedded tokenizer's)
SHAPES = {
    "tiny": (64, 128, 2, 2, 2, None),  # to try a benchmark out
    "small": (256, 768, 4, 8, 8, None),
    "medium": (512, 1536, 8, 16, 16, 8192),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
}


class Clock:
    """Seconds of every optimizer step and of its phases."""

    def __init__(self, trainer):
        from transformers import TrainerCallback

        self.steps = []
        clock = self

        class Steps(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                clock.spent, clock.started = defaultdict(float), clock.now()

            def on_step_end(self, *args, **kwargs):
                seconds, spent = clock.now() - clock.started, clock.spent
                inner = spent["generate"] + spent["execute"]
                clock.steps.append(
                    {
                        "step": seconds,
                        "generate": spent["generate"],
                        "execute": spent["execute"],
                        "log-probs": spent["rollout"] - inner,
                        "update": seconds - spent["rollout"],
                    }
                )

        for method, phase in (
            ("_generate", "generate"), ("_calculate_rewards", "execute"), ("_generate_and_score_completions", "rollout"),
        ):  # fmt: skip
            setattr(trainer, method, self.timed(getattr(trainer, method), phase))
        trainer.add_callback(Steps())

    def now(self):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, method, phase):
        def run(*args, **kwargs):
            started = self.now()
            output = method(*args, **kwargs)
            self.spent[phase] += self.now() - started
            return output

        return run


def reward(prompts, completions, **kwargs):
    return [len(set(completion)) / 100 for completion in completions]


def make_team(num_agents):
    """Agents that see the same prompt, so that prompts are as long as GRPO's."""
    from marcog_trl import Agent, Workflow

    class Team(Workflow):
        agents = tuple(Agent(f"agent{i}", f"Write part {i}.") for i in range(num_agents))

        def play(self, problem):
            yield {agent.name: problem["prompt"] for agent in self.agents}

        def solution(self, problem, replies):
            return "".join(replies.values())

    return Team()


def make_model(folder, shape):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from marcog_trl.embedded import load_default_model

    _, tokenizer = load_default_model()
    hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_trainer(kind, num_agents, options, folder):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from marcog_trl import (
        MultiAgentGRPOConfig,
        MultiAgentGRPOTrainer,
        MultiAgentPPOConfig,
        MultiAgentPPOTrainer,
        SHPPOConfig,
        SHPPOTrainer,
    )

    tokenizer = make_model(folder, options.shape)
    words = tokenizer("def f(xs): " + "add one to every number " * 400)["input_ids"]
    dataset = Dataset.from_dict({"prompt": [tokenizer.decode(words[: options.prompt_length])] * 256})
    common = {
        "per_device_train_batch_size": options.rows,
        "num_generations": options.generations,
        "max_completion_length": options.completion_length,
        "generation_kwargs": {"min_new_tokens": options.completion_length},
        "max_steps": options.steps + 1,
        "beta": 0.02,
        "learning_rate": 1e-5,
        "use_cpu": options.cpu,
        "bf16": not options.cpu,
        "model_init_kwargs": {"dtype": "float32" if options.cpu else "bfloat16"},
        "gradient_checkpointing": False,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": folder,
    }
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    if kind == "grpo":
        return GRPOTrainer(folder, reward, GRPOConfig(**common), dataset, peft_config=lora)
    trainer, args = {
        "magrpo": (MultiAgentGRPOTrainer, MultiAgentGRPOConfig),
        "none": (MultiAgentPPOTrainer, lambda **kwargs: MultiAgentPPOConfig(critic="none", **kwargs)),
        "team": (MultiAgentPPOTrainer, MultiAgentPPOConfig),
        "shppo": (SHPPOTrainer, SHPPOConfig),
    }[kind]
    return trainer(folder, reward, args(**common), dataset, peft_config=lora, workflow=make_team(num_agents))


def measure_steps(kind, num_agents, options):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, num_agents, options, folder)
        clock = Clock(trainer)
        trainer.train()
        figures = {"steps": clock.steps[1:]}
        if torch.cuda.is_available() and not options.cpu:
            figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        else:
            figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if kind in ("grpo", "none"):
            figures["bare"] = [bare_loop(trainer, options) for _ in range(options.steps)]
    return figures


def bare_loop(trainer, options):
    """Seconds of sampling with a KV cache and nothing else, at the trainer's batch."""
    import torch
    from transformers import DynamicCache

    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    device = trainer.accelerator.device
    tokens = torch.full((options.rows, options.prompt_length), 5, device=device)
    clock = Clock.now(None)
    cache, written = DynamicCache(), []
    with torch.no_grad(), trainer.accelerator.autocast():
        for _ in range(options.completion_length):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            tokens = torch.multinomial(torch.softmax(logits.float(), -1), 1)
            written.append(tokens)
    torch.cat(written, 1).tolist()
    return Clock.now(None) - clock


def measure_execution(options):
    """Steps of recipes/train_shppo.py's team."""
    from marcog_trl import SHPPOTrainer
    from marcog_trl.cli.parsing import parse

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from train_shppo import RECIPE

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--max_steps", str(10 * options.steps + 1), "--output_dir", folder, "--report_to", "none"]
        argv += ["--disable_tqdm", "true", "--eval_strategy", "no", "--save_strategy", "no"]
        script_args, args, model = parse(RECIPE, argv)
        dataset, _ = script_args.load_splits()
        trainer = SHPPOTrainer(model.model_name_or_path, script_args.reward, args, dataset)
        clock = Clock(trainer)
        trainer.train()
        trainer.close_executor()
    return {"steps": clock.steps[1:]}


# The process that compares


def run(options, task):
    """One measurement in a process of its own."""
    argv = [sys.executable, __file__, "--task", json.dumps(task)]
    for name in ("shape", "rows", "generations", "prompt_length", "completion_length", "steps"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    process = subprocess.run([*argv, "--cpu" if options.cpu else "--no-cpu"], capture_output=True, text=True)
    if process.returncode != 0:
        sys.exit(f"{task}:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def median(steps, phase):
    return statistics.median(step[phase] for step in steps)


def compare_steps(options, console):
    """Tables of all kinds, and of the bare loop."""
    from rich.table import Table

    figures = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, task in KINDS.items():
            figures[kind].append(run(options, task))
    steps = {kind: [step for figure in found for step in figure["steps"]] for kind, found in figures.items()}
    tokens = options.rows * options.completion_length
    title = f"{options.shape}, {options.rows} rows of {options.prompt_length} + {options.completion_length} tokens"
    table = Table("", "tokens/s", "step s", *PHASES, "peak MiB", "step ratio", "update ratio", title=title)
    for kind, own in steps.items():
        table.add_row(
            kind,
            f"{tokens / median(own, 'step'):,.0f}",
            f"{median(own, 'step'):.3f}",
            *(f"{median(own, phase):.3f}" for phase in PHASES),
            f"{statistics.median(figure['peak_mib'] for figure in figures[kind]):,.0f}",
            *(f"{median(own, phase) / median(steps[BASE], phase):.2f}" for phase in ("step", "update")),
        )
    console.print(table)
    table = Table(
        "", "generate s", "bare loop s", "share of its speed", title="generation beside a bare KV-cache loop"
    )
    for kind, found in figures.items():
        bare = [seconds for figure in found for seconds in figure.get("bare", [])]
        if bare:
            own, loop = median(steps[kind], "generate"), statistics.median(bare)
            table.add_row(kind, f"{own:.3f}", f"{loop:.3f}", f"{loop / own:.2f}")
    console.print(table)
    return figures


def compare_execution(options, console):
    figure = run(options, ["execution", 2])
    shares = [step["execute"] / step["step"] for step in figure["steps"]]
    console.print(
        f"Executing rewards on the embedded default: {statistics.median(shares):.1%} of a step (median of {len(shares)}; "
        f"9 of 10 below {statistics.quantiles(shares, n=10)[-1]:.1%}); step {median(figure['steps'], 'step'):.3f} s"
    )
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("steps", "execution", "comlrl", "all"), default="all")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    for name, default in (
        ("rounds", 3), ("steps", 4), ("rows", 32), ("generations", 4), ("prompt-length", 96), ("completion-length", 48),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--comlrl-python", help="interpreter of an environment with CoMLRL; see comlrl.py")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.task is not None:
        kind, num_agents = options.task
        measured = measure_execution(options) if kind == "execution" else measure_steps(kind, num_agents, options)
        print(json.dumps(measured))
        return
    largest = max(num_agents for _, num_agents in KINDS.values()) * options.generations
    if options.rows % largest:
        parser.error(f"--rows {options.rows} does not hold {largest} rows of a problem; {largest} works")
    if options.case == "comlrl" and options.comlrl_python is None:
        parser.error("--comlrl-python is missing; comlrl/bin/python of an environment with comlrl==1.4.3 works")
    from rich.console import Console

    console, results = Console(width=130), {}
    if options.case in ("steps", "all"):
        results["steps"] = compare_steps(options, console)
    if options.case in ("execution", "all"):
        results["execution"] = compare_execution(options, console)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.comlrl_python is not None and options.case in ("comlrl", "all"):
        for case in ("one_turn", "vocabulary"):
            script = [sys.executable, str(Path(__file__).with_name("comlrl.py")), "--case", case, "--batches", "16"]
            subprocess.run([*script, "--comlrl-python", options.comlrl_python], check=True)


if __name__ == "__main__":
    main()
