"""
Computes what a training run needs, without its weights:

    marcog-trl plan --config recipes/configs/qwen2.5-coder-1.5b.yaml --gpu-memory 24
    marcog-trl plan --config recipes/configs/qwen2.5-coder-7b.yaml --num-processes 8 --zero-stage 3 --prompt-tokens 400

It takes the flags of the training recipes, too. Only the model's configuration is needed, and, to find out how long prompts are,
its tokenizer and the problems. The exit status is 1 if the run does not fit.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config, get_quantization_config

import marcog_trl
from marcog_trl.checks import COUNT, check_number
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser, read_training_arguments
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.rollout.prompts import measure_prompts, widest_stage
from marcog_trl.team.base_models import WHERE_FROM, check_model
from marcog_trl.trainers.algorithm import PROBLEMS_TO_PLAY
from marcog_trl.trainers.argument_checks import check_full_finetuning
from marcog_trl.trainers.data import fit_batches
from marcog_trl.trainers.plan import CUDA_CONTEXT, GIB, PROCESS, Machine, MemoryPlan, Setup


@dataclass(kw_only=True)
class PlanArguments:
    """Arguments of `marcog-trl plan` beside those of the recipe; see its `--help`."""

    trainer: Literal["shppo", "ppo", "magrpo"] = field(default="shppo", metadata={"help": "Whose recipe."})
    gpu_memory: float | None = field(default=None, metadata={"help": "Memory of each GPU, in GiB."})
    num_processes: int = field(default=1, metadata={"help": "Number of GPUs."})
    zero_stage: Literal[0, 2, 3] = field(default=0, metadata={"help": "DeepSpeed ZeRO: 2 or 3; 0 for none."})
    prompt_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of the longest prompt. Default: measured on the problems."}
    )

    def __post_init__(self):
        if self.prompt_tokens is not None:
            check_number("prompt_tokens", self.prompt_tokens, COUNT, whole=True, default=512)


def main(argv: Sequence[str], status: RunStatus) -> int:
    """
    Runs `marcog-trl plan` with these flags. Returns the exit status: 1 if the run does not fit.
    """
    with one_line(ValueError, ImportError, OSError):
        parser = Parser(PlanArguments, prog="marcog-trl plan", description=__doc__)
        options, *files, rest = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
        for named in files:  # of --config, which is the recipe's
            rest += ["--config", named.config]
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # libraries print there too
            warnings.simplefilter("ignore", FutureWarning)
            name, plan = make_plan(options, rest)
    show(name, plan)
    return 1 if plan.fits is False else 0


def make_plan(options: PlanArguments, argv: list[str]) -> tuple[str, MemoryPlan]:
    """
    Plans the run of a recipe's command line. Returns the model's name and the plan.

    Raises:
        ValueError: If a flag is wrong, or the model's configuration, its tokenizer or the problems cannot be loaded.
    """
    recipe = replace(RECIPES[options.trainer], default_config=None)
    on_gpu = options.gpu_memory is not None or torch.accelerator.is_available()
    machine = Machine(options.gpu_memory, on_gpu, options.num_processes, options.zero_stage)
    if on_gpu:  # where TRL computes in bfloat16 unless told otherwise
        recipe = replace(recipe, defaults={"bf16": True, **recipe.defaults})
    script, args, model = read_training_arguments(recipe, argv)
    if options.gpu_memory is None and args.use_cpu:
        machine = replace(machine, on_gpu=False)
    name = model.model_name_or_path
    if name is None:
        raise ValueError("There is no model to plan for. Pass --config file.yaml, or --model_name_or_path NAME.")
    loading: dict[str, Any] = dict(args.model_init_kwargs or {})
    check_model("model_name_or_path", name, tokenizer=False, **loading)
    where = {key: loading[key] for key in WHERE_FROM if key in loading}
    config = AutoConfig.from_pretrained(name, **where)
    workflow = args.make_workflow()
    algorithm = getattr(marcog_trl, recipe.trainer).algorithm_class(copy.copy(args), workflow)
    problems, prompt_tokens, width, alike = None, options.prompt_tokens, widest_stage(workflow), False
    if prompt_tokens is None:
        try:
            check_model("model_name_or_path", name, **loading)
            train = script.load(script.dataset_train_split)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{error} Or pass --prompt-tokens 512, to plan without a tokenizer and problems."
            ) from error
        problems = train.select(range(min(PROBLEMS_TO_PLAY, len(train))))
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        prompt_tokens, width, alike = measure_prompts(
            workflow, problems, tokenizer, args.max_completion_length, args.chat_template_kwargs, args.system_prompt
        )
    algorithm.check(problems)
    _fit_batches(algorithm, machine.num_processes)
    quantization = get_quantization_config(model)
    if args.full_finetuning:
        check_full_finetuning(name, args, None, quantization)
    peft_config = algorithm.adapter_config(name, get_peft_config(model))
    setup = Setup(algorithm, config, peft_config, machine, prompt_tokens, width, alike, quantization)
    return name, setup.plan()


def _fit_batches(algorithm: Any, num_processes: int) -> None:
    """Sets the batch sizes of one process."""
    args, micro = algorithm.args, algorithm.args.per_device_train_batch_size
    if num_processes > 1 and args.names_generation_batch:
        rows = micro * num_processes
        if args.generation_batch_size % rows:
            raise ValueError(
                f"generation_batch_size={args.generation_batch_size} is not a multiple of {rows} rows "
                f"(per_device_train_batch_size={micro} x {num_processes} processes). Set generation_batch_size={rows}."
            )
        args.steps_per_generation = args.generation_batch_size // rows
        args.generation_batch_size //= num_processes
    try:
        fit_batches(args, algorithm.tree(training=True), algorithm.tree(training=False))
    except ValueError as error:
        raise ValueError(
            f"on each of {num_processes} processes: {error}" if num_processes > 1 else str(error)
        ) from None


def show(name: str, plan: MemoryPlan) -> None:
    """Prints a plan."""
    console, machine, rollout = Console(highlight=False, soft_wrap=True), plan.machine, plan.rollout
    share = plan.trained / plan.parameters
    console.print(
        f"{name}: {plan.parameters / 1e6:,.0f} M parameters; {plan.trained / 1e6:,.1f} M are trained ({share:.1%})"
    )
    console.print(
        f"A rollout has {rollout['problems']} problem{'' if rollout['problems'] == 1 else 's'}, {rollout['rows']} rows, at most {rollout['tokens']:,} tokens and "
        f"{rollout['evaluations']} evaluator calls. It is used for {plan.steps_per_rollout:g} optimizer step"
        f"{'' if plan.steps_per_rollout == 1 else 's'}."
    )
    where = f"of each of {machine.num_processes} processes" if machine.num_processes > 1 else "at the peak"
    table = Table("", title=f"Memory {where}, GiB", title_justify="left")
    for phase in plan.memory:
        table.add_column(phase, justify="right")
    parts = list(dict.fromkeys(part for phase in plan.memory.values() for part in phase))
    for part in parts:
        sizes = [phase.get(part, 0) / GIB for phase in plan.memory.values()]
        table.add_row(part, *("–" if size == 0 else f"{size:.2f}" for size in sizes))
    table.add_section()
    table.add_row("sum", *(f"{sum(phase.values()) / GIB:.2f}" for phase in plan.memory.values()))
    console.print(table)
    if not machine.on_gpu:
        console.print(
            f"With {PROCESS / GIB:.2f} GiB for Python and its libraries, a process takes {(plan.peak + PROCESS) / GIB:.1f} GiB."
        )
    if machine.gpu_memory is not None:
        verdict = "fits" if plan.fits else "does not fit"
        console.print(
            f"With {CUDA_CONTEXT / GIB:.1f} GiB for CUDA and 5 % for gaps, the peak of {plan.peak / GIB:.1f} GiB {verdict} "
            f"{machine.gpu_memory:g} GiB."
        )
    for change in plan.changes:
        settings = " ".join(f"--{key} {value}" for key, value in change.settings.items())
        console.print(f"  {settings}: {change.peak / GIB:.1f} GiB")
    if plan.fits is False and (not plan.changes or plan.changes[-1].peak > (machine.capacity or 0)):
        console.print(
            "No setting known here makes it fit. Use a smaller model, shorter replies, or more GPUs with ZeRO-3."
        )
    for note in plan.notes:
        console.print(note)
    console.print("Computed, not measured.")
