"""
Measures an accelerator, without network or weights: random models of the shapes of Qwen2.5-Coder.

    bash recipes/benchmarks/gpu.sh
    bash recipes/benchmarks/gpu.sh --parts steps generation --shapes 1.5b
    bash recipes/benchmarks/gpu.sh --shapes tiny     # tries it out, also on CPU

Writes `gpu.json` and `gpu.md`, a table, after every measurement. Each has a process of its own. One that fails is noted, and the next
one begins.

Parts:

* `config`: a step of recipes/configs/qwen2.5-coder-1.5b.yaml.
* `steps`: a step and its phases beside TRL's GRPO, with 2, 4 and 8 agents.
* `settings`: without gradient checkpointing, with a larger micro-batch, a 4-bit base, and ZeRO-2.
* `generation`: tokens per second of transformers, of continuous batching, and, where installed, of vLLM.
* `resume`: whether a run that continues from a checkpoint ends with the weights of an uninterrupted one.

Peaks are those of PyTorch's allocator, beside what `python -m marcog_trl plan` computes.
"""

import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from common import (
    RECIPE_FOLDER,
    make_parser,
    random_config,
    read_options,
    save_model,
    table,
    task_command,
    write_json,
)
from throughput import PHASES, SHAPES, Clock, code_prompt, make_trainer


PARTS = ("config", "steps", "settings", "generation", "resume")
STEP = {
    "kind": "shppo", "agents": 2, "micro_batch": 16, "accumulation": 2, "generations": 4, "prompt": 128, "completion": 64,
    "rank": 16, "steps": 2,
}  # fmt: skip
LONGER = {"completion": 128, "micro_batch": 32, "steps": 1}
KINDS = {
    "GRPO (TRL)": {"kind": "grpo", "agents": 1},
    "2 agents, MAGRPO": {"kind": "magrpo"},
    "2 agents, SHPPO": {},
    "4 agents, SHPPO": {"agents": 4},
    "8 agents, SHPPO": {"agents": 8},
}
SETTINGS = {
    "without gradient checkpointing": {"gradient_checkpointing": False},
    "micro-batch of 32": {"micro_batch": 32, "accumulation": 1},
    "4-bit base": {"quantised": True, "needs_accelerator": True},
    "ZeRO-2": {"zero_stage": 2},
}
GENERATION = {
    "transformers, SHPPO": {},
    "transformers, one shared adapter": {"kind": "magrpo"},
    "continuous batching": {
        "kind": "magrpo", "needs_accelerator": True, "options": {"use_transformers_continuous_batching": True},
    },
    "vLLM, one adapter per agent": {
        "needs": "vllm", "needs_accelerator": True, "options": {"use_vllm": True, "latent_scope": "agent", "vllm_gpu_memory_utilization": 0.3},
    },
}  # fmt: skip


def list_cases(parts, shapes):
    """The measurements, in order: name -> task."""
    middle = "1.5b" if "1.5b" in shapes else shapes[0]
    cases = {}
    if "config" in parts:
        cases[f"config, {middle}"] = {"shape": middle, **STEP, **config_settings()}
    for shape in shapes if "steps" in parts else ():
        for name, settings in KINDS.items():
            if shape == middle or ("4 agents" not in name and "8 agents" not in name):
                cases[f"{shape}: {name}"] = {"shape": shape, **STEP, **settings}
    for name, settings in SETTINGS.items() if "settings" in parts else ():
        cases[f"{middle}: {name}"] = {"shape": middle, **STEP, **settings}
    for name, settings in GENERATION.items() if "generation" in parts else ():
        cases[f"{middle}: {name}"] = {"shape": middle, **STEP, **LONGER, **settings}
    return cases | ({"resume": {"part": "resume"}} if "resume" in parts else {})


def config_settings():
    """The settings of the file of the 1.5B model that matter here."""
    import yaml

    of_file = yaml.safe_load((RECIPE_FOLDER / "configs" / "qwen2.5-coder-1.5b.yaml").read_text())
    return {
        "micro_batch": of_file["per_device_train_batch_size"],
        "accumulation": of_file["gradient_accumulation_steps"],
        "generations": of_file["num_generations"],
        "completion": of_file["max_completion_length"],
        "rank": of_file["lora_r"],
        "prompt": 256,
        "steps": 1,
    }


# A step


def make_task_trainer(task, folder, device):
    """The trainer of a task."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from marcog_trl.embedded import make_tokenizer

    tokenizer = make_tokenizer(["def f(xs):\n    return [x + 1 for x in xs]\n", "add one to every number"] * 50, 320)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(random_config(tokenizer, **SHAPES[task["shape"]]), dtype=dtype)
    given, options = {"processing_class": tokenizer}, task.get("options", {})
    settings = {
        "per_device_train_batch_size": task["micro_batch"],
        "gradient_accumulation_steps": task["accumulation"],
        "num_generations": task["generations"],
        "max_completion_length": task["completion"],
        "max_steps": task["steps"] + 1,
        "beta": 0.01,
        "gradient_checkpointing": task.get("gradient_checkpointing", True),
        "bf16": device != "cpu",
        "use_cpu": device == "cpu",
        **options,
    }
    model = save_model(f"{folder}/base", model, tokenizer)  # a team names the folder of its base
    settings["model_init_kwargs"] = {"dtype": dtype}
    if task.get("quantised"):
        given["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    prompts = [code_prompt(tokenizer, task["prompt"])] * 64
    trainer = make_trainer(
        task["kind"], model, folder, prompts, task["agents"], rank=task["rank"], given=given, **settings
    )
    if not trainer.use_vllm:
        trainer.generation_config.min_new_tokens = task["completion"]
    return trainer


def measure_step(task, device):
    """Seconds by phase, the peak of the allocator over all steps but the first, and what the plan says."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_task_trainer(task, folder, device)
        clock = Clock(trainer)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        steps = clock.steps[1:]
    figures = {phase: statistics.median(step[phase] for step in steps) for phase in ("step", *PHASES)}
    if task["kind"] != "grpo" and "needs" not in task:
        figures["plan_gib"] = trainer.plan().peak / 2**30
    if device == "cpu":
        return figures
    free, total = torch.cuda.mem_get_info()
    peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    peaks["outside"] = total - free - torch.cuda.memory_reserved()
    return figures | {f"{name}_gib": size / 2**30 for name, size in peaks.items()}


