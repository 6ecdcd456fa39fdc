"""
Computes what a training run needs, without its weights:

    marcog-trl plan --config recipes/configs/qwen2.5-coder-1.5b.yaml --gpu-memory 24
    marcog-trl plan --config recipes/configs/qwen2.5-coder-7b.yaml --num-processes 8 --zero-stage 3 --prompt-tokens 400

It takes the flags of the training recipes, too. Only the model's configuration is needed, and, to find out how long prompts are,
its tokenizer and the problems. The exit status is 1 if the run does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from marcog_trl.cli.recipe import TEAM, TrainingRecipe
from marcog_trl.execution.__main__ import OneLineParser


if TYPE_CHECKING:
    from marcog_trl.trainers.plan import Machine, Plan, Setup


RECIPES = {
    "shppo": TrainingRecipe("SHPPOTrainer", None, ("shppo", "ppo"), TEAM),
    "ppo": TrainingRecipe("MultiAgentPPOTrainer", None, ("ppo", "iac", "ac", "maac"), TEAM),
    "magrpo": TrainingRecipe(
        "MultiAgentGRPOTrainer", None, ("magrpo", "marloo", "maremax", "mareinforce", "grpo"), TEAM
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs `marcog-trl plan` with these flags. Returns the exit status."""
    parser = OneLineParser(
        prog="marcog-trl plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="YAML file of a training recipe")
    parser.add_argument("--trainer", choices=RECIPES, default="shppo", help="whose recipe (default: shppo)")
    parser.add_argument("--gpu-memory", "--gpu_memory", type=float, help="memory of each GPU, in GiB")
    parser.add_argument("--num-processes", "--num_processes", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument(
        "--zero-stage", "--zero_stage", type=int, default=0, help="DeepSpeed ZeRO: 2 or 3 (default: 0, none)"
    )
    parser.add_argument(
        "--prompt-tokens", "--prompt_tokens", type=int, help="tokens of the longest prompt (default: measured)"
    )
    options, rest = parser.parse_known_args(argv)
    if options.config is not None:
        rest = ["--config", options.config, *rest]
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # libraries print there too
            warnings.simplefilter("ignore", FutureWarning)
            name, plan = make_plan(options, rest)
    except (ValueError, ImportError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    show(name, plan)
    return 1 if plan.fits is False else 0


def make_plan(options: argparse.Namespace, rest: list[str]) -> tuple[str, Plan]:
    """Reads the flags of the recipe, and plans the run. Returns the model's name and the plan."""
    import torch

    from marcog_trl.trainers.plan import Machine

    on_gpu = options.gpu_memory is not None or torch.accelerator.is_available()
    machine = Machine(options.gpu_memory, on_gpu, options.num_processes, options.zero_stage)
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise ValueError(f"prompt_tokens={options.prompt_tokens} must be at least 1. Set --prompt-tokens 512.")
    name, setup = read_setup(RECIPES[options.trainer], rest, machine, options.prompt_tokens)
    return name, setup.plan()


def read_setup(
    recipe: TrainingRecipe, argv: list[str], machine: Machine, prompt_tokens: int | None
) -> tuple[str, Setup]:
    """
    Reads the command line of a recipe.

    Raises:
        ValueError: If a flag is wrong, or the model's configuration, its tokenizer or the problems cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    import marcog_trl
    from marcog_trl.cli.parsing import read_training_arguments
    from marcog_trl.rollout.rehearsal import rehearse, widest_stage
    from marcog_trl.team.base_models import check_model
    from marcog_trl.trainers.argument_checks import check_full_finetuning
    from marcog_trl.trainers.plan import Setup, outline_of
    from marcog_trl.trainers.stages import PROBLEMS_TO_PLAY

    if machine.on_gpu:  # where TRL computes in bfloat16 unless told otherwise
        recipe = replace(recipe, defaults={"bf16": True, **recipe.defaults})
    script, args, model = read_training_arguments(recipe, argv)
    name = model.model_name_or_path
    if name is None:
        raise ValueError("There is no model to plan for. Pass --config file.yaml, or --model_name_or_path NAME.")
    loading: dict[str, Any] = dict(args.model_init_kwargs or {})
    check_model("model_name_or_path", name, tokenizer=False, **loading)
    where = {key: loading[key] for key in ("revision", "trust_remote_code", "cache_dir", "token") if key in loading}
    config = AutoConfig.from_pretrained(name, **where)
    workflow = args.make_workflow()
    outline = outline_of(getattr(marcog_trl, recipe.trainer), args, workflow)
    problems, width, alike = None, widest_stage(workflow), False
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
        prompt_tokens, width, alike = rehearse(
            workflow, problems, tokenizer, args.max_completion_length, args.chat_template_kwargs, args.system_prompt
        )
    outline._check_tree(problems)
    _fit_batches(outline, machine.num_processes)
    quantization = get_quantization_config(model)
    if args.full_finetuning:
        check_full_finetuning(name, args, None, quantization)
    peft_config = outline._adapter_config(name, get_peft_config(model))
    return name, Setup(outline, config, peft_config, machine, prompt_tokens, width, alike, quantization)


def _fit_batches(outline: Any, num_processes: int) -> None:
    """Sets the batch sizes of one process."""
    from marcog_trl.trainers.layout import fit_batches

    args, micro = outline.args, outline.args.per_device_train_batch_size
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
        fit_batches(outline, args, None)
    except ValueError as error:
        raise ValueError(
            f"on each of {num_processes} processes: {error}" if num_processes > 1 else str(error)
        ) from None


def show(name: str, plan: Plan) -> None:
    """Prints a plan."""
    from rich.console import Console
    from rich.table import Table

    from marcog_trl.trainers.plan import CUDA_CONTEXT, GIB, PROCESS

    console, machine, rollout = Console(highlight=False, soft_wrap=True), plan.machine, plan.rollout
    share = plan.trained / plan.parameters
    console.print(
        f"{name}: {plan.parameters / 1e6:,.0f} M parameters; {plan.trained / 1e6:,.1f} M are trained ({share:.1%})"
    )
    console.print(
        f"A rollout has {rollout['problems']} problems, {rollout['rows']} rows, at most {rollout['tokens']:,} tokens and "
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
