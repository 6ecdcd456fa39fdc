"""Checks and settings of configurations that do not depend on the algorithm."""

import json
import math
import os
from dataclasses import fields
from typing import Any, cast

import torch
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from marcog_trl.checks import check_choice


def check_mappings(args: Any) -> None:
    """Refuses fields that are neither a mapping nor a mapping in JSON."""
    for name in args._VALID_DICT_FIELDS:  # those of transformers and TRL depend on their versions
        if name in ("accelerator_config", "fsdp_config", "deepspeed"):  # may be a path
            continue
        value = getattr(args, name)
        try:
            mapping = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r} is not valid JSON: {error}.") from None
        if mapping is not None and not isinstance(mapping, dict):
            raise ValueError(f"{name}={value!r} must be a mapping. Use JSON on the command line.")


def use_new_names(args: Any) -> None:
    """Sets transformers' new names of fields to which TRL gives defaults by their old names. Otherwise a warning names the old."""
    known = {f.name for f in fields(args)}  # older transformers have only the old ones
    for kind in ("checkpointing", "checkpointing_kwargs"):
        new, old = f"activation_{kind}", f"gradient_{kind}"
        if new in known and getattr(args, new) is None:
            setattr(args, new, getattr(args, old))


def check_credit(args: Any) -> None:
    """Refuses settings of credit that contradict each other."""
    check_choice("credit", args.credit, ("group", "counterfactual"))
    if args.credit == "group":
        if args.fanout is not None:
            raise ValueError(f"fanout={args.fanout} needs credit='counterfactual'. Set it, or leave fanout out.")
    elif args.fanout is not None and math.prod(args.fanout) != args.num_generations:
        episodes = math.prod(args.fanout)
        raise ValueError(
            f"fanout={list(args.fanout)} plays {episodes} episodes of each problem, but num_generations={args.num_generations}. "
            f"Set num_generations={episodes}."
        )


def check_report_to(args: Any) -> None:
    """Refuses unknown or missing logging integrations. The Trainer would do so only after loading the model."""
    known = sorted(INTEGRATION_TO_CALLBACK)
    # transformers does not say whether these are installed
    available = {"azure_ml", "flyte", *get_available_reporting_integrations()} if args.report_to else set()
    for name in cast(list[str], args.report_to):  # TRL makes it a list
        if name not in known:
            raise ValueError(f"report_to={name!r} is unknown. Use one of {', '.join(known)}, or 'none'.")
        if name not in available:
            raise ValueError(
                f"report_to={name!r} needs the package {name}, which is not installed. Run `pip install {name}`, or set "
                "report_to='none'."
            )


def run_on_cpu(args: Any) -> None:
    """Sets the options for machines without accelerator, so that the same launch configuration runs everywhere."""
    if torch.accelerator.is_available():
        return
    args.dataloader_pin_memory = False  # torch warns that nothing can be pinned
    if args.bf16 is None and not args.fp16:
        args.bf16 = False
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        # With use_cpu, accelerate disables DeepSpeed; without a backend, it does not find the other processes
        args.use_cpu = False
        args.ddp_backend = args.ddp_backend or "gloo"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        # DeepSpeed would compile this faster reduction with a C++ compiler, which may be missing
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        args.use_cpu = True
