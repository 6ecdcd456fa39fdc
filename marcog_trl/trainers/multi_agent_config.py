"""Base configuration of all multi-agent trainers."""

import json
import warnings
from dataclasses import dataclass, field
from typing import ClassVar, cast

from transformers import GenerationConfig
from transformers.generation import GenerationMode
from trl import GRPOConfig

from marcog_trl.checks import COUNT, NOT_NEGATIVE, POSITIVE, UNIT, Range, check_choice, check_numbers
from marcog_trl.team.settings import PlaySettings
from marcog_trl.trainers.config_checks import check_credit, check_mappings, check_report_to, run_on_cpu, use_new_names


# TRL checks these only during training
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
GENERATION_MODES = (
    GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE
)  # fmt: skip
VLLM_IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class MultiAgentConfig(PlaySettings, GRPOConfig):
    """
    Configuration of [`MultiAgentTrainer`]. Lists only the arguments that differ from [`~trl.GRPOConfig`].

    One row of a batch is one reply of one agent, so `per_device_train_batch_size`, `generation_batch_size` and
    `per_device_eval_batch_size` count replies. On every process, a generation batch must hold whole problems: a multiple of
    `num_generations` × the workflow's slots. With one slot, as in `"single"`, all processes together hold them, as in TRL.
    Without `generation_batch_size` and `steps_per_generation`, the trainer chooses the smallest size that fits. The same
    holds for `per_device_eval_batch_size=None`.

    Args:
        > Parameters that control the team

        workflow (`str`, *optional*, defaults to `"single"`):
            Built-in workflow: `"single"`, `"collaboration"`, `"pipeline"`, `"discussion"`, `"classeval"` or `"bugfix"`; or a
            Python file and a class in it, `"my_team.py:Debate"`. Ignored if a workflow is passed to the trainer.
        num_turns (`int`, *optional*, defaults to `1`):
            Rounds of the whole team, separated by feedback.
        num_agents (`int`, *optional*):
            Number of agents, for workflows that allow any number. Defaults to the workflow's default.
        roles (`dict[str, str]`, *optional*):
            Role texts that replace the default ones, by agent name. With `workflow="single"`, `{"solver": ""}` lets the model
            continue prompts in plain text, which is the default for datasets without our column `test_format`.
        system_prompt (`str`, *optional*):
            System message of every chat prompt that has none.
        endpoints (`dict[str, dict]`, *optional*):
            OpenAI-compatible endpoints that agents speak through, by agent name: the fields of
            [`~marcog_trl.endpoints.Endpoint`], such as `{"planner": {"model": "gpt-4o-mini"}}`. Such agents are never trained.
        class_split (`str`, *optional*):
            How `workflow="classeval"` assigns methods to agents: `"random"`, `"pick"` or `"one"` (see [`ClassTeam`]).
        centralized (`bool`, *optional*, defaults to `False`):
            Whether one agent writes the parts of all agents of the workflow in one reply (see [`Centralized`]).
        feedback (`str`, *optional*, defaults to `"level_feedback"`):
            Feedback between turns: `"level_feedback"`, `"level_passed"`, `"passed"`, `"plain"` or `"expert_edits"` (see
            [`Rounds`]). Pass a function to the workflow instead.
        expert_model, expert_base_url (`str`, *optional*):
            Model and endpoint that `feedback="expert_edits"` asks with the `openai` client. The environment variable
            `OPENAI_API_KEY` has the key.
        visible_tests (`int`, *optional*, defaults to `1`):
            Number of tests that feedback may show. Negative numbers count from the end, 0 shows all.

        > Parameters that control credit

        credit (`str`, *optional*, defaults to `"group"`):
            `"group"` compares a reply with those of the same slot to the same problem. `"counterfactual"` compares it with
            replies that were given in exactly the same context: episodes branch wherever agents speak, and everything after
            a reply is generated anew. What a reply earns is the mean over the episodes that contain it. Evaluation never
            branches.
        fanout (`list[int]`, *optional*):
            With `credit="counterfactual"`, number of replies in the same context at each stage, such as `[2, 4]`: two plans,
            and four programs for each. Their product must be `num_generations`. By default, all replies are given at the
            first stage, and later agents have nothing to compare.
        max_joint_actions (`int`, *optional*, defaults to `1024`):
            Maximum number of joint actions per problem where episodes branch.
        gamma_turn (`float`, *optional*, defaults to `1.0`):
            Discount per turn, in [0, 1].
        reward_scale, reward_shift (`float`, *optional*, default to `1.0` and `0.0`):
            The reward of a turn is `reward_scale` times the sum of its rewards, plus `reward_shift`. The metrics
            `rewards/...` are logged before this step, and `agents/.../reward` after it.
        on_reward_error (`str`, *optional*, defaults to `"raise"`):
            What to do if a reward function raises an error, takes longer than `reward_timeout`, or does not return one
            finite number, dict or `None` per episode. `"raise"` stops the run on all processes. `"mask"` excludes the
            episodes of that call from the update, warns once, and logs their share as `rewards/failed`. If workers cannot
            start, the run always stops. The same holds if the endpoint of an agent does not answer: `"mask"` excludes the
            episode, and logs the share of missing replies as `agents/.../failed`.
        reward_timeout (`float`, *optional*):
            Seconds after which a call of a coroutine reward function is cancelled. Other functions have no limit, except
            that rewards that run tests have `execution_timeout`. By default there is no limit.
        agent_loss_weighting (`str`, *optional*, defaults to `"agent"`):
            `"agent"` gives all agents the same weight in the loss. `"token"` weights agents by their number of tokens (rows,
            with `loss_type="grpo"`).
        turn_weights (`list[float]`, *optional*):
            Weight of each turn in the policy and value losses, not negative. Defaults to 1 for all turns.
        trained_agents (`list[str]`, *optional*):
            Names of the agents to train. The others speak, and their rewards and replies are logged, but no loss and no
            statistic of advantages sees them, and they cost no update. An adapter that agents share still changes all of
            them. Defaults to all agents.

        early_termination_threshold (`float`, *optional*):
            End an episode once a turn earns more than this, in reward units, averaged over agents. By default, episodes do
            not end early.

        > Parameters that control the curriculum

        curriculum_column (`str`, *optional*):
            Column of the training problems that defines the stages, such as the difficulty or the source. By default there
            are no stages.
        curriculum_stages (`list[str]`, *optional*):
            Values of each stage, in order. `"easy+medium"` joins two values. Defaults to all values in ascending order.
        curriculum_steps (`list[int]`, *optional*):
            Optimizer steps at which the second and later stages begin.
        curriculum_pass_rate (`float`, *optional*):
            Begin the next stage once the share of passed tests, averaged over `curriculum_window` generation batches,
            reaches this value.
        curriculum_window (`int`, *optional*, defaults to `8`):
            Number of generation batches over which to average the share of passed tests.

        > Parameters that control code execution

        num_workers (`int`, *optional*):
            Worker processes that execute code. Defaults to this process's share of the cores.
        execution_timeout (`float`, *optional*, defaults to `10.0`):
            Wall-clock limit of one program, in seconds.
        execution_memory_mb (`int`, *optional*, defaults to `512`):
            Memory limit of one program, in MiB.
        isolation (`str`, *optional*, defaults to `"strict"`):
            `"strict"` refuses to start if the kernel cannot isolate programs, `"best_effort"` uses the isolation that is
            available, `"none"` is for trusted code.

        > Parameters that control what is trained

        full_finetuning (`bool`, *optional*, defaults to `False`):
            Whether to train all weights of the model, as TRL does without `peft_config`, in place of a LoRA adapter. Needs the
            memory of a gradient and an optimizer state for every weight, and, if `beta` is not 0, of TRL's reference model.
            Does not support `peft_config`, quantised models or `merge_for_generation`.

        > Parameters that control generation

        merge_for_generation (`bool`, *optional*, defaults to `False`):
            Whether to merge the adapter into a copy of the adapted weights for generation, which makes generation as fast
            as with the base model. In bfloat16 the merged weights are rounded, so the sampling policy differs slightly from
            the trained one, as with vLLM. Needs an adapter that all agents share. Does not support quantised base models
            or ZeRO-3.

        > Parameters that control the logging

        num_completions_to_print (`int`, *optional*):
            Number of episodes that `log_completions=True` prints at each log, in place of TRL's table. At most 2, which is the
            default.

        > Parameters that control the report

        write_report (`bool`, *optional*, defaults to `False`):
            Whether to write `report.html` and `pictures/*.png` to `output_dir` at every save and at the end (see
            [`ReportCallback`]).
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "roles", "endpoints"]
    _scales_rewards: ClassVar[bool] = False  # whether the trainer uses scale_rewards
    _ranges: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps generation_batch_size "
            "steps_per_generation num_generations num_generations_eval num_iterations max_completion_length "
            "ref_model_sync_steps vllm_tensor_parallel_size vllm_max_model_length "
            "torch_empty_cache_steps dataloader_prefetch_factor ddp_timeout "
            "curriculum_window fanout max_joint_actions".split(),
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
            "vllm_importance_sampling_clip_min turn_weights curriculum_steps num_completions_to_print "
            "max_tool_calling_iterations".split(),
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
        default=4, metadata={"help": "Episodes per problem. Group baselines need at least 2."}
    )
    num_generations_eval: int | None = field(default=1, metadata={"help": "Episodes per problem in evaluation."})
    per_device_eval_batch_size: int | None = field(  # type: ignore[assignment]  # `None` until the trainer sets it
        default=None,
        metadata={
            "help": "Rows per process in an evaluation step. `None` selects the smallest size from 8 rows on that holds whole "
            "problems."
        },
    )
    save_steps: float | None = field(  # type: ignore[assignment]  # `None` until `__post_init__`
        default=None,
        metadata={
            "help": "Optimizer steps between checkpoints. `None` selects the first number from 500 on that ends a generation "
            "cycle, so that runs resume exactly."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Has no effect, because the trainer computes credit itself. Values other than 'none' raise a warning."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Whether to disable dropout. Without it, the probability ratio is exactly 1 before the first update."
        },
    )

    # Parameters that control credit
    credit: str = field(
        default="group",
        metadata={
            "help": "'group': compare replies of the same slot. 'counterfactual': compare replies in exactly the same context, "
            "from episodes that branch where agents speak."
        },
    )
    fanout: list[int] | None = field(
        default=None,
        metadata={
            "help": "Replies in the same context at each stage, such as 2 4, with credit='counterfactual'. Their product is "
            "num_generations. Default: all at the first stage."
        },
    )
    max_joint_actions: int = field(
        default=1024, metadata={"help": "Maximum number of joint actions per problem where episodes branch."}
    )
    gamma_turn: float = field(default=1.0, metadata={"help": "Discount per turn, in [0, 1]."})
    reward_scale: float = field(default=1.0, metadata={"help": "Factor of the reward of a turn."})
    reward_shift: float = field(default=0.0, metadata={"help": "Constant added to the scaled reward of a turn."})
    on_reward_error: str = field(
        default="raise",
        metadata={
            "help": "What to do if a reward function or an agent's endpoint fails: 'raise' stops the run, 'mask' excludes the "
            "episodes."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds after which a call of a coroutine reward function is cancelled. Default: no limit."
        },
    )
    agent_loss_weighting: str = field(
        default="agent",
        metadata={
            "help": "'agent': all agents have the same weight in the loss. 'token': agents are weighted by their number of "
            "tokens (rows, with loss_type='grpo')."
        },
    )

    turn_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each turn in the policy and value losses, such as 1.5 0.5."}
    )

    trained_agents: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the agents to train. The others speak, but no loss sees them. Default: all."},
    )

    # Parameters that control the curriculum
    curriculum_column: str | None = field(
        default=None, metadata={"help": "Column that defines the stages, such as the difficulty or the source."}
    )
    curriculum_stages: list[str] | None = field(
        default=None,
        metadata={"help": "Values of each stage, such as easy easy+medium hard. Default: all, ascending."},
    )
    curriculum_steps: list[int] | None = field(
        default=None, metadata={"help": "Optimizer steps at which the second and later stages begin."}
    )
    curriculum_pass_rate: float | None = field(
        default=None, metadata={"help": "Share of passed tests at which the next stage begins."}
    )
    curriculum_window: int = field(
        default=8, metadata={"help": "Generation batches over which to average the share of passed tests."}
    )

    # Parameters that control what is trained
    full_finetuning: bool = field(
        default=False, metadata={"help": "Whether to train all weights of the model, in place of a LoRA adapter."}
    )

    # Parameters that control generation
    merge_for_generation: bool = field(
        default=False, metadata={"help": "Whether to merge the adapter into a copy of the weights for generation."}
    )

    # Parameters that control the report
    write_report: bool = field(
        default=False, metadata={"help": "Whether to write report.html and pictures of the run to output_dir."}
    )

    @property
    def critic_share(self) -> float | None:
        """Share of the critic in counterfactual baselines: none without a critic."""
        return 0.0

    def __post_init__(self):
        check_numbers(self, self._ranges)
        check_mappings(self)
        if self.max_steps == 0:
            raise ValueError("max_steps=0 trains nothing. Set max_steps=1, or max_steps=-1 to train num_train_epochs.")
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs} trains nothing. Set num_train_epochs=1.")
        run_on_cpu(self)
        use_new_names(self)
        self._set_batch_sizes()
        check_report_to(self)
        self.check_play()
        self._check_choices()
        check_credit(self)
        if self.write_report and self.logging_strategy == "no":
            raise ValueError(
                "write_report=True needs logged metrics, but logging_strategy='no' logs nothing. Set "
                "logging_strategy='steps', or write_report=False."
            )
        if self.merge_for_generation and (self.use_vllm or self.use_transformers_continuous_batching):
            name = "use_vllm" if self.use_vllm else "use_transformers_continuous_batching"
            raise ValueError(
                f"merge_for_generation=True does not support {name}=True: it merges for `generate` only. Set one of them to "
                "False."
            )
        if self.merge_for_generation and self.full_finetuning:
            raise ValueError(
                "merge_for_generation=True merges an adapter, but full_finetuning=True trains none. Set one of them to False."
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

    def _set_batch_sizes(self):
        """Lets GRPOConfig check and set batch sizes. The trainer completes them, because it knows the number of slots."""
        self.auto_generation_batch = self.generation_batch_size is None and self.steps_per_generation is None
        self.names_generation_batch = self.generation_batch_size is not None  # a number that counts all processes
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
            # GRPOConfig requires multiples of num_generations; the trainer later requires whole problems
            self.generation_batch_size, batch_size = None, self.per_device_train_batch_size
            self.num_generations = max(2, num_generations)
            self.per_device_train_batch_size = batch_size * self.num_generations
            super().__post_init__()
            self.per_device_train_batch_size = batch_size
            self.generation_batch_size //= self.num_generations
        elif num_generations == 1 or self.credit == "counterfactual":
            # GRPOConfig wants at least two generations and multiples of them, so check two with twice the batch
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

    def _check_choices(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        check_choice("vllm_mode", self.vllm_mode, ("colocate", "server"))
        check_choice(
            "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, VLLM_IMPORTANCE_SAMPLING_MODES
        )
        check_choice("agent_loss_weighting", self.agent_loss_weighting, ("agent", "token"))
        check_choice("on_reward_error", self.on_reward_error, ("raise", "mask"))
        aggregation = self.multi_objective_aggregation
        check_choice("multi_objective_aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
        if self._scales_rewards:
            return
        if aggregation == "normalize_then_sum":
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' needs MultiAgentGRPOTrainer, because trainers with a critic do "
                "not normalise over siblings. Set multi_objective_aggregation='sum_then_normalize'."
            )
        check_choice("scale_rewards", self.scale_rewards, ("none", "group", "batch"))
        if self.scale_rewards != "none":
            warnings.warn(
                f"scale_rewards={self.scale_rewards!r} has no effect: {type(self).__name__} has its own settings for the "
                "scale of advantages.",
                stacklevel=4,
            )
            self.scale_rewards = "none"

    def _check_generation(self) -> None:
        """Refuses generation settings that do not return one reply per prompt."""
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
                f"generation_kwargs={given} selects {mode.value.replace('_', ' ')}, which is not supported. Use sampling, greedy "
                "search or beam search."
            )
        if given.get("guidance_scale", 1) != 1:
            raise ValueError(
                f"generation_kwargs has guidance_scale={given['guidance_scale']}, which would sample from another policy than "
                "the trained one. Leave it out."
            )
        if given.get("return_dict_in_generate"):
            raise ValueError(
                "generation_kwargs has return_dict_in_generate=True, which is not supported. Leave it out."
            )
