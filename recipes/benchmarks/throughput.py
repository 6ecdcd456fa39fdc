"""
Compares the throughput of team trainers with TRL's GRPOTrainer.

    python recipes/benchmarks/throughput.py
    python recipes/benchmarks/throughput.py --shape 1.5b --no-cpu --rows 32 --completion-length 256
    python recipes/benchmarks/throughput.py --case steps --shape 0.5b --rows 16 --generations 2 --kinds shppo
    python recipes/benchmarks/throughput.py --case config --config recipes/configs/qwen2.5-coder-0.5b-cpu.yaml

Every measurement runs in its own process; the trainers take turns, round by round. Rows, prompts, completion lengths, model,
adapter and reward are the same for all, and no reply ends early. The first step of a process warms up. Figures are medians
over all other steps (with `--steps 0`, of the first one); ratios are to GRPOTrainer's median. On CPU, seconds of steps are those
of the processor, so that other load does not count; use one thread.

Phases: `generate` (with the workflow, prompts and decoding), `execute` (waiting for rewards), `log-probs` (passes without
gradient and credit), `update` (everything else: forward, backward, optimizer).

Cases:

* `steps`: GRPOTrainer, MAGRPO, PPO without and with a critic and SHPPO with 2 agents, SHPPO also with 4 and 8, and SHPPO that
  compares agents with the same prompt (`comparing`).
* `execution`: what running code costs a step of the embedded default team on the built-in problems.
* `config`: the first steps of MAGRPO with a file of `recipes/configs`, its own model, problems and reward; with all rows in the
  update, and as it is, without those that have no advantage.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

from common import (
    ON_CPU,
    QUIET,
    RECIPE_FOLDER,
    forget_peak,
    make_parser,
    measure_apart,
    random_model,
    read_options,
    resident_mib,
    same_prompt_team,
    save_model,
    state_mib,
    table,
    take_turns,
    variety,
    write_json,
)


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
    "2 agents, SHPPO, comparing": ("comparing", 2),
}
# Agents here read the same prompt, so that prompts are as long as GRPO's. Most teams' agents do not, and are not compared
TRAINERS = {
    "magrpo": ("MultiAgentGRPO", {}),
    "none": ("MultiAgentPPO", {"critic": "none"}),
    "team": ("MultiAgentPPO", {}),
    "shppo": ("SHPPO", {"behaviour_distance_coef": 0.0}),
    "comparing": ("SHPPO", {}),
}
OURS = sorted(TRAINERS)
# Vocabulary: the embedded tokenizer's, if none is given
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 2},  # to try something out
    "small": {"hidden_size": 256, "intermediate_size": 768, "layers": 4, "heads": 8, "kv_heads": 8},
    "medium": {
        "hidden_size": 512, "intermediate_size": 1536, "layers": 8, "heads": 16, "kv_heads": 16, "vocab_size": 8192,
    },
    # Those of Qwen2.5-Coder
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "vocab_size": 151_936,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocab_size": 151_936,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocab_size": 152_064,
        "tied": False,
    },
}  # fmt: skip


class Clock:
    """Seconds of every optimizer step and of its phases, and the size of the optimizer's state."""

    def __init__(self, trainer):
        from transformers import TrainerCallback

        self.steps, self.optimizer_mib = [], 0.0
        clock = self

        class Steps(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                clock.spent, clock.started = defaultdict(float), clock.now()

            def on_step_end(self, *args, optimizer, **kwargs):
                seconds, spent = clock.now() - clock.started, clock.spent
                clock.optimizer_mib = state_mib(optimizer)
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


class ProcessorClock(Clock):
    """Other load on the machine does not count."""

    def now(self):
        return time.process_time()


def make_model(folder, shape):
    """Saves a random model of that shape, and returns its tokenizer."""
    from transformers import AutoTokenizer

    from marcog_trl.embedded import build_default_model

    tokenizer = AutoTokenizer.from_pretrained(build_default_model())
    save_model(folder, random_model(tokenizer, **SHAPES[shape]), tokenizer)
    return tokenizer


def code_prompt(tokenizer, length):
    """A prompt of that many tokens."""
    words = tokenizer("def f(xs): " + "add one to every number " * 400)["input_ids"]
    return tokenizer.decode(words[:length])


def make_trainer(kind, model, output_dir, prompts, num_agents=1, rank=16, given=None, **settings):
    """
    A trainer with a LoRA: TRL's GRPOTrainer, or one of `TRAINERS`, whose agents all read the same prompt.

    Args:
        kind (`str`): `"grpo"`, or a key of `TRAINERS`.
        model: A model, or the folder of one.
        output_dir (`str`): The trainer's folder.
        prompts (`list[str]`): Prompts of the problems.
        num_agents (`int`, *optional*, defaults to `1`): Size of the team.
        rank (`int`, *optional*, defaults to `16`): Rank of the LoRA.
        given (`dict`, *optional*): Other arguments of the trainer.
        **settings: Fields of the configuration.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    import marcog_trl

    settings = {**QUIET, "output_dir": output_dir, "learning_rate": 1e-5, **settings}
    lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    given = {"train_dataset": Dataset.from_dict({"prompt": prompts}), "peft_config": lora, **(given or {})}
    if kind == "grpo":
        return GRPOTrainer(model, variety, GRPOConfig(**settings), **given)
    name, own = TRAINERS[kind]
    args = getattr(marcog_trl, f"{name}Config")(**settings, **own)
    team = same_prompt_team(num_agents)
    return getattr(marcog_trl, f"{name}Trainer")(model, variety, args, workflow=team, **given)


def measure_steps(kind, num_agents, options):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        prompts = [code_prompt(make_model(folder, options.shape), options.prompt_length)] * 256
        trainer = make_trainer(
            kind,
            folder,
            folder,
            prompts,
            num_agents,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.rows // options.micro_batch,
            num_generations=options.generations,
            max_completion_length=options.completion_length,
            max_steps=options.steps + 1,
            beta=0.02,
            model_init_kwargs={"dtype": options.dtype},
            **(ON_CPU if options.cpu else {}) | {"bf16": options.dtype == "bfloat16"},
        )
        trainer.generation_config.min_new_tokens = options.completion_length
        clock = ProcessorClock(trainer) if options.cpu else Clock(trainer)
        forget_peak()
        trainer.train()
        figures = {"steps": clock.steps[1:] or clock.steps, "optimizer_mib": clock.optimizer_mib}
        if torch.cuda.is_available() and not options.cpu:
            figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        else:
            figures["peak_mib"] = resident_mib("VmHWM")
    return figures


def measure_execution(options):
    """Steps of recipes/train_shppo.py's team."""
    from marcog_trl import SHPPOTrainer
    from marcog_trl.cli.parsing import read_training_arguments
    from marcog_trl.cli.recipe import RECIPES

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--max_steps", str(10 * options.steps + 1), "--output_dir", folder, "--report_to", "none"]
        argv += ["--disable_tqdm", "true", "--eval_strategy", "no", "--save_strategy", "no"]
        script_args, args, model = read_training_arguments(RECIPES["shppo"], argv)
        dataset, _ = script_args.load_splits()
        trainer = SHPPOTrainer(model.model_name_or_path, script_args.reward, args, dataset)
        clock = Clock(trainer)
        trainer.train()
        trainer.executor.close()
    return {"steps": clock.steps[1:]}


def measure_config(all_rows, options):
    """Steps of recipes/train_magrpo.py with a file."""
    from trl import get_peft_config

    from marcog_trl import MultiAgentGRPOTrainer
    from marcog_trl.cli.parsing import read_training_arguments
    from marcog_trl.cli.recipe import RECIPES

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--config", options.config, "--max_steps", str(max(1, options.steps)), "--output_dir", folder]
        argv += ["--report_to", "none", "--disable_tqdm", "true", "--eval_strategy", "no", "--save_strategy", "no"]
        argv += ["--logging_steps", "1", "--use_cpu", str(options.cpu)]
        argv += ["--model_name_or_path", options.model] if options.model else []
        script_args, args, model = read_training_arguments(RECIPES["magrpo"], argv)
        dataset, _ = script_args.load_splits()
        trainer = MultiAgentGRPOTrainer(
            model.model_name_or_path, script_args.reward, args, dataset, peft_config=get_peft_config(model)
        )
        if all_rows:
            trainer.algorithm.skips_rows = False
        trainer.generation_config.min_new_tokens = options.completion_length
        clock = ProcessorClock(trainer) if options.cpu else Clock(trainer)
        trainer.train()
        trainer.executor.close()
        logs = [log for log in trainer.state.log_history if "advantages/zero" in log]
    for step, log in zip(clock.steps, logs, strict=True):
        step |= {"zero": log["advantages/zero"], "tokens": log["ledger/generated_tokens"]}
    return {"steps": clock.steps, "peak_mib": resident_mib("VmHWM")}


def measure(task):
    warnings.filterwarnings("ignore", category=FutureWarning)
    kind, given, settings = task
    options = argparse.Namespace(**settings)
    if kind == "execution":
        return measure_execution(options)
    return measure_config(given, options) if kind == "config" else measure_steps(kind, given, options)


# The process that compares


def run(options, task):
    """One measurement in a process of its own."""
    return measure_apart(__file__, [*task, {name: value for name, value in vars(options).items() if name != "output"}])


def median(steps, phase):
    return statistics.median(step[phase] for step in steps)


def compare_steps(options):
    """A table of all kinds."""
    kinds = {name: task for name, task in KINDS.items() if name == BASE or task[0] in options.kinds}
    figures = take_turns(kinds, options.rounds, lambda task: run(options, task))
    steps = {kind: [step for figure in found for step in figure["steps"]] for kind, found in figures.items()}
    tokens, rows = options.rows * options.completion_length, []
    for kind, own in steps.items():
        speed, peak = tokens / median(own, "step"), statistics.median(figure["peak_mib"] for figure in figures[kind])
        ratios = [f"{median(own, phase) / median(steps[BASE], phase):.2f}" for phase in ("step", "update")]
        seconds = [f"{median(own, phase):.3f}" for phase in ("step", *PHASES)]
        state = figures[kind][0]["optimizer_mib"]
        rows.append([kind, f"{speed:,.1f}", *seconds, f"{peak:,.0f}", f"{state:,.1f}", *ratios])
    print(
        f"{options.shape}, {options.dtype}, {options.rows} rows of {options.prompt_length} + {options.completion_length} tokens\n"
    )
    header = ("", "tokens/s", "step s", *PHASES, "peak MiB", "optimizer MiB", "step ratio", "update ratio")
    print(table(header, *rows), flush=True)
    return figures


def compare_execution(options):
    figure = run(options, ["execution", 2])
    shares = [step["execute"] / step["step"] for step in figure["steps"]]
    print(
        f"Executing rewards on the embedded default: {statistics.median(shares):.1%} of a step (median of {len(shares)}; "
        f"9 of 10 below {statistics.quantiles(shares, n=10)[-1]:.1%}); step {median(figure['steps'], 'step'):.3f} s"
    )
    return figure


def compare_config(options):
    kinds = {"all rows": ["config", True], "rows with an advantage": ["config", False]}
    figures = take_turns(kinds, options.rounds, lambda task: run(options, task))
    rows = []
    for kind, found in figures.items():
        steps = [step for figure in found for step in figure["steps"]]
        seconds = [f"{median(steps, phase):.1f}" for phase in ("step", *PHASES)]
        peak = statistics.median(figure["peak_mib"] for figure in found)
        rows.append(
            [kind, *seconds, f"{median(steps, 'zero'):.2f}", f"{median(steps, 'tokens'):,.0f}", f"{peak:,.0f}"]
        )
    print(table(("", "step s", *PHASES, "without advantage", "tokens", "peak MiB"), *rows), flush=True)
    return figures


def main():
    parser = make_parser(__doc__, rounds=3, steps=4, rows=32, generations=4)
    parser.add_argument("--prompt-length", type=int, default=96)
    parser.add_argument("--completion-length", type=int, default=48)
    parser.add_argument("--micro-batch", type=int, help="rows of a forward and backward pass; default: all")
    parser.add_argument("--case", choices=("steps", "execution", "config", "all"), default="all")
    parser.add_argument(
        "--config", default=str(RECIPE_FOLDER / "configs" / "builtin.yaml"), help="file of --case config"
    )
    parser.add_argument("--model", help="model of --case config in place of the file's")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=OURS, default=OURS, help="which trainers to compare with TRL's")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    options = read_options(parser, measure)
    options.micro_batch = options.micro_batch or options.rows
    options.dtype = options.dtype or ("float32" if options.cpu else "bfloat16")
    largest = max(num_agents for kind, num_agents in KINDS.values() if kind in options.kinds) * options.generations
    if options.rows % largest:
        parser.error(
            f"--rows {options.rows} must be a multiple of {largest}, the rows of a problem. Use --rows {largest}."
        )
    compared = {"steps": compare_steps, "execution": compare_execution, "config": compare_config}
    cases = compared if options.case == "all" else [options.case]
    write_json(options.output, {case: compared[case](options) for case in cases})


if __name__ == "__main__":
    main()
