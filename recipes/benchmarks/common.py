"""
Shared by the measurements: processes of their own, rounds in which competitors take turns, counters of work and memory, random
models and small teams, and tables. CoMLRL's environment, which has no marcog_trl, imports this file, too.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout


RECIPE_FOLDER = Path(__file__).parents[1]
sys.path.append(str(RECIPE_FOLDER))  # for the training recipes

# Settings of trainers that are measured on CPU: they save, log and report nothing
ON_CPU = {"use_cpu": True, "bf16": False}
QUIET = {
    "gradient_checkpointing": False, "logging_steps": 1000, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def make_parser(doc, **numbers):
    """The parser of a measurement, which says what its docstring says, with a flag for each number and its default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def read_options(parser, measure):
    """The options of a comparison. In a process of [`measure_apart`], it prints what `measure(task)` returns, and ends."""
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        print(json.dumps(measure(options.task)))
        sys.exit()
    return options


def task_command(script, task, python=sys.executable):
    return [python, script, "--task", json.dumps(task)]


def measure_apart(script, task, python=sys.executable, **environment):
    """
    One measurement in a process of its own.

    Args:
        script (`str`): File of the measurement.
        task: What it is to measure, as JSON: the value of its flag `--task`.
        python (`str`, *optional*): The interpreter.
        **environment: Variables of the environment.

    Returns:
        What the last line that the process prints holds, as JSON.
    """
    command = task_command(script, task, python)
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if process.returncode != 0:
        sys.exit(f"{python}, {task}:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


COMLRL_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # or comlrl.py would take the place of the package
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "CUDA_VISIBLE_DEVICES": "",
    # Memory of tensors up to 32 MiB is kept, or its pages are cleared anew for each of them
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}


def versions(python):
    """Versions of what a side is made of."""
    code = (
        "import json, sys, importlib.metadata as m; found = {d.name.lower(): d.version for d in m.distributions()}; "
        "names = ('comlrl', 'marcog-trl', 'trl', 'peft', 'transformers', 'torch'); "
        "print(json.dumps({'python': sys.version.split()[0]} | {name: found[name] for name in names if name in found}))"
    )
    return json.loads(subprocess.run([python, "-P", "-c", code], check=True, capture_output=True, text=True).stdout)


def versions_of_comlrl(parser, python, *packages):
    """Versions in CoMLRL's environment, which must also have some packages."""
    if python is None or shutil.which(python) is None:
        parser.error("--comlrl-python must be bin/python of an environment with comlrl==1.4.3.")
    found = versions(python)
    if missing := {"comlrl", *packages} - found.keys():
        parser.error(
            f"--comlrl-python {python} lacks {', '.join(sorted(missing))}. Install comlrl==1.4.3 and these there."
        )
    return found


def read_sides(parser, measure):
    """The options of a comparison with CoMLRL, the interpreter of either side, and the versions of what it has."""
    parser.add_argument("--comlrl-python", help="interpreter of the virtual environment that has CoMLRL")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    options = read_options(parser, measure)
    pythons = {"comlrl": options.comlrl_python, "ours": sys.executable}
    found = {"comlrl": versions_of_comlrl(parser, options.comlrl_python), "ours": versions(sys.executable)}
    print(found)
    return options, pythons, found


def result_path(folder, unit):
    """Path of the result of a unit of a study, such as "symmetry/shppo/0"."""
    return folder / "units" / f"{unit.replace('/', '-')}.json"


def run_study(script, parser, folder_name, units, run, report):
    """
    The command line of a study. It runs, one after the other, the units that have no result and that no other process is at, each in
    a process of its own, and reports. A unit that failed is run again by the same command.

    Args:
        script (`str`): File of the study.
        parser (`ArgumentParser`): Its flags, with `--output_dir`; those of every study are added.
        folder_name (`Callable`): `folder_name(options)` names the folder of the results in `--output_dir`.
        units (`Callable`): `units(options)` returns the names of the units that are asked for.
        run (`Callable`): `run(name, options)` returns the result of a unit, as JSON. It has one thread, so that figures do not
            depend on the number of cores.
        report (`Callable`): `report(results)` returns what the results say: condition, such as "symmetry/shppo" → list of the
            results of its seeds. It is printed, and written into the folder of the results.
    """
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", default="test", choices=("test", "validation"), help="problems that are measured")
    parser.add_argument("--report", action="store_true", help="run nothing; report the results that are there")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.output_dir / folder_name(options)
    if options.unit is not None:
        import torch

        from marcog_trl.report.results import write_results

        torch.set_num_threads(1)
        write_results(result_path(folder, options.unit), {"unit": options.unit, **run(options.unit, options)})
        return
    failed = [] if options.report else run_missing(script, units(options), folder)
    results = load_results(folder)
    if results:
        text = report(results)
        print(text)
        (folder / "report.md").write_text(f"{text}\n")
    elif not failed:
        sys.exit(f"error: {folder} has no results yet. Run {Path(script).name} without --report to make them.")
    if failed:
        sys.exit(f"error: failed units: {', '.join(failed)}. The same command runs them again.")


