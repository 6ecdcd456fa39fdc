"""Configuration that all multi-agent trainers share."""

import json
import os
import warnings
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from trl import GRPOConfig

from marcog_trl.checks import COUNT, NOT_NEGATIVE, POSITIVE, UNIT, Range, check_choice, check_numbers
from marcog_trl.team.settings import PlaySettings


# TRL checks these while it trains
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
GENERATION_MODES = (
    GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE
)  # fmt: skip
VLLM_IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class MultiAgentConfig(PlaySettings, GRPOConfig):
    """
    Configuration of [`MultiAgentTrainer`]. Only what differs from [`~trl.GRPOConfig`] is restated.

    One row of a batch is one reply of one agent, so `per_device_train_batch_size`, `generation_batch_size` and
    `per_device_eval_batch_size` count replies. A generation batch holds whole problems on every process: a multiple of
    `num_generations` × the workflow's slots. With one slot, as in `"single"`, it holds them over all processes together,
    as in TRL. Where neither `generation_batch_size` nor `steps_per_generation` is given, the smallest fitting one is
    chosen; the same holds for `per_device_eval_batch_size=None`.

    Args:
        > Parameters that control the team

        workflow (`str`, *optional*, defaults to `"single"`):
            Built-in workflow: `"single"`, `"collaboration"`, `"pipeline"`, `"discussion"` or `"classeval"`. Ignored if the
            trainer is given a workflow.
        num_turns (`int`, *optional*, defaults to `1`):
            Rounds of the whole team, separated by feedback.
        num_agents (`int`, *optional*):
            Number of agents, for workflows that allow any. Defaults to the workflow's own.
        roles (`dict[str, str]`, *optional*):
            Role texts that replace agents' own, by agent name.
        class_split (`str`, *optional*):
            Who writes which methods with `workflow="classeval"`: `"random"`, `"pick"` or `"one"` (see [`ClassTeam`]).
        centralized (`bool`, *optional*, defaults to `False`):
            Whether one agent writes the parts of all agents of the workflow in one reply (see [`Centralized`]).
        feedback (`str`, *optional*, defaults to `"level_feedback"`):
            What agents are told between turns: `"level_feedback"`, `"level_passed"`, `"passed"`, `"plain"` or
            `"expert_edits"` (see [`Rounds`]; a function of your own goes to the workflow).
        expert_model, expert_base_url (`str`, *optional*):
            Model and endpoint that `feedback="expert_edits"` asks, through the `openai` client; the key is taken from the
            environment variable `OPENAI_API_KEY`.
        visible_tests (`int`, *optional*, defaults to `1`):
            How many tests feedback may show; a negative number counts from the end, 0 shows all.

        > Parameters that control credit

        gamma_turn (`float`, *optional*, defaults to `1.0`):
            Discount per turn, in [0, 1].
        reward_scale, reward_shift (`float`, *optional*, default to `1.0` and `0.0`):
            What the sum of all rewards of a turn is multiplied with, and what is then added to it. `rewards/…` in the log
            are before it, `agents/…/reward` after it.
        on_reward_error (`str`, *optional*, defaults to `"raise"`):
            What becomes of a reward function that raises, returns something else than one finite number (or dict, or
            `None`) per episode, or takes longer than `reward_timeout`: `"raise"` stops the run, on all processes;
            `"mask"` leaves the episodes of that call out of the update, warns of the first one, and logs their share as
            `rewards/failed`. Workers that cannot be started stop the run in any case.
        reward_timeout (`float`, *optional*):
            Seconds that a call of a coroutine reward function may take before it is cancelled. Other functions are not
            limited; rewards that run tests have `execution_timeout`. Without it there is no limit.
        agent_loss_weighting (`str`, *optional*, defaults to `"agent"`):
            `"agent"` gives every agent the same weight in the loss whatever it writes; `"token"` leaves the weight to
            the number of its tokens (or rows, with `loss_type="grpo"`).
        turn_weights (`list[float]`, *optional*):
            Weight of each turn in the policy and value losses, one per turn, none negative. All turns weigh 1 by default.

        early_termination_threshold (`float`, *optional*):
            An episode whose turn earned more than this, in reward units and averaged over agents, has no further turn.
            Episodes are never ended early by default.

        > Parameters that control the curriculum

        curriculum_column (`str`, *optional*):
            Column of the training problems, such as a difficulty or a source, whose values make up stages. Without it all
            problems are drawn from the start.
        curriculum_stages (`list[str]`, *optional*):
            Values of each stage, in order; `"easy+medium"` joins two. Defaults to all values in ascending order.
        curriculum_steps (`list[int]`, *optional*):
            Optimizer steps at which the second and later stages begin.
        curriculum_pass_rate (`float`, *optional*):
            Share of tests passed, averaged over `curriculum_window` generation batches, at which the next stage begins.
        curriculum_window (`int`, *optional*, defaults to `8`):
            See `curriculum_pass_rate`.

        > Parameters that control code execution

        num_workers (`int`, *optional*):
            Worker processes that execute code. Defaults to this process's share of the cores.
        execution_timeout (`float`, *optional*, defaults to `10.0`):
            Wall-clock limit of one program, in seconds.
        execution_memory_mb (`int`, *optional*, defaults to `512`):
            Memory limit of one program, in MiB.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` refuses to start where the kernel cannot confine programs, `"best_effort"` uses what there is,
            `"none"` is for trusted code.

        > Parameters that control generation

        merge_for_generation (`bool`, *optional*, defaults to `False`):
            Whether the adapter is added to a copy of the adapted weights while agents generate: a pass then costs what the
            base model's costs. In bfloat16 the sums are rounded, so that the policy that samples is not quite the one that
            is trained, as with vLLM. For policies that the agents share; not for quantised bases, nor ZeRO-3.

        > Parameters that control the report

        write_report (`bool`, *optional*, defaults to `False`):
            Whether `report.html` and `pictures/*.png` are written into `output_dir`, at every save and at the end (see
            [`ReportCallback`]).
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "roles"]
    _scales_rewards: ClassVar[bool] = False  # whether scale_rewards means anything
    _ranges: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps generation_batch_size "
            "steps_per_generation num_generations num_generations_eval num_iterations max_completion_length "
            "ref_model_sync_steps vllm_tensor_parallel_size vllm_max_model_length "
            "torch_empty_cache_steps dataloader_prefetch_factor ddp_timeout "
            "curriculum_window".split(),
            COUNT,
        ),
        **dict.fromkeys(
            "temperature repetition_penalty delta sapo_temperature_neg sapo_temperature_pos save_steps "
            "vllm_server_timeout vllm_importance_sampling_clip_max reward_timeout".split(),
            POSITIVE,
        ),
        **dict.fromkeys(
            "num_train_epochs learning_rate warmup_steps weight_decay adam_epsilon neftune_noise_alpha logging_steps "
            "eval_steps eval_delay save_total_limit eval_accumulation_steps dataloader_num_workers top_k beta epsilon "
            "epsilon_high vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef entropy_coef_min "
            "entropy_coef_max entropy_coef_delta entropy_target router_aux_loss_coef off_policy_mask_threshold "
            "vllm_importance_sampling_clip_min turn_weights curriculum_steps num_completions_to_print".split(),
            NOT_NEGATIVE,
        ),
        **dict.fromkeys("min_p ref_model_mixup_alpha gamma_turn curriculum_pass_rate".split(), UNIT),
        **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Range(0, 1, below=True)),
        **dict.fromkeys(("top_p", "top_entropy_quantile", "vllm_gpu_memory_utilization"), Range(0, 1, above=True)),
        **dict.fromkeys(("seed", "data_seed"), Range(0, 2**32 - 1)),
        **dict.fromkeys(("vllm_server_port", "vllm_group_port"), Range(1, 65535)),
        "max_steps": Range(-1),
        "max_grad_norm": Range(0, infinite=True),
        **PlaySettings.play_ranges,
    }

    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of the policy's adapter."})
    num_generations: int = field(
        default=4, metadata={"help": "Episodes per problem. 1 is allowed where no group baseline is needed."}
    )
    num_generations_eval: int | None = field(default=1, metadata={"help": "Episodes per problem in evaluation."})
    per_device_eval_batch_size: int | None = field(  # type: ignore[assignment]  # `None` until the trainer knows rows
        default=None,
        metadata={
            "help": "Rows per process in an evaluation step. `None` takes the smallest that holds 8 rows and whole problems."
        },
    )
    save_steps: float | None = field(  # type: ignore[assignment]  # likewise
        default=None,
        metadata={
            "help": "Optimizer steps between checkpoints. `None` takes the first number from 500 on at which a run "
            "resumes exactly, that is, at the end of a generation cycle."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Has no effect: credit is computed by the trainer. TRL's other values are accepted with a warning."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Without dropout, the ratio of new to old probabilities is exactly 1 before the first update."
        },
    )

    # Parameters that control credit
    gamma_turn: float = field(default=1.0, metadata={"help": "Discount per turn, in [0, 1]."})
    reward_scale: float = field(default=1.0, metadata={"help": "What the reward of a turn is multiplied with."})
    reward_shift: float = field(default=0.0, metadata={"help": "What is then added to it."})
    on_reward_error: str = field(
        default="raise",
        metadata={
            "help": "What becomes of a reward function that fails: 'raise' stops the run, 'mask' leaves the episodes out."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds that a call of a coroutine reward function may take. Default: no limit."},
    )
    agent_loss_weighting: str = field(
        default="agent",
        metadata={
            "help": "'agent': every agent has the same weight in the loss. 'token': the weight follows the number of "
            "its tokens (rows, with loss_type='grpo')."
        },
    )

    turn_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each turn in the policy and value losses, such as 1.5 0.5."}
    )

    # Parameters that control the curriculum
    curriculum_column: str | None = field(
        default=None, metadata={"help": "Column whose values make up stages, such as a difficulty or a source."}
    )
    curriculum_stages: list[str] | None = field(
        default=None,
        metadata={"help": "Values of each stage, such as easy easy+medium hard. Default: all, ascending."},
    )
    curriculum_steps: list[int] | None = field(
        default=None, metadata={"help": "Optimizer steps at which the second and later stages begin."}
    )
    curriculum_pass_rate: float | None = field(
        default=None, metadata={"help": "Share of tests passed at which the next stage begins."}
    )
    curriculum_window: int = field(
        default=8, metadata={"help": "Generation batches over which curriculum_pass_rate is averaged."}
    )

    # Parameters that control generation
    merge_for_generation: bool = field(
        default=False, metadata={"help": "Whether the adapter is merged into a copy of the weights for generation."}
    )

    # Parameters that control the report
    write_report: bool = field(
        default=False, metadata={"help": "Whether report.html and pictures of the run are written into output_dir."}
    )

    def __post_init__(self):
        check_numbers(self, self._ranges)
        self._check_mappings()
        if self.max_steps == 0:
            raise ValueError("max_steps=0 trains nothing. Set max_steps=1, or max_steps=-1 to train num_train_epochs.")
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs} trains nothing. Set num_train_epochs=1.")
        if not torch.accelerator.is_available():
            self._run_on_cpu()
        # The workflow's number of slots is known to the trainer only, which completes what is left open here
        self.auto_generation_batch = self.generation_batch_size is None and self.steps_per_generation is None
        self.auto_eval_batch = self.per_device_eval_batch_size is None
        self.auto_save_steps = self.save_steps is None
        if self.auto_save_steps:
            self.save_steps = 500
        if self.num_generations_eval is None:
            self.num_generations_eval = self.num_generations
        if self.auto_eval_batch:
            self.per_device_eval_batch_size = self.num_generations_eval
        num_generations = self.num_generations
        if self.auto_generation_batch:
            # GRPOConfig checks the batch against num_generations alone: the trainer checks it against whole problems
            self.generation_batch_size, batch_size = None, self.per_device_train_batch_size
            self.num_generations = max(2, num_generations)
            self.per_device_train_batch_size = batch_size * self.num_generations
            super().__post_init__()
            self.per_device_train_batch_size = batch_size
            self.generation_batch_size //= self.num_generations
        elif num_generations == 1:
            # One generation per problem, which GRPOConfig refuses, is checked as two in twice the batch
            self.num_generations = 2
            self.per_device_train_batch_size *= 2
            if self.generation_batch_size is not None:
                self.generation_batch_size *= 2
            super().__post_init__()
            self.per_device_train_batch_size //= 2
            self.generation_batch_size //= 2
        else:
            super().__post_init__()
        self.num_generations = num_generations

        self._check_report_to()
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        check_choice("vllm_mode", self.vllm_mode, ("colocate", "server"))
        check_choice(
            "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, VLLM_IMPORTANCE_SAMPLING_MODES
        )
        self.check_play()
        check_choice("agent_loss_weighting", self.agent_loss_weighting, ("agent", "token"))
        check_choice("on_reward_error", self.on_reward_error, ("raise", "mask"))
        if not self._scales_rewards:
            check_choice("scale_rewards", self.scale_rewards, ("none", "group", "batch"))
        if not self._scales_rewards and self.scale_rewards != "none":
            warnings.warn(
                f"scale_rewards={self.scale_rewards!r} has no effect: {type(self).__name__} has its own settings for the "
                "scale of advantages",
                stacklevel=3,
            )
            self.scale_rewards = "none"
        if self.write_report and self.logging_strategy == "no":
            raise ValueError(
                "write_report=True needs logged metrics, but logging_strategy='no' logs nothing. Set "
                "logging_strategy='steps', or write_report=False."
            )
        # Rewards are weighted and summed per episode and agent, before there are groups
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, ("sum_then_normalize",))
        if self.merge_for_generation and (self.use_vllm or self.use_transformers_continuous_batching):
            name = "use_vllm" if self.use_vllm else "use_transformers_continuous_batching"
            raise ValueError(
                f"merge_for_generation=True works with `generate` only, and {name}=True replaces it. Set one of them to False."
            )
        self._check_generation()
        for name in ("generation_kwargs", "chat_template_kwargs"):
            try:
                json.dumps(getattr(self, name))
            except TypeError as error:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot be written to team.json: {error}. Use numbers, strings, lists "
                    "and dictionaries only."
                ) from None

    def _check_generation(self) -> None:
        """Refuses ways of generating that do not give one reply for each prompt of a batch."""
        given = cast(dict, self.generation_kwargs or {})
        for name in ("num_return_sequences", "n"):
            if given.get(name, 1) != 1:
                raise ValueError(
                    f"generation_kwargs has {name}={given[name]}, but each prompt needs one reply. Leave it out, and set "
                    "num_generations to the number of episodes per problem."
                )
        if self.use_vllm:
            return
        mode = GenerationConfig(**{"do_sample": True, **given}).get_generation_mode()
        if mode not in GENERATION_MODES or given.get("penalty_alpha"):
            raise ValueError(
                f"generation_kwargs={given} asks for {mode.value.replace('_', ' ')}, which is not supported. Use sampling, greedy "
                "search or beam search."
            )
        if given.get("guidance_scale", 1) != 1:
            raise ValueError(
                f"generation_kwargs has guidance_scale={given['guidance_scale']}, which samples from another policy than the "
                "one that is trained. Leave it out."
            )
        if given.get("return_dict_in_generate"):
            raise ValueError(
                "generation_kwargs has return_dict_in_generate=True, which is not supported. Leave it out."
            )

    def _check_mappings(self) -> None:
        """Refuses what is neither a mapping nor one in JSON."""
        for name in (
            "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "model_init_kwargs",
            "transformers_continuous_batching_config", "generation_kwargs", "chat_template_kwargs", "roles",
        ):  # fmt: skip
            value = getattr(self, name)
            try:
                mapping = json.loads(value) if isinstance(value, str) else value
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={value!r} is not valid JSON: {error}.") from None
            if mapping is not None and not isinstance(mapping, dict):
                raise ValueError(f"{name}={value!r} must be a mapping, on the command line in JSON.")

    def _check_report_to(self) -> None:
        """Refuses logging integrations that are unknown or not installed, which the Trainer finds after loading the model."""
        known = sorted(INTEGRATION_TO_CALLBACK)
        # transformers does not say whether these are installed
        available = {"azure_ml", "flyte", *get_available_reporting_integrations()} if self.report_to else set()
        for name in cast(list[str], self.report_to):  # by now
            if name not in known:
                raise ValueError(f"report_to={name!r} is unknown. Use one of {', '.join(known)}, or 'none'.")
            if name not in available:
                raise ValueError(
                    f"report_to={name!r} needs the package {name}, which is not installed. Run `pip install {name}`, or set "
                    "report_to='none'."
                )

    def _run_on_cpu(self) -> None:
        """Completes what a machine without accelerator needs, so that one launch configuration serves all machines."""
        if self.bf16 is None and not self.fp16:
            self.bf16 = False
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            # accelerate leaves DeepSpeed out with use_cpu, and is blind to the other processes without a backend
            self.use_cpu = False
            self.ddp_backend = self.ddp_backend or "gloo"
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            import deepspeed.ops

            # A faster reduction, for which DeepSpeed would call a C++ compiler that the machine may not have
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            self.use_cpu = True
