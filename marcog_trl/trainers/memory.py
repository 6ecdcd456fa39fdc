"""
How much memory a training step takes, found by running it on tensors without data.

The model's own code runs on fake tensors, which have shapes and dtypes only, and a ledger counts the bytes of those that are
alive. So gradient checkpointing, autocast, adapters, cores, and the architecture itself count as they are. This module knows
nothing of batches and processes: see [`marcog_trl.trainers.plan`].
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    Trainer,
)
from transformers.cache_utils import DynamicLayer
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, add_fused_lm_head

from marcog_trl.team.modules import ATTRIBUTE, ForwardContext
from marcog_trl.trainers.algorithm import Algorithm
from marcog_trl.trainers.ledger import (
    ACTIVATIONS,
    ADAPTER,
    CACHE,
    GRADIENTS,
    LOGITS,
    MODULES,
    OPTIMIZER,
    REFERENCE,
    STATES,
    WEIGHTS,
    Ledger,
)


PHASES = GENERATION, HEAD, UPDATE = "generation", "log-probabilities", "update"


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


class StepTrace:
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
        self._causal_lm = base
        self.model = self._make_policy(base, peft_config)
        self.trained = sum(p.numel() for p in self._trainable())
        self.trained_itemsize = self._trainable()[0].element_size()
        self.guesses_optimizer = False
        head = base.get_output_embeddings()
        quantised = [
            m for m in base.modules() if isinstance(m, nn.Linear) and m is not head and not m.weight.requires_grad
        ]
        self._quantised = [m.weight.numel() for m in quantised] if numerics.quantization is not None else []

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

    def phases(self, shape: StepShape) -> dict[str, dict[str, int]]:
        """Bytes by part, `{phase: {part: bytes}}`, at the peaks of [`PHASES`]."""
        with FakeTensorMode(), Ledger() as ledger:
            self._hold(ledger)
            with ledger.of(OPTIMIZER):
                optimizer = self._step_optimizer()
            generation = self._generation(ledger, shape)
            head, update = self._update(ledger, shape, optimizer)
        return {phase: self._packed(p) for phase, p in zip(PHASES, (generation, head, update), strict=True)}

    def _hold(self, ledger: Ledger) -> None:
        """Replaces the tensors of the model by fake ones. Tied ones stay tied."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        trained = ADAPTER if isinstance(self.model, PeftModel) else WEIGHTS
        if self.args.beta != 0.0 and trained == WEIGHTS:  # TRL's reference is a model of its own, like the policy
            with ledger.of(REFERENCE):
                own = [p for name, p in self._causal_lm.named_parameters() if not name.startswith(f"{ATTRIBUTE}.")]
                self._reference = [torch.empty(p.shape, dtype=p.dtype) for p in own]
        for path, module in self.model.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        kind = trained if tensor.requires_grad else WEIGHTS
                        with ledger.of(MODULES if ATTRIBUTE in path.split(".") else kind):
                            fake: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, tensor.requires_grad)
                        made[id(tensor)] = tensor, fake
                    held[name] = made[id(tensor)][1]  # type: ignore[assignment]

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _step_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer after its first step, when it has its state."""
        cls, options = Trainer.get_optimizer_cls_and_kwargs(self.args, cast(PreTrainedModel, self.model))
        self.guesses_optimizer = not cls.__module__.startswith("torch.")  # others have kernels that need data
        if self.guesses_optimizer:
            cls, options = torch.optim.AdamW, {}
        optimizer = cls(self._trainable(), **options)
        for parameter in self._trainable():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    # Generation

    @torch.no_grad()
    def _generation(self, ledger: Ledger, shape: StepShape) -> dict[str, int]:
        """The larger of the peaks at the prompts and at the last token."""
        rows, replies = shape.speaking, max(2, shape.completion_tokens)
        self.model.eval()
        cache = DynamicCache(config=self.model.config)
        states: list[torch.Tensor] = []
        with self._as_agents(rows, states):
            ledger.forget_peaks()
            self._speak(ledger, cache, rows, shape.prompt_tokens, shape.prompt_tokens)
            prompts = self._parts(ledger.peak, _bytes(cache))
            with ledger.of(STATES):
                if states:
                    states += [states[0].new_empty(rows, replies - 1, states[0].size(-1))]
            _fill(cache, replies - 2)
            ledger.forget_peaks()
            self._speak(ledger, cache, rows, 1, shape.prompt_tokens + replies - 1)
            last = self._parts(ledger.peak, _bytes(cache))
        return max(prompts, last, key=lambda parts: sum(parts.values()))

    def _speak(self, ledger: Ledger, cache: DynamicCache, rows: int, tokens: int, seen: int) -> None:
        """One forward pass of `generate`, and the choice of the next token."""
        args = self.args
        ids, mask = (torch.zeros(rows, size, dtype=torch.long) for size in (tokens, seen))
        output = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        with ledger.of(LOGITS):
            scores = output.logits[:, -1].to(torch.float32, copy=True)
            warpers = LogitsProcessorList()
            if args.temperature != 1.0:
                warpers.append(TemperatureLogitsWarper(args.temperature))
            if args.top_k:
                warpers.append(TopKLogitsWarper(args.top_k))
            if args.top_p < 1.0:
                warpers.append(TopPLogitsWarper(args.top_p))
            if args.min_p is not None:
                warpers.append(MinPLogitsWarper(args.min_p))
            scores = cast(Any, warpers)(ids, scores)
            probabilities = scores.softmax(-1)
            torch.empty_like(probabilities)  # what `torch.multinomial` makes inside

    def _as_agents(self, rows: int, states: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """The team's modules act as in a rollout; `states` receives what the critic keeps."""
        if self.modules is None:
            return nullcontext()
        given = self._rows(rows)
        context = ForwardContext(z=given.get("z"), agent=given.get("agent"), frozen=True)
        if self.modules.value_head is not None and self.algorithm.generates_with_hooks:
            context.states = states
        return self.modules.rows(context)

    # Update

    def _update(
        self, ledger: Ledger, shape: StepShape, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The peaks of a micro-batch's log-probabilities, and of the rest of its forward and backward pass."""
        if self.args.gradient_checkpointing:
            options = {"use_reentrant": False, **(self.args.gradient_checkpointing_kwargs or {})}
            self.model.gradient_checkpointing_enable({**options, "preserve_rng_state": False})
            if isinstance(self.model, PeftModel):
                self.model.enable_input_require_grads()
        self.model.train()
        if shape.accumulates:
            with ledger.of(GRADIENTS):
                for parameter in self._trainable():
                    parameter.grad = torch.zeros_like(parameter)
        else:
            for parameter in self._trainable():
                parameter.register_post_accumulate_grad_hook(ledger.made_gradient)
        ledger.forget_peaks()
        precision = self.numerics.autocast
        with nullcontext() if precision is None else torch.autocast("cpu", precision):
            loss = self._loss(ledger, shape)
        loss.backward()
        del loss
        optimizer.zero_grad()
        return self._parts(ledger.peaks[LOGITS]), self._parts(ledger.peaks[ACTIVATIONS])

    def _loss(self, ledger: Ledger, shape: StepShape) -> torch.Tensor:
        """A loss that uses what the trainer's uses."""
        rows, keep = shape.micro_batch, shape.completion_tokens
        context = self._update_context(shape)
        others = None if context is None else context.other_z
        total = rows + (0 if others is None else len(others))
        ids = torch.zeros(total, shape.prompt_tokens + keep, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        causal_lm = self._causal_lm

        def enter_head(decoder: nn.Module, args: Any, output: Any) -> None:
            ledger.kind = LOGITS
            output[0].register_hook(leave_head)
            states = output.last_hidden_state[:, -keep - 1 : -1]  # the trainer's head sees what predicts replies alone
            output.last_hidden_state = states.reshape(1, -1, states.size(-1))

        def leave_head(gradient: torch.Tensor) -> None:
            ledger.kind = ACTIVATIONS

        handle = causal_lm.get_decoder().register_forward_hook(enter_head)
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

    # Parts

    def _parts(self, peak: Mapping[str, int], cached: int = 0) -> dict[str, int]:
        """The parts of a peak, which may hold tensors of the cache that were new at that moment."""
        parts = {kind: size for kind, size in peak.items() if size}
        parts[ACTIVATIONS] = parts.get(ACTIVATIONS, 0) - cached
        return parts | ({CACHE: cached} if cached else {})

    def _packed(self, parts: dict[str, int]) -> dict[str, int]:
        """With the bytes of quantised weights in place of those that the trace held."""
        quantization = self.numerics.quantization
        if quantization is None:
            return parts
        if quantization.load_in_4bit:  # half a byte, and what scales a block of 64
            scale = 1 / 64 + 4 / 64 / 256 if quantization.bnb_4bit_use_double_quant else 4 / 64
            each = 0.5 + scale
        else:
            each = 1.0
        size = self.numerics.dtype.itemsize
        saved = sum(self._quantised) * (size - each)
        unpacked = max(self._quantised) * size  # one layer at a time, as it is used
        return parts | {
            WEIGHTS: round(parts[WEIGHTS] - saved), ACTIVATIONS: parts.get(ACTIVATIONS, 0) + unpacked
        }  # fmt: skip


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


def _tensors(cache: DynamicCache) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the layers that keep them, by the layer's index."""
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)}
    return {index: cast(Any, (layer.keys, layer.values)) for index, layer in layers.items()}


def _fill(cache: DynamicCache, tokens: int) -> None:
    """Adds tokens to all layers."""
    for index, (keys, values) in _tensors(cache).items():
        size = *keys.shape[:2], tokens
        cache.update(keys.new_empty(*size, keys.size(-1)), values.new_empty(*size, values.size(-1)), index)


def _bytes(cache: DynamicCache) -> int:
    """Bytes of a cache."""
    return sum(tensor.untyped_storage().nbytes() for pair in _tensors(cache).values() for tensor in pair)
