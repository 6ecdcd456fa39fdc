"""
Measures an accelerator, without network or weights: random models of the shapes of Qwen2.5-Coder.

    bash recipes/benchmarks/gpu.sh
    bash recipes/benchmarks/gpu.sh --parts steps generation --shapes 1.5b
    bash recipes/benchmarks/gpu.sh --shapes tiny     # tries it out, also on CPU

Writes `gpu.json` after every measurement, and `gpu.md` with tables. A measurement that fails is noted, and the next one begins.

Parts:

* `config`: a step of recipes/configs/qwen2.5-coder-1.5b.yaml.
* `steps`: a step and its phases beside TRL's GRPO, with 2, 4 and 8 agents.
* `settings`: without gradient checkpointing, with a larger micro-batch, a 4-bit base, and ZeRO-2.
* `generation`: tokens per second of transformers, of continuous batching, and, where installed, of vLLM.
* `resume`: whether a run that continues from a checkpoint ends with the weights of an uninterrupted one.
* `distributed`: the runs of tests/distributed with one process on the accelerator.
* `sandbox`: programs judged per second on the machine's cores.

Peaks are those of PyTorch's allocator, beside what `python -m marcog_trl plan` computes.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from common import QUIET, RECIPE_FOLDER, make_parser, random_config, same_prompt_team, variety, write_json
from gpu_report import shown, tables
from throughput import PHASES, SHAPES, Clock


PARTS = ("config", "steps", "settings", "generation", "resume", "distributed", "sandbox")
MARK = "@@ "  # begins the lines of a process that are for the one that started it
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
    """What is measured, in order: name -> task."""
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
    others = {"resume": {}, "distributed": {"modes": ["one", "zero2", "zero3"]}, "sandbox": {"programs": 2000}}
    return cases | {part: {"part": part, **task} for part, task in others.items() if part in parts}


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


def make_tokenizer():
    from marcog_trl.embedded import make_tokenizer as train_tokenizer

    return train_tokenizer(["def f(xs):\n    return [x + 1 for x in xs]\n", "add one to every number"] * 50, 320)


def make_model(tokenizer, shape, device):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(random_config(tokenizer, **SHAPES[shape]), dtype=dtype_of(device))


def dtype_of(device):
    import torch

    return torch.float32 if device == "cpu" else torch.bfloat16


def make_args(task, folder, device):
    """The trainer's configuration, and its class."""
    import trl

    from marcog_trl import MultiAgentGRPOConfig, MultiAgentGRPOTrainer, SHPPOConfig, SHPPOTrainer

    settings = QUIET | {
        "output_dir": folder,
        "per_device_train_batch_size": task["micro_batch"],
        "gradient_accumulation_steps": task["accumulation"],
        "num_generations": task["generations"],
        "max_completion_length": task["completion"],
        "generation_kwargs": {"min_new_tokens": task["completion"]},
        "max_steps": task["steps"] + 1,
        "beta": 0.01,
        "learning_rate": 1e-5,
        "gradient_checkpointing": task.get("gradient_checkpointing", True),
        "bf16": device != "cpu",
        "use_cpu": device == "cpu",
        **task.get("options", {}),
    }
    if settings.get("use_vllm"):
        del settings["generation_kwargs"]
    if task["kind"] == "grpo":
        return trl.GRPOTrainer, trl.GRPOConfig(**settings)
    trainers = {"magrpo": (MultiAgentGRPOTrainer, MultiAgentGRPOConfig), "shppo": (SHPPOTrainer, SHPPOConfig)}
    trainer_class, config_class = trainers[task["kind"]]
    return trainer_class, config_class(**settings)


def lora(task):
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=task["rank"], lora_alpha=2 * task["rank"], target_modules="all-linear")


def quantization():
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def make_trainer(task, folder, device):
    from datasets import Dataset

    tokenizer = make_tokenizer()
    words = tokenizer("add one to every number " * 400)["input_ids"]
    dataset = Dataset.from_dict({"prompt": [tokenizer.decode(words[: task["prompt"]])] * 64})
    trainer_class, args = make_args(task, folder, device)
    model, options = make_model(tokenizer, task["shape"], device), {}
    if task.get("quantised") or task.get("options", {}).get("use_vllm"):  # which are loaded from a folder
        model.save_pretrained(f"{folder}/base")
        tokenizer.save_pretrained(f"{folder}/base")
        model, args.model_init_kwargs = f"{folder}/base", {"dtype": dtype_of(device)}
    if task.get("quantised"):
        options["quantization_config"] = quantization()
    if task["kind"] != "grpo":
        options["workflow"] = same_prompt_team(task["agents"])
    return trainer_class(model, variety, args, dataset, processing_class=tokenizer, peft_config=lora(task), **options)


