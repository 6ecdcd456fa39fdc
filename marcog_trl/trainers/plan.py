"""
The needs of a run, before it starts: parameters, memory, rows, tokens and calls of the evaluator.

A step without data says what it takes on one process, and the parts are spread over the processes. Nothing here has weights.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, PreTrainedConfig, Trainer
from transformers.training_args import OptimizerNames
from trl.trainer.utils import add_fused_lm_head

from marcog_trl.checks import Count, Range, check_fields
from marcog_trl.rollout.prompts import measure_prompts
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.modules import ATTRIBUTE, ForwardContext
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.trainers.algorithm import PROBLEMS_TO_PLAY, Algorithm
from marcog_trl.trainers.memory import MemoryTracker, TritonHead


GIB = 2**30
CUDA_CONTEXT = 0.6 * GIB  # what the driver, cuBLAS and Triton take before the first tensor
PROCESS = 0.65 * GIB  # what Python, the libraries, a tokenizer and problems take on a CPU before the first weight
USABLE = 0.95  # of a GPU's memory; the rest is lost in gaps between tensors
# Elements of DeepSpeed's buffers, where its configuration does not say otherwise
REDUCE_BUCKET, LIVE_PARAMETERS = 500_000_000, 1_000_000_000
PHASES = GENERATION, UPDATE = "generation", "update"
WEIGHTS, ADAPTER, MODULES = "base weights", "adapter", "critic and latent networks"
GRADIENTS, OPTIMIZER, REFERENCE = "gradients", "optimizer", "reference model"
CACHE, STATES, ACTIVATIONS = "KV cache", "states for the critic", "activations, logits"
# Numbers that an optimizer keeps for each one that it trains
OPTIMIZER_STATES = {torch.optim.AdamW: 2, torch.optim.SGD: 0, torch.optim.RMSprop: 1, torch.optim.Adagrad: 1}


@dataclass(frozen=True)
class Machine:
    """
    The machine that a run is planned for.

    Args:
        gpu_memory (`float`, *optional*): Memory of each GPU, in GiB. Without it, a plan does not say whether the run fits.
        on_gpu (`bool`, *optional*, defaults to `True`): Whether a GPU trains; otherwise it is the CPU.
        num_processes (`int`, *optional*, defaults to `1`): Number of processes, each with a GPU.
        zero_stage (`int`, *optional*, defaults to `0`): Stage of DeepSpeed ZeRO: 0 (none), 2 or 3.
    """

    gpu_memory: Annotated[float, Range(0, 1e6, above=True)] | None = None
    on_gpu: bool = True
    num_processes: Count = 1
    zero_stage: Literal[0, 2, 3] = 0

    def __post_init__(self) -> None:
        check_fields(self)

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
    The memory that a run needs.

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
        dtype = self.given("dtype")
        if dtype == "auto":
            dtype = self.config.dtype
        if isinstance(dtype, str):
            dtype = vars(torch).get(dtype, dtype)
        if not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"dtype={dtype!r} is not a type of numbers. Set --dtype bfloat16.")
        return dtype or torch.float32

    def given(self, name: str) -> Any:
        """The arguments that the model is loaded with."""
        return (self.args.model_init_kwargs or {}).get(name)

    @property
    def rows(self) -> int:
        """Rows of a rollout on one process."""
        return self.args.per_device_train_batch_size * self.args.steps_per_generation

    @property
    def tree(self) -> Tree:
        """The episodes of one problem."""
        return self.algorithm.tree(training=True)

    @property
    def speaking(self) -> int:
        """Rows that are generated at once."""
        speaking = self.rows // len(self.tree.slots) * self.width * self.tree.rows_of_slot[-1]
        return min(self.rows, max(1, speaking))

    def trace(self) -> tuple[DryStep, dict[str, dict[str, int]]]:
        """
        The step, and its memory on one of the processes.

        Raises:
            ValueError: If the model's code cannot run without data.
        """
        with outside_zero3(self.args.deepspeed_plugin):
            try:
                step = DryStep(self)
                return step, self._shard(step, step.memory())
            except RuntimeError as error:
                raise ValueError(
                    f"A model of type {self.config.model_type!r} in {self.dtype} cannot be planned, since its code needs tensors "
                    f"with data: {' '.join(str(error).split())[:200]}"
                ) from error

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
        """Remarks on what the figures leave out."""
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
        if args.share_prompts:
            notes.append("Prompts are counted for each row. With share_prompts=True, the update is smaller.")
        if self.quantization is not None and self.quantization.load_in_8bit:
            notes.append("Activations of 8-bit layers are estimated as those of 16-bit layers.")
        if args.deepspeed is not None or (args.fsdp and args.fsdp != []):
            notes.append("Settings of a DeepSpeed file, and FSDP, are not read. Pass --zero_stage.")
        if not self.machine.on_gpu:
            notes.append(
                "On CPU, the C library may keep half as much again. MALLOC_MMAP_THRESHOLD_=65536 avoids it, but makes steps slower."
            )
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


# A step without data


class DryStep:
    """
    A training step without data: what is held is added up, and what comes and goes is found by running the model's own code on fake
    tensors. So gradient checkpointing, autocast, adapters, cores, and the architecture itself count as they are.

    Args:
        setup ([`Setup`]): The run.

    Attributes:
        parameters, trained (`int`): Number of parameters of the base model, and of those that are trained.
        trained_itemsize (`int`): Bytes of one of the latter.
        guesses_optimizer (`bool`): Whether the state of the optimizer is taken to be AdamW's.
    """

    def __init__(self, setup: Setup):
        self.setup, self.args = setup, setup.args
        self.algorithm: Any = copy.copy(setup.algorithm)
        mixed = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        deepspeed = setup.machine.zero_stage > 0
        self._autocast = None if deepspeed else mixed
        # Of everything that is trained, where that is not PEFT's choice
        trained_dtype = mixed if deepspeed else torch.bfloat16 if setup.quantization is not None else None
        with torch.device("meta"):
            base: Any = AutoModelForCausalLM.from_config(
                setup.config,
                dtype=setup.dtype,
                trust_remote_code=self.args.trust_remote_code,
                attn_implementation="eager" if setup.given("attn_implementation") == "eager" else None,
            )
            self.parameters = sum(p.numel() for p in base.parameters())
            self._own_weights = sum(p.nbytes for p in base.parameters())
            self._causal_lm = base
            add_fused_lm_head(base, self.args.temperature, self.args.cast_lm_head_to_fp32, ("log_probs", "entropy"))
            self.model: Any = base if setup.peft_config is None else get_peft_model(base, setup.peft_config)
            self.modules: Any = self.algorithm.make_modules(self.model)
            self.algorithm.modules = self.modules
            if self.modules is not None:
                self.modules.to(dtype=torch.float32)
                self.modules.attach(base)
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            for parameter in trainable if trained_dtype is not None else ():
                parameter.data = parameter.data.to(trained_dtype)
        self.trained, self.trained_itemsize = sum(p.numel() for p in trainable), trainable[0].element_size()
        self._trained_bytes = sum(p.nbytes for p in trainable)
        optimizer, _ = Trainer.get_optimizer_cls_and_kwargs(self.args, cast(Any, self.model))
        self.guesses_optimizer = optimizer not in OPTIMIZER_STATES
        self._optimizer_states = OPTIMIZER_STATES.get(optimizer, OPTIMIZER_STATES[torch.optim.AdamW])

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by part, `{phase: {part: bytes}}`, at the peaks of [`PHASES`]."""
        held, unpacked = self._held()
        with FakeTensorMode(), MemoryTracker() as tracker:
            _materialize(self.model)
            found = {GENERATION: self._generation(tracker), UPDATE: self._update(tracker)}
        for parts in found.values():
            parts[ACTIVATIONS] += unpacked
        return {phase: {part: size for part, size in (held | parts).items() if size} for phase, parts in found.items()}

    def _held(self) -> tuple[Counter[str], int]:
        """Bytes that are there all the time, by part, and those of a quantised layer as it is used."""
        parts: Counter[str] = Counter()
        trained = ADAPTER if isinstance(self.model, PeftModel) else WEIGHTS
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            part = MODULES if ATTRIBUTE in name.split(".") else trained if tensor.requires_grad else WEIGHTS
            parts[part] += tensor.nbytes
        if self.args.beta != 0.0 and trained == WEIGHTS:  # TRL's reference is a model of its own, like the policy
            parts[REFERENCE] = self._own_weights
        parts[OPTIMIZER] = self._optimizer_states * self._trained_bytes
        quantization = self.setup.quantization
        if quantization is None:
            return parts, 0
        # In 4 bits: half a byte, and what scales a block of 64
        scale = 1 / 64 + 4 / 64 / 256 if quantization.bnb_4bit_use_double_quant else 4 / 64
        each, size = 0.5 + scale if quantization.load_in_4bit else 1.0, self.setup.dtype.itemsize
        head = self._causal_lm.get_output_embeddings()
        linear = [m for m in self._causal_lm.modules() if isinstance(m, nn.Linear) and m is not head]
        quantised = [m.weight.numel() for m in linear if not m.weight.requires_grad]
        parts[WEIGHTS] -= round(sum(quantised) * (size - each))
        return parts, max(quantised) * size

    # Generation

    @torch.no_grad()
    def _generation(self, tracker: MemoryTracker) -> dict[str, int]:
        """The larger of the peaks at the prompts and at the last token."""
        rows, prompt, replies = self.setup.speaking, self.setup.prompt_tokens, max(2, self.args.max_completion_length)
        self.model.eval()
        keeps_states = self.modules is not None and self.modules.value_head is not None
        states = 0
        if keeps_states and self.algorithm.generates_with_hooks:
            states = rows * self.model.config.get_text_config().hidden_size * self.setup.dtype.itemsize
        with self._as_agents(rows):
            prompts = self._speak(tracker, rows, 0, prompt) | {STATES: states}
            last = self._speak(tracker, rows, prompt + replies - 2, 1) | {STATES: states * replies}
        return max(prompts, last, key=lambda parts: sum(parts.values()))

    def _speak(self, tracker: MemoryTracker, rows: int, seen: int, tokens: int) -> dict[str, int]:
        """One forward pass of `generate` on tokens that follow those that were seen, and the choice of the next token."""
        before, cache = tracker.live, DynamicCache(config=self.model.config)
        if seen:
            self._read(cache, rows, 0, seen)
        tracker.forget_peak()
        logits = self._read(cache, rows, seen, tokens)
        scores = logits.to(torch.float32, copy=True)
        if self.args.temperature != 1.0 or self.args.top_k or self.args.top_p < 1.0 or self.args.min_p is not None:
            scores, _ = scores / 2, scores.sort()  # top_p sorts, and takes the most of what changes scores
        probabilities = scores.softmax(-1)
        torch.empty_like(probabilities)  # what `torch.multinomial` makes inside
        del logits, scores, probabilities
        cached = tracker.live - before
        return {CACHE: cached, ACTIVATIONS: tracker.peak - before - cached}

    def _read(self, cache: DynamicCache, rows: int, seen: int, tokens: int) -> torch.Tensor:
        """Returns the logits of the last token."""
        ids, mask = (torch.zeros(rows, length, dtype=torch.long) for length in (tokens, seen + tokens))
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]

    def _as_agents(self, rows: int) -> AbstractContextManager[Any]:
        """The team's modules act as in a rollout."""
        if self.modules is None:
            return nullcontext()
        given = self._rows(rows)
        return self.modules.rows(ForwardContext(z=given.get("z"), agent=given.get("agent"), frozen=True))

    # Update

    def _update(self, tracker: MemoryTracker) -> dict[str, int]:
        """The peak of the forward and backward pass of a micro-batch."""
        if self.args.gradient_checkpointing:
            options = {"use_reentrant": False, **(self.args.gradient_checkpointing_kwargs or {})}
            self.model.gradient_checkpointing_enable({**options, "preserve_rng_state": False})
            if isinstance(self.model, PeftModel):
                self.model.enable_input_require_grads()
        self.model.train()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        before = tracker.live
        tracker.forget_peak()
        precision = self._autocast
        with nullcontext() if precision is None else torch.autocast("cpu", precision):
            loss = self._loss()
        loss.backward()
        activations = tracker.peak - before
        # Without those of an earlier micro-batch, gradients take the place of the activations that they are made of
        earlier = (
            self._trained_bytes
            if self.args.gradient_accumulation_steps > 1
            else max(0, self._trained_bytes - activations)
        )
        return {ACTIVATIONS: activations, GRADIENTS: earlier}

    def _loss(self) -> torch.Tensor:
        """A loss that uses what the trainer's uses."""
        rows, keep = self.args.per_device_train_batch_size, self.args.max_completion_length
        context = self._update_context(rows, keep)
        others = None if context is None else context.other_z
        total = rows + (0 if others is None else len(others))
        ids = torch.zeros(total, self.setup.prompt_tokens + keep, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        causal_lm = self._causal_lm

        def choose(decoder: nn.Module, args: Any, output: Any) -> None:
            states = output.last_hidden_state[:, -keep - 1 : -1]  # the trainer's head sees what predicts replies alone
            output.last_hidden_state = states.reshape(1, -1, states.size(-1))

        handle = causal_lm.get_decoder().register_forward_hook(choose)
        with nullcontext() if self.modules is None or context is None else self.modules.rows(context):
            if self.setup.machine.on_gpu:
                hidden = causal_lm.get_decoder()(**inputs, use_cache=False).last_hidden_state
                per_token = TritonHead.apply(hidden[0], causal_lm.get_output_embeddings().weight)
            else:
                labels = ids[:, -keep:].reshape(1, -1)
                per_token = self.model(**inputs, shift_labels=labels, fused_lm_head=True).log_probs
        handle.remove()
        losses = [per_token]
        if context is not None:
            losses += [x for x in (context.values, context.latent_loss, context.inference_loss) if x is not None]
        return torch.stack([loss.sum().float() for loss in losses]).sum()

    def _update_context(self, micro_batch: int, keep: int) -> ForwardContext | None:
        if self.modules is None:
            return None
        rows: dict[str, Any] = {**self._rows(micro_batch), "compares": self.setup.alike}
        rows |= {"distance_low": torch.zeros(()), "distance_high": torch.ones(())}  # for latent_distance="minmax"
        return self.algorithm.context(rows, keep, part=0)  # which has the most rows to compare

    def _rows(self, rows: int) -> dict[str, torch.Tensor]:
        """The rows, as the team's modules see them."""
        args, agents = self.args, len(self.algorithm.agents)
        hidden = self.model.config.get_text_config().hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.modules.value_head is not None:
            shapes["critic_state"] = (rows, hidden)
        settings = self.algorithm.describe()
        if settings.get("parameter_sharing") == "separate":
            shapes["agent"] = (rows,)
        if settings.get("parameter_sharing") == "latent":
            latent, seen = args.latent_size, (rows, agents, 2 * hidden)
            shapes |= {
                "z": (rows, latent),
                "other_z": (rows, latent),
                "team_obs": seen,
                "team_eps": (rows, agents, latent),
            }
            shapes |= {"team_live": (rows, agents), "team_return": (rows,)}
            if args.policy_gradient_to_latent:
                shapes |= {"obs": (rows, 2 * hidden), "eps": (rows, latent)}
        made = {name: torch.zeros(size) for name, size in shapes.items()}
        return {name: tensor.long() if name == "agent" else tensor for name, tensor in made.items()}


def _materialize(model: nn.Module) -> None:
    """Replaces tensors on the meta device by those of the mode. Tied ones stay tied."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[id(tensor)] = tensor, new
                held[name] = made[id(tensor)][1]  # type: ignore[assignment]


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
    zero_stage: Any = 0 if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage
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