def run_missing(script, names, folder):
    """Runs the units of a study that are missing, with the flags of this process, and returns the names of those that failed."""
    failed = []
    for name in names:
        path = result_path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(path.with_suffix(".lock"), timeout=0):
                if path.exists():
                    continue
                print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
                with path.with_suffix(".log").open("w") as log:
                    command = [sys.executable, script, *sys.argv[1:], "--unit", name]
                    if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode != 0:
                        failed.append(name)
                        print(f"{name} failed; its output is in {path.with_suffix('.log')}", file=sys.stderr)
        except Timeout:
            continue
    return failed


def load_results(folder):
    """The results of a study: condition → list of the results of its seeds, in order."""
    results = {}
    for path in sorted(result_path(folder, "unit").parent.glob("*.json")):
        result = json.loads(path.read_text())
        results.setdefault(result["unit"].rpartition("/")[0], []).append(result)
    return results


def take_turns(competitors, rounds, measure):
    """Figures of every competitor, round by round: A, B, A, B, ..."""
    figures = {name: [] for name in competitors}
    for _ in range(rounds):
        for name, task in competitors.items():
            figures[name].append(measure(task))
    return figures


def resident_mib(which):
    """`which`: "VmRSS", what is resident now, or "VmHWM", its peak. (`ru_maxrss` would begin with the peak of the parent.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def forget_peak():
    """Lets the peak of the process begin anew, without what the set-up took."""
    Path("/proc/self/clear_refs").write_text("5")


def state_mib(*optimizers):
    """MiB that optimizers keep for their parameters."""
    import torch

    kept = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    # Others are numbers of steps
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor)) / 2**20


class Work:
    """Counts generated tokens, those after the end of a reply aside, and optimizer steps, whoever makes them."""

    def __init__(self, eos_token_id):
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from transformers import GenerationMixin

        self.tokens = self.updates = 0
        self.optimizers = set()
        generate = GenerationMixin.generate

        def counted(model, *args, **kwargs):
            output = generate(model, *args, **kwargs)
            sequences = output["sequences"] if isinstance(output, dict) else output
            ends = (sequences[:, kwargs["input_ids"].shape[1] :] == eos_token_id).int()
            self.tokens += (ends.cumsum(1) == ends).sum().item()
            return output

        GenerationMixin.generate = counted
        register_optimizer_step_post_hook(self._count_step)

    def _count_step(self, optimizer, *args):
        self.updates += 1
        self.optimizers.add(optimizer)

    def of(self, train):
        """The result of `train`, its time, the peak of the process meanwhile, and the size of the optimizers' state."""
        self.tokens = self.updates = 0
        self.optimizers.clear()
        forget_peak()
        started, started_cpu = time.perf_counter(), time.process_time()
        train()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        return {
            "seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": self.tokens, "updates": self.updates,
            "peak_mib": resident_mib("VmHWM"), "optimizer_mib": state_mib(*self.optimizers),
        }  # fmt: skip


def random_config(
    tokenizer, hidden_size, layers, heads, kv_heads, intermediate_size, vocab_size=None, tied=True, **others
):
    """The configuration of a Qwen2."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=tied,
        **others,
    )


def random_model(tokenizer, **shape):
    """A random Qwen2 of that shape, on CPU."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(random_config(tokenizer, **shape)).to("cpu")


def save_model(folder, model, tokenizer):
    """Saves both, and returns the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def built_once(folder, parts, build):
    """
    The path of a model of a study, which is built unless the folder has it.

    Args:
        folder (`Path`): Where models are kept.
        parts (`list`): What determines the model, as JSON.
        build (`Callable`): `build(target)` writes model and tokenizer.
    """
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    target = (folder / f"model-{key}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            print(f"Building the study's model (once, some minutes) in {target}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                build(f"{draft}/model")
                os.rename(f"{draft}/model", target)
    return str(target)


def same_prompt_team(num_agents):
    """A workflow whose agents see the same prompt, so that prompts are as long as those of a single agent."""
    from marcog_trl import Agent, Workflow

    class Team(Workflow):
        agents = tuple(Agent(f"agent{i}", f"Write part {i}.") for i in range(num_agents))

        def play(self, problem):
            yield {agent.name: problem["prompt"] for agent in self.agents}

        def solution(self, problem, replies):
            return "".join(replies.values())

    return Team()


def variety(prompts, completions, **kwargs):
    """A reward that costs nothing to compute."""
    return [len(set(completion)) / 100 for completion in completions]


def table(header, *rows):
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def with_range(values):
    """Median and range."""
    values = sorted(values)
    return f"{values[len(values) // 2]:.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def write_json(path, figures):
    """Writes the figures, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