def measure_step(task, device):
    """Seconds by phase, and the peak of the allocator, over all steps but the first."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(task, folder, device)
        clock = Clock(trainer)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        steps = clock.steps[1:]
        figures = {phase: statistics.median(step[phase] for step in steps) for phase in ("step", *PHASES)}
    gib = 2**30
    if device == "cpu":  # whose peak is that of all measurements of this process
        return figures
    figures |= {
        "peak_gib": torch.cuda.max_memory_allocated() / gib,
        "reserved_gib": torch.cuda.max_memory_reserved() / gib,
    }
    free, total = torch.cuda.mem_get_info()
    return figures | {"outside_gib": (total - free - torch.cuda.memory_reserved()) / gib}


def plan_step(task, device):
    """What `python -m marcog_trl plan` says of such a step, in GiB by phase and part."""
    from marcog_trl.trainers.data import fit_batches
    from marcog_trl.trainers.plan import GIB, Machine, Setup

    trainer_class, args = make_args({**task, "options": {}}, "planned", device)
    args.model_init_kwargs = {"dtype": dtype_of(device)}
    algorithm = trainer_class.algorithm_class(args, same_prompt_team(task["agents"]))
    fit_batches(args, algorithm.tree(training=True), algorithm.tree(training=False))
    machine = Machine(on_gpu=device != "cpu", zero_stage=task.get("zero_stage", 0))
    config = random_config(make_tokenizer(), **SHAPES[task["shape"]])
    quantised = quantization() if task.get("quantised") else None
    setup = Setup(algorithm, config, lora(task), machine, task["prompt"], task["agents"], True, quantised)
    plan = setup.plan()
    memory = {phase: {part: size / GIB for part, size in parts.items()} for phase, parts in plan.memory.items()}
    return {"plan_gib": plan.peak / GIB, "plan": memory}


# Other parts


def measure_resume(task, device):
    """Largest difference of a weight between four steps, and two steps from the checkpoint after two."""

    def weights(trainer):
        return {name: p.detach().float().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}

    shape = {"shape": "small", **STEP, "micro_batch": 8, "prompt": 32, "completion": 16, "steps": 3}
    saves = {"options": {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}}
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(shape | saves, folder, device)
        whole.train()
        resumed = make_trainer(shape | saves, folder, device)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        first, second = weights(whole), weights(resumed)
    return {"difference": max((first[name] - second[name]).abs().max().item() for name in first)}


def measure_distributed(task, device):
    """Largest difference of a weight between the modes, each with one process, on recorded rollouts."""
    import torch
    from common import random_model, save_model

    script = RECIPE_FOLDER.parent / "tests" / "distributed" / "train_team.py"
    runs, losses, trained = ("ppo", "agent", "observation", "resumed"), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        model = save_model(f"{folder}/model", random_model(tokenizer, **SHAPES["tiny"]), tokenizer)
        for mode in task["modes"]:
            out = Path(folder, mode)
            out.mkdir()
            launch = ["-m", "accelerate.commands.launch", "--config_file", str(RECIPE_FOLDER / f"{mode}.yaml")]
            command = [sys.executable, *(launch if mode != "one" else []), str(script), model, str(out), *runs]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode:
                losses[mode] = process.stderr[-1500:]
                continue
            trained[mode] = {run: torch.load(out / f"{run}.pt", map_location="cpu") for run in runs}

    def difference(first, second):
        return max((tensor.float() - second[name].float()).abs().max().item() for name, tensor in first.items())

    figures = {"failed": losses} if losses else {}
    for mode, results in trained.items():
        whole, resumed = (results["resumed"][part]["weights"] for part in ("whole", "resumed"))
        figures[f"{mode}, resumed"] = difference(whole, resumed)
        if mode != "one" and "one" in trained:
            figures[f"{mode}, from one process"] = max(
                difference(trained["one"][run]["weights"], results[run]["weights"]) for run in runs[:3]
            )
    return figures


def measure_sandbox(task, device):
    """Programs judged per second with several numbers of workers."""
    from execution import small_jobs

    from marcog_trl.execution import CodeExecutor, available_cores

    jobs, rates = small_jobs(task["programs"]), {}
    cores = available_cores()
    for workers in sorted({1, 2, max(1, cores // 2), cores}):
        with CodeExecutor(num_workers=workers, isolation="best_effort") as executor:
            executor.run(jobs[: 2 * workers])
            started = time.perf_counter()
            verdicts = executor.run(jobs)
            rates[f"{workers} workers"] = len(jobs) / (time.perf_counter() - started)
            assert all(verdict.status == "passed" for verdict in verdicts)
    return {"cores": cores, "isolation": str(executor.isolation), **rates}


def measure(task, device):
    package = task.get("needs")
    package = "bitsandbytes" if task.get("quantised") else "deepspeed" if task.get("zero_stage") else package
    if package and importlib.util.find_spec(package) is None:
        return {"skipped": f"{package} is not installed"}
    if device == "cpu" and task.get("needs_accelerator"):
        return {"skipped": "needs an accelerator"}
    others = {"resume": measure_resume, "distributed": measure_distributed, "sandbox": measure_sandbox}
    return others.get(task.get("part"), measure_step)(task, device)


# The processes


def work(tasks, device, planning):
    """Measures, or plans, one task after the other, and prints a line of JSON for each."""
    import torch

    for name, task in tasks.items():
        print(MARK + json.dumps({"begins": name}), flush=True)
        started = time.perf_counter()
        try:
            found = plan_step(task, device) if planning else measure(task, device)
        except Exception as error:  # whatever it is, the next one begins
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        found["wall_s"] = time.perf_counter() - started
        print(MARK + json.dumps({"name": name, **found}), flush=True)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def run(tasks, options, deadline, record, planning=False):
    """Works on tasks in a process, and in a new one after each that ends it."""
    tasks = dict(tasks)
    while tasks and time.monotonic() < deadline:
        zero = not planning and any(task.get("zero_stage") for task in tasks.values())
        launch = (
            ["-m", "accelerate.commands.launch", "--config_file", str(RECIPE_FOLDER / "zero2.yaml")] if zero else []
        )
        command = [sys.executable, *launch, __file__, "--task", json.dumps([tasks, options.device, planning])]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if planning else {})
        with open(options.output_dir / ("plan.log" if planning else "gpu.log"), "a") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
        clock = threading.Timer(deadline - time.monotonic(), os.killpg, (process.pid, signal.SIGKILL))
        clock.start()
        current = next(iter(tasks))
        for line in process.stdout:
            if line.startswith(MARK):
                said = json.loads(line.removeprefix(MARK))
                current = said.get("begins", current)
                if "name" in said:
                    tasks.pop(current)
                    record(said.pop("name"), said)
        process.wait()
        clock.cancel()
        if current in tasks:
            tasks.pop(current)
            late = time.monotonic() >= deadline
            record(current, {"error": "time was up" if late else f"its process ended with {process.returncode}"})
    for name in tasks:
        record(name, {"error": "not run: time was up"})


def describe_machine(device):
    import torch
    import transformers
    import trl

    name = platform.processor() or "CPU" if device == "cpu" else torch.cuda.get_device_name()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    return {"device": name, "cores": os.cpu_count(), **versions}


def main():
    parser = make_parser(__doc__, minutes=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        work(*options.task)
        return
    import torch

    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    deadline = time.monotonic() + 60 * options.minutes - 10
    shutil.rmtree(options.output_dir, ignore_errors=True)
    options.output_dir.mkdir(parents=True)
    tasks = list_cases(options.parts, options.shapes)
    figures = {"machine": describe_machine(options.device), "tasks": tasks, "results": {}}
    lock = threading.Lock()

    def record(name, found):
        with lock:
            figures["results"].setdefault(name, {}).update(found)
            write_json(options.output_dir / "gpu.json", figures)
            (options.output_dir / "gpu.md").write_text(tables(figures))
            print(name, {key: shown(value) for key, value in found.items() if key != "plan"}, flush=True)

    planned = {
        name: task for name, task in tasks.items() if task.get("kind", "grpo") != "grpo" and "needs" not in task
    }
    planner = threading.Thread(
        target=lambda: run(planned, options, deadline, lambda name, found: record(name, {**found, "wall_s": 0}), True)
    )
    planner.start()
    alone = {name: task for name, task in tasks.items() if task.get("zero_stage")}  # its process is DeepSpeed's
    run({name: task for name, task in tasks.items() if name not in alone}, options, deadline, record)
    run(alone, options, deadline, record)
    planner.join()
    print((options.output_dir / "gpu.md").read_text())


if __name__ == "__main__":
    main()