def measure_resume(device):
    """Largest difference of a weight between four steps, and two steps from the checkpoint after two."""

    def weights(trainer):
        return {name: p.detach().float().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}

    shape = {"shape": "tiny", **STEP, "micro_batch": 8, "prompt": 32, "completion": 16, "steps": 3}
    saves = {"options": {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}}
    with tempfile.TemporaryDirectory() as folder:
        whole = make_task_trainer(shape | saves, folder, device)
        whole.train()
        resumed = make_task_trainer(shape | saves, folder, device)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        first, second = weights(whole), weights(resumed)
    return {"difference": max((first[name] - second[name]).abs().max().item() for name in first)}


def measure(asked):
    """Figures of a task on a device."""
    task, device = asked
    package = "bitsandbytes" if task.get("quantised") else "deepspeed" if task.get("zero_stage") else task.get("needs")
    if package and importlib.util.find_spec(package) is None:
        return {"skipped": f"{package} is not installed"}
    if device == "cpu" and task.get("needs_accelerator"):
        return {"skipped": "needs an accelerator"}
    if task.get("part") == "resume":
        return measure_resume(device)
    return measure_step(task, device)


# The process that compares


def attempt(task, device, seconds, log):
    """The result of [`measure`] in a process of its own, or the reason why there is none."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", RECIPE_FOLDER / "zero2.yaml"]
    python, *command = task_command(__file__, [task, device])
    command = [python, *(launch if task.get("zero_stage") else []), *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    clock = threading.Timer(max(0, seconds), os.killpg, (process.pid, signal.SIGKILL))
    clock.start()
    printed, _ = process.communicate()
    clock.cancel()
    if process.returncode == 0:
        return json.loads(printed.strip().splitlines()[-1])
    late = process.returncode == -signal.SIGKILL
    return {"error": "time was up" if late else f"its process ended with {process.returncode}: see gpu.log"}


def describe_machine(device):
    import torch
    import transformers
    import trl

    name = platform.processor() or "CPU" if device == "cpu" else torch.cuda.get_device_name()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    return {"device": name, "cores": os.cpu_count(), **versions}


def tables(figures):
    """
    The results that are there, in Markdown.

    Args:
        figures (`dict`): `machine`, `tasks` (name -> settings), `results` (name -> figures; seconds and GiB).
    """
    results, tasks = figures["results"], figures["tasks"]
    rows = []
    for name, found in results.items():
        if "step" not in found:
            rows.append([name, ", ".join(f"{key}: {value}" for key, value in found.items())])
            continue
        task, base = tasks[name], f"{name.partition(':')[0]}: GRPO (TRL)"
        tokens = task["micro_batch"] * task["accumulation"] * task["completion"]
        compared = "step" in results.get(base, {}) and task["completion"] == tasks[base]["completion"]
        row = [name, f"{found['step']:.2f}", f"{found['step'] / results[base]['step']:.2f}" if compared else ""]
        row += [*(f"{found[phase]:.2f}" for phase in PHASES), f"{tokens / found['generate']:,.0f}"]
        peak, plan = found.get("peak_gib"), found.get("plan_gib")
        row += ["" if size is None else f"{size:.2f}" for size in (peak, plan)]
        rows.append([*row, "" if peak is None or plan is None else f"{plan / peak:.2f}"])
    header = ("", "step s", "of GRPO's", *PHASES, "tokens/s generated", "peak GiB", "plan GiB", "plan/peak")
    return f"{json.dumps(figures['machine'])}\n\n{table(header, *rows)}\n"


def main():
    parser = make_parser(__doc__, minutes=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu"))
    options = read_options(parser, measure)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    deadline = time.monotonic() + 60 * options.minutes - 10
    options.output_dir.mkdir(parents=True, exist_ok=True)
    tasks = list_cases(options.parts, options.shapes)
    figures = {"machine": describe_machine(device), "tasks": tasks, "results": {}}
    with (options.output_dir / "gpu.log").open("w") as log:
        for name, task in tasks.items():
            figures["results"][name] = attempt(task, device, deadline - time.monotonic(), log)
            print(name, figures["results"][name], flush=True)
            write_json(options.output_dir / "gpu.json", figures)
            (options.output_dir / "gpu.md").write_text(tables(figures))
    print(tables(figures))


if __name__ == "__main__":
    main()
