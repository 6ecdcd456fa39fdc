"""
What a run will need, before it starts: parameters, memory, rows, tokens and calls of the evaluator.

The memory of a step is that of [`marcog_trl.trainers.memory`], spread over the processes. Nothing here has weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from peft import PeftConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig
from transformers.training_args import OptimizerNames

from marcog_trl.rollout.prompts import measure_prompts
from marcog_trl.rollout.tree import Tree
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.trainers.algorithm import PROBLEMS_TO_PLAY, Algorithm
from marcog_trl.trainers.memory import (
    ACTIVATIONS,
    CACHE,
    GENERATION,
    GRADIENTS,
    OPTIMIZER,
    REFERENCE,
    UPDATE,
    WEIGHTS,
    DryStep,
    Numerics,
    StepShape,
)


GIB = 2**30
CUDA_CONTEXT = 0.6 * GIB  # what the driver, cuBLAS and Triton take before the first tensor
PROCESS = 0.65 * GIB  # what Python, the libraries, a tokenizer and problems take on a CPU before the first weight
USABLE = 0.95  # of a GPU's memory; the rest is lost in gaps between tensors
# Elements of DeepSpeed's buffers, where its configuration does not say otherwise
REDUCE_BUCKET, LIVE_PARAMETERS = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class Machine:
    """
    What a run is planned for.

    Args:
        gpu_memory (`float`, *optional*): Memory of each GPU, in GiB. Without it, a plan does not say whether the run fits.
        on_gpu (`bool`, *optional*, defaults to `True`): Whether a GPU trains; otherwise it is the CPU.
        num_processes (`int`, *optional*, defaults to `1`): Number of processes, each with a GPU.
        zero_stage (`int`, *optional*, defaults to `0`): Stage of DeepSpeed ZeRO: 0 (none), 2 or 3.
    """

    gpu_memory: float | None = None
    on_gpu: bool = True
    num_processes: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        if self.gpu_memory is not None and not 0 < self.gpu_memory < 1e6:
            raise ValueError(f"gpu_memory={self.gpu_memory} must be the memory of a GPU in GiB, such as 24.")
        if self.num_processes < 1:
            raise ValueError(f"num_processes={self.num_processes} must be at least 1. Set num_processes=1.")
        if self.zero_stage not in (0, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage} is not supported. Set zero_stage=2 or 3, or 0 for none.")

    @property
    def capacity(self) -> float | None:
        """Bytes that tensors can take on a GPU."""
        return None if self.gpu_memory is None else self.gpu_memory * GIB * USABLE - CUDA_CONTEXT


@dataclass(frozen=True)
class Change:
    """
    Settings that need less memory.

    Args:
        settings (`dict[str, Any]`): The settings, beside those of the changes before.
        peak (`int`): Peak with all of them, in bytes.
    """

    settings: dict[str, Any]
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """
    What a run needs.

    Args:
        parameters, trained (`int`): Number of parameters of the base model, and of those that are trained.
        memory (`dict[str, dict[str, int]]`): Bytes on each process by part, at the peaks of its phases.
        rollout (`dict[str, int]`): Of one rollout over all processes: `problems`, `rows`, `tokens` (at most) and
            `evaluations`.
        steps_per_rollout (`float`): Optimizer steps that use a rollout.
        machine ([`Machine`]): What the run is planned for.
        changes (`list[Change]`): What to change so that it fits, in order. Empty if it does.
        notes (`list[str]`): What the figures leave out.
    """

    parameters: int
    trained: int
    memory: dict[str, dict[str, int]]
    rollout: dict[str, int]
    steps_per_rollout: float
    machine: Machine
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The largest number of bytes that tensors take on one process."""
        return peak_of(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the GPU; `None` if its memory is unknown."""
        capacity = self.machine.capacity
        return None if capacity is None else self.peak <= capacity


def peak_of(memory: Mapping[str, Mapping[str, int]]) -> int:
    """The larger sum of the parts."""
    return max(sum(parts.values()) for parts in memory.values())


@dataclass(frozen=True)
class Setup:
    """
    A run to plan.

    Args:
        algorithm ([`Algorithm`]): The trainer's. The batch sizes of its configuration are those of one process.
        config ([`~transformers.PreTrainedConfig`]): Of the base model.
        peft_config ([`~peft.PeftConfig`], *optional*): The adapter. Without one, all weights are trained.
        machine ([`Machine`]): What the run is planned for.
        prompt_tokens (`int`): Tokens of the longest prompt.
        width (`int`): The most agents that speak at the same moment.
        alike (`bool`): Whether some of them read the same prompt.
        quantization ([`~transformers.BitsAndBytesConfig`], *optional*): How the base model is stored.
    """

    algorithm: Algorithm
    config: PreTrainedConfig
    peft_config: PeftConfig | None
    machine: Machine
    prompt_tokens: int
    width: int
    alike: bool
    quantization: BitsAndBytesConfig | None = None

    @property
    def args(self) -> Any:
        return self.algorithm.args

    def with_args(self, **settings: Any) -> Setup:
        """The same run with other settings."""
        algorithm = copy.copy(self.algorithm)
        algorithm.args = copy.copy(algorithm.args)
        for name, value in settings.items():
            setattr(algorithm.args, name, value)
        return replace(self, algorithm=algorithm)

    @property
    def dtype(self) -> torch.dtype:
        """Of the base model's weights."""
        dtype = self._given("dtype")
        if dtype == "auto":
            dtype = self.config.dtype
        if isinstance(dtype, str):
            dtype = vars(torch).get(dtype, dtype)
        if not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"dtype={dtype!r} is not a type of numbers. Set --dtype bfloat16.")
        return dtype or torch.float32

    def _given(self, name: str) -> Any:
        return (self.args.model_init_kwargs or {}).get(name)

    @property
    def rows(self) -> int:
        """Rows of a rollout on one process."""
        return self.args.per_device_train_batch_size * self.args.steps_per_generation

    @property
    def tree(self) -> Tree:
        """The episodes of one problem."""
        return self.algorithm.tree(training=True)

    def shape(self) -> StepShape:
        speaking = self.rows // len(self.tree.slots) * self.width * self.tree.rows_of_slot[-1]
        return StepShape(
            speaking=min(self.rows, max(1, speaking)),
            micro_batch=self.args.per_device_train_batch_size,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.args.max_completion_length,
            accumulates=self.args.gradient_accumulation_steps > 1,
            alike=self.alike,
        )

    def trace(self) -> tuple[DryStep, dict[str, dict[str, int]]]:
        """
        The step, and its memory on one of the processes.

        Raises:
            ValueError: If the model's code cannot run without data.
        """
        with outside_zero3(self.args.deepspeed_plugin):
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(
                    self.config,
                    dtype=self.dtype,
                    trust_remote_code=self.args.trust_remote_code,
                    attn_implementation="eager" if self._given("attn_implementation") == "eager" else None,
                )
            step = DryStep(copy.copy(self.algorithm), base, self.peft_config, self._numerics())
            try:
                memory = step.memory(self.shape())
            except RuntimeError as error:
                raise ValueError(
                    f"A model of type {self.config.model_type!r} in {self.dtype} cannot be planned, since its code needs tensors "
                    f"with data: {' '.join(str(error).split())[:200]}"
                ) from error
            return step, self._shard(step, memory)

    def _numerics(self) -> Numerics:
        mixed = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        deepspeed = self.machine.zero_stage > 0
        trained = mixed if deepspeed else torch.bfloat16 if self.quantization is not None else None
        return Numerics(self.dtype, None if deepspeed else mixed, trained, self.machine.on_gpu, self.quantization)

    def _shard(self, step: DryStep, memory: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Spreads the parts over the processes, and adds what DeepSpeed, DDP and vLLM hold."""
        processes, stage, args = self.machine.num_processes, self.machine.zero_stage, self.args
        size = step.trained_itemsize
        for phase, parts in memory.items():
            if stage:  # with float32 masters
                parts[OPTIMIZER] = (parts.get(OPTIMIZER, 0) * 4 // size + step.trained * 4) // processes
                if phase == UPDATE:
                    parts[GRADIENTS] = step.trained * size // processes
                if stage == 3 or phase == UPDATE:  # ZeRO-2 makes it with the first gradient of a parameter
                    parts["reduce bucket"] = REDUCE_BUCKET * size
            elif processes > 1 and phase == UPDATE:
                parts["buckets of DDP"] = step.trained * size
            if stage == 3:
                whole, live = parts[WEIGHTS], LIVE_PARAMETERS * self.dtype.itemsize
                parts |= {part: parts[part] // processes for part in (WEIGHTS, REFERENCE) if part in parts}
                gathers_all = phase == GENERATION and args.ds3_gather_for_generation
                parts["gathered weights"] = whole if gathers_all else min(whole, live)
        if args.use_vllm:
            for part in (CACHE, ACTIVATIONS):
                memory[GENERATION].pop(part, None)
            if args.vllm_mode == "colocate" and self.machine.gpu_memory is not None:
                share = round(args.vllm_gpu_memory_utilization * self.machine.gpu_memory * GIB)
                for phase in (GENERATION,) if args.vllm_enable_sleep_mode else memory:
                    memory[phase]["vLLM"] = share
        return memory

    def notes(self, step: DryStep) -> list[str]:
        """What the figures leave out."""
        args, notes = self.args, []
        if step.guesses_optimizer:
            notes.append(
                f"optim={OptimizerNames(args.optim).value!r} is counted as AdamW in the precision of what it trains."
            )
        if args.use_vllm and args.vllm_mode == "server":
            notes.append("The memory of the vLLM server, which has GPUs of its own, is left out.")
        elif args.use_vllm:
            notes.append(
                "vLLM holds vllm_gpu_memory_utilization of the GPU; whether that is enough for it is not checked."
            )
        if args.use_transformers_continuous_batching:
            notes.append("Continuous batching takes more memory for its cache than shown, if more is free.")
        if self.quantization is not None and self.quantization.load_in_8bit:
            notes.append("Activations of 8-bit layers are estimated as those of 16-bit layers.")
        if args.deepspeed is not None or (args.fsdp and args.fsdp != []):
            notes.append("Settings of a DeepSpeed file, and FSDP, are not read. Pass --zero_stage.")
        if not self.machine.on_gpu:
            notes.append("On CPU, the C library may keep half as much again. MALLOC_MMAP_THRESHOLD_=65536 avoids it.")
        return notes

    def plan(self) -> MemoryPlan:
        """Plans the run. If it does not fit, looks for what to change."""
        step, memory = self.trace()
        processes, rows_of_problem = self.machine.num_processes, len(self.tree.slots)
        rows = self.rows * processes
        length = self.prompt_tokens + self.args.max_completion_length
        problems = rows // rows_of_problem
        rollout = {
            "problems": problems,
            "rows": rows,
            "tokens": rows * length,
            "evaluations": problems * sum(self.tree.joint_actions),
        }
        steps = self.args.steps_per_generation * self.args.num_iterations / self.args.gradient_accumulation_steps
        plan = MemoryPlan(step.parameters, step.trained, memory, rollout, steps, self.machine, [], self.notes(step))
        return replace(plan, changes=self._changes(plan)) if plan.fits is False else plan

    # What to change

    def _changes(self, plan: MemoryPlan) -> list[Change]:
        """Changes that make the run fit, or as many as there are."""
        capacity = cast(float, self.machine.capacity)
        setup, memory, changes = self, plan.memory, list[Change]()
        while peak_of(memory) > capacity and (found := setup._next_change(memory)) is not None:
            settings, setup = found
            _, memory = setup.trace()
            if changes and changes[-1].settings.keys() == settings.keys():  # halved once more
                changes.pop()
            changes.append(Change(settings, peak_of(memory)))
        return changes

    def _next_change(self, memory: dict[str, dict[str, int]]) -> tuple[dict[str, Any], Setup] | None:
        """The change that costs least, with its settings as a user writes them."""
        args, micro = self.args, self.args.per_device_train_batch_size
        steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
        if self.dtype == torch.float32 and self.machine.on_gpu:
            options = {**(args.model_init_kwargs or {}), "dtype": "bfloat16"}
            return {"dtype": "bfloat16", "bf16": True}, self.with_args(model_init_kwargs=options, bf16=True)
        if sum(memory[GENERATION].values()) < sum(memory[UPDATE].values()):
            if not args.gradient_checkpointing:
                return {"gradient_checkpointing": True}, self.with_args(gradient_checkpointing=True)
            if micro % 2 == 0:
                settings = {"per_device_train_batch_size": micro // 2, "gradient_accumulation_steps": accumulation * 2}
                return settings, self.with_args(**settings, steps_per_generation=steps * 2)
        elif not args.use_vllm and steps % 2 == 0 and self.rows % (2 * len(self.tree.slots)) == 0:
            settings = {"generation_batch_size": self.rows // 2 * self.machine.num_processes}
            return settings, self.with_args(steps_per_generation=steps // 2)
        if self.quantization is not None or self.machine.zero_stage == 3 or args.full_finetuning:
            return None
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=self.dtype)
        return {"load_in_4bit": True}, replace(self, quantization=quantization)


# A run whose model is loaded


def plan_run(
    algorithm: Algorithm,
    base: Any,
    peft_config: PeftConfig | None,
    problems: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    gpu_memory: float | None,
    on_gpu: bool,
) -> MemoryPlan:
    """
    Plans a run of this machine.

    Args:
        algorithm ([`Algorithm`]): The trainer's.
        base ([`~transformers.PreTrainedModel`]): The base model.
        peft_config ([`~peft.PeftConfig`], *optional*): The adapter. Without one, all weights are trained.
        problems (`Iterable[dict]`): Training problems, on which prompts are measured.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        gpu_memory (`float`, *optional*): See [`Machine`].
        on_gpu (`bool`): Whether a GPU trains.

    Returns:
        [`MemoryPlan`].
    """
    args, workflow = copy.copy(algorithm.args), algorithm.workflow
    zero_stage = 0 if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage
    first = list(itertools.islice(problems, PROBLEMS_TO_PLAY))
    measured = measure_prompts(
        workflow, first, tokenizer, args.max_completion_length, args.chat_template_kwargs, args.system_prompt
    )
    described = base.config.to_dict()
    stored = described.pop("quantization_config", None)
    quantization = None if stored is None else BitsAndBytesConfig.from_dict(stored)
    planned = type(algorithm)(args, workflow)
    planned.check(first)
    if peft_config is not None:
        peft_config = copy.deepcopy(peft_config)
        peft_config.inference_mode = False
    machine = Machine(gpu_memory, on_gpu, args.world_size, zero_stage)
    config = type(base.config).from_dict(described)
    setup = Setup(planned, config, peft_config, machine, *measured, quantization)
    loaded = {"dtype": base.dtype, "attn_implementation": base.config._attn_implementation}
    return setup.with_args(model_init_kwargs=loaded).plan()
