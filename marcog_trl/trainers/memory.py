"""
How much memory a training step takes: what is held is added up, and what comes and goes is found by a step without data.

The model's own code runs once on fake tensors, which have shapes and dtypes only, and a tracker counts the bytes of those that
are alive. So gradient checkpointing, autocast, adapters, cores, and the architecture itself count as they are. This module knows
nothing of batches and processes: see [`marcog_trl.trainers.plan`].
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig, DynamicCache, PreTrainedModel, Trainer
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, add_fused_lm_head

from marcog_trl.team.modules import ATTRIBUTE, ForwardContext
from marcog_trl.trainers.algorithm import Algorithm


PHASES = GENERATION, UPDATE = "generation", "update"
WEIGHTS, ADAPTER, MODULES = "base weights", "adapter", "critic and latent networks"
GRADIENTS, OPTIMIZER, REFERENCE = "gradients", "optimizer", "reference model"
CACHE, STATES, ACTIVATIONS = "KV cache", "states for the critic", "activations, logits"
# Numbers that an optimizer keeps for each one that it trains
OPTIMIZER_STATES = {torch.optim.AdamW: 2, torch.optim.SGD: 0, torch.optim.RMSprop: 1, torch.optim.Adagrad: 1}


class MemoryTracker(TorchDispatchMode):
    """
    Counts the bytes of the tensors that are made inside the context and are alive. Views count once.

    Attributes:
        live (`int`): Bytes now.
        peak (`int`): The most bytes since the last `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.add(tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, torch.Tensor))
        return output

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that were made outside, or are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def forget_peak(self) -> None:
        """Starts to look for a new peak from what is alive now."""
        self.peak = self.live


@dataclass(frozen=True)
class StepShape:
    """
    The shapes of a step on one process.

    Args:
        speaking (`int`): Rows that are generated at once.
        micro_batch (`int`): Rows of one forward and backward pass.
        prompt_tokens, completion_tokens (`int`): P and T of these rows.
        accumulates (`bool`): Whether gradients of an earlier micro-batch are there when the next one begins.
        alike (`bool`): Whether agents read the same prompt, and SHPPO compares them.
    """

    speaking: int
    micro_batch: int
    prompt_tokens: int
    completion_tokens: int
    accumulates: bool
    alike: bool


@dataclass(frozen=True)
class Numerics:
    """
    The precision of a step, and what computes it.

    Args:
        dtype (`torch.dtype`): Of the base model's weights.
        autocast (`torch.dtype`, *optional*): What the update computes in, if not in the weights' dtype.
        trained_dtype (`torch.dtype`, *optional*): Of everything that is trained, where that is not PEFT's choice.
        on_gpu (`bool`): Whether a GPU computes, where TRL's log-probabilities need less memory than on CPU.
        quantization ([`~transformers.BitsAndBytesConfig`], *optional*): How linear layers are stored.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None
    trained_dtype: torch.dtype | None
    on_gpu: bool
    quantization: BitsAndBytesConfig | None = None


class DryStep:
    """
    A training step without data.

    Args:
        algorithm ([`Algorithm`]): The trainer's algorithm.
        base ([`~transformers.PreTrainedModel`]): The base model on the meta device.
        peft_config ([`~peft.PeftConfig`], *optional*): The adapter. Without one, all weights are trained.
        numerics ([`Numerics`]): See there.

    Attributes:
        parameters, trained (`int`): Number of parameters of the base model, and of those that are trained.
        trained_itemsize (`int`): Bytes of one of the latter.
        guesses_optimizer (`bool`): Whether the state of the optimizer is taken to be AdamW's.
    """

    def __init__(
        self, algorithm: Algorithm, base: PreTrainedModel, peft_config: PeftConfig | None, numerics: Numerics
    ):
        self.algorithm, self.args, self.numerics = cast(Any, algorithm), cast(Any, algorithm.args), numerics
        self.parameters = sum(p.numel() for p in base.parameters())
        self._own_weights = sum(p.nbytes for p in base.parameters())
        self._causal_lm = base
        self.model = self._make_policy(base, peft_config)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.trained, self.trained_itemsize = sum(p.numel() for p in trainable), trainable[0].element_size()
        self._trained_bytes = sum(p.nbytes for p in trainable)
        optimizer, _ = Trainer.get_optimizer_cls_and_kwargs(self.args, cast(PreTrainedModel, self.model))
        self.guesses_optimizer = optimizer not in OPTIMIZER_STATES
        self._optimizer_states = OPTIMIZER_STATES.get(optimizer, OPTIMIZER_STATES[torch.optim.AdamW])

    def _make_policy(self, base: PreTrainedModel, peft_config: PeftConfig | None) -> Any:
        args = self.args
        with torch.device("meta"):
            outputs = ("log_probs", "entropy")
            add_fused_lm_head(base, args.temperature, args.cast_lm_head_to_fp32, outputs)
            model: Any = base if peft_config is None else get_peft_model(base, peft_config)
            modules = self.algorithm.modules = self.algorithm.make_modules(model)
        for parameter in model.parameters():
            if parameter.requires_grad and self.numerics.trained_dtype is not None:
                parameter.data = parameter.data.to(self.numerics.trained_dtype)
        self.modules = modules
        if modules is not None:
            modules.to(dtype=self.numerics.trained_dtype or torch.float32)
            modules.attach(base)
        return model

    def memory(self, shape: StepShape) -> dict[str, dict[str, int]]:
        """Bytes by part, `{phase: {part: bytes}}`, at the peaks of [`PHASES`]."""
        held, unpacked = self._held()
        with FakeTensorMode(), MemoryTracker() as tracker:
            _materialize(self.model)
            found = {GENERATION: self._generation(tracker, shape), UPDATE: self._update(tracker, shape)}
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
        quantization = self.numerics.quantization
        if quantization is None:
            return parts, 0
        # In 4 bits: half a byte, and what scales a block of 64
        scale = 1 / 64 + 4 / 64 / 256 if quantization.bnb_4bit_use_double_quant else 4 / 64
        each, size = 0.5 + scale if quantization.load_in_4bit else 1.0, self.numerics.dtype.itemsize
        head = self._causal_lm.get_output_embeddings()
        linear = [m for m in self._causal_lm.modules() if isinstance(m, nn.Linear) and m is not head]
        quantised = [m.weight.numel() for m in linear if not m.weight.requires_grad]
        parts[WEIGHTS] -= round(sum(quantised) * (size - each))
        return parts, max(quantised) * size

    # Generation

    @torch.no_grad()
    def _generation(self, tracker: MemoryTracker, shape: StepShape) -> dict[str, int]:
        """The larger of the peaks at the prompts and at the last token."""
        rows, replies = shape.speaking, max(2, shape.completion_tokens)
        self.model.eval()
        keeps_states = self.modules is not None and self.modules.value_head is not None
        states = 0
        if keeps_states and self.algorithm.generates_with_hooks:
            states = rows * self.model.config.get_text_config().hidden_size * self.numerics.dtype.itemsize
        with self._as_agents(rows):
            prompts = self._speak(tracker, rows, 0, shape.prompt_tokens) | {STATES: states}
            last = self._speak(tracker, rows, shape.prompt_tokens + replies - 2, 1) | {STATES: states * replies}
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

    def _update(self, tracker: MemoryTracker, shape: StepShape) -> dict[str, int]:
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
        precision = self.numerics.autocast
        with nullcontext() if precision is None else torch.autocast("cpu", precision):
            loss = self._loss(shape)
        loss.backward()
        activations = tracker.peak - before
        # Without those of an earlier micro-batch, gradients take the place of the activations that they are made of
        earlier = self._trained_bytes if shape.accumulates else max(0, self._trained_bytes - activations)
        return {ACTIVATIONS: activations, GRADIENTS: earlier}

    def _loss(self, shape: StepShape) -> torch.Tensor:
        """A loss that uses what the trainer's uses."""
        rows, keep = shape.micro_batch, shape.completion_tokens
        context = self._update_context(shape)
        others = None if context is None else context.other_z
        total = rows + (0 if others is None else len(others))
        ids = torch.zeros(total, shape.prompt_tokens + keep, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        causal_lm = self._causal_lm

        def choose(decoder: nn.Module, args: Any, output: Any) -> None:
            states = output.last_hidden_state[:, -keep - 1 : -1]  # the trainer's head sees what predicts replies alone
            output.last_hidden_state = states.reshape(1, -1, states.size(-1))

        handle = causal_lm.get_decoder().register_forward_hook(choose)
        with nullcontext() if self.modules is None or context is None else self.modules.rows(context):
            if self.numerics.on_gpu:
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

    def _update_context(self, shape: StepShape) -> ForwardContext | None:
        if self.modules is None:
            return None
        rows: dict[str, Any] = {**self._rows(shape.micro_batch), "compares": shape.alike}
        rows |= {"distance_low": torch.zeros(()), "distance_high": torch.ones(())}  # for latent_distance="minmax"
        return self.algorithm.context(rows, shape.completion_tokens, part=0)  # which has the most rows to compare

    def _rows(self, rows: int) -> dict[str, torch.Tensor]:
        """What the team's modules are told of rows."""
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


class TritonHead(torch.autograd.Function):
    """
    What TRL's log-probabilities allocate where Triton computes them: a tile of logits, and statistics of each token.

    Elsewhere TRL's own function runs on fake tensors, but Triton's kernels cannot.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        statistics = hidden.new_empty(8, hidden.size(0), dtype=torch.float32)
        _tile(hidden, weight)
        return statistics[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        summed = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _tile(hidden, weight)
        return summed.to(hidden.dtype), None if of_weight is None else of_weight.to(weight.dtype)


def _tile(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """A tile of logits, and the rows of the head that it is a product with, where these must be cast."""
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
    part = weight[:_CHUNKED_LOGPROB_CHUNK_SIZE].to(dtype)
    tile = hidden.new_empty(min(hidden.size(0), TOKEN_CHUNK_SIZE), part.size(0), dtype=dtype)
    del tile, part
