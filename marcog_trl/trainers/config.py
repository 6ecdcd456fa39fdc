"""Configurations of the trainers: what all teams share, then GRPO, PPO and SHPPO."""

import inspect
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from trl import GRPOConfig, GRPOTrainer

from marcog_trl.checks import (
    COUNT,
    NOT_NEGATIVE,
    OLD_NAMES,
    POSITIVE,
    UNIT,
    Count,
    NaturalNumber,
    NotNegative,
    Positive,
    Range,
    Unit,
    check_choice,
    check_fields,
    check_names,
    documented,
)
from marcog_trl.team.settings import PlaySettings


TESTED_TRL = "1.16.0"
# What `generation_kwargs` may have: options that do not change the distribution of the next token. The second line has those of vLLM
_HARMLESS = frozenset(
    "eos_token_id pad_token_id bos_token_id max_time use_cache cache_implementation cache_config prefill_chunk_size "
    "compile_config low_memory renormalize_logits remove_invalid_values "
    "stop stop_token_ids include_stop_str_in_output seed detokenize skip_special_tokens spaces_between_special_tokens".split()
)
# Its options that are settings of the trainer, by their names there
_SETTINGS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | dict.fromkeys(
    ("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"
)
# Values that switch other options off, where that is not a false one
_OFF = {"do_sample": True} | dict.fromkeys(
    "num_return_sequences n best_of num_beams num_beam_groups typical_p length_penalty encoder_repetition_penalty guidance_scale".split(),
    1,
)


def warn_of_untested_trl() -> None:
    """Says so if the installed TRL is not the one that `tests/test_upstream_contract.py` passed with."""
    if version("trl") != TESTED_TRL:
        advice = f"If training fails, run `pip install trl=={TESTED_TRL}`."
        warnings.warn(
            f"marcog_trl was tested with trl {TESTED_TRL}, and this is {version('trl')}. {advice}", stacklevel=2
        )


warn_of_untested_trl()
TRAINER_ARGUMENTS = (*inspect.signature(GRPOTrainer).parameters, "workflow", "algorithm")


@documented
@dataclass
class MultiAgentConfig(PlaySettings, GRPOConfig):
    """
    Configuration of [`MultiAgentTrainer`]. Lists only the arguments that differ from [`~trl.GRPOConfig`], besides those of
    [`PlaySettings`], which control the team and code execution.

    One row of a batch is one reply of one agent, so `per_device_train_batch_size`, `generation_batch_size` and
    `per_device_eval_batch_size` count replies. On every process, a generation batch must hold whole problems: a multiple of
    `num_generations` × the workflow's slots. With one slot, as in `"single"`, all processes together hold them, as in TRL.
    Without `generation_batch_size` and `steps_per_generation`, the trainer chooses the smallest size that fits. The same
    holds for `per_device_eval_batch_size=None`.

    Args:
        > Parameters that have other defaults than in [`~trl.GRPOConfig`]

        learning_rate (`float`, *optional*, defaults to `1e-5`): Learning rate of the policy's adapter. TRL's default is `1e-6`.
        num_generations (`int`, *optional*, defaults to `4`):
            Episodes per problem. Group baselines need at least 2. TRL's default is 8.
        num_generations_eval (`int`, *optional*, defaults to `1`): Episodes per problem in evaluation.
        per_device_eval_batch_size (`int`, *optional*):
            Rows per process in an evaluation step; by default the smallest size from 8 rows on that holds whole problems.
        save_steps (`float`, *optional*):
            Optimizer steps between checkpoints; by default the first number from 500 on that ends a generation cycle, so that
            runs resume exactly.
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            Has no effect, because the trainer computes credit itself. Values other than `"none"` raise a warning.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to disable dropout and other noise of the model in training, wherever it is, so that the probability ratio is
            exactly 1 before the first update. A model that is saved as a whole keeps its own dropout in `config.json`.

        > Parameters that control credit

        credit (`str`, *optional*, defaults to `"group"`):
            `"group"` compares a reply with those of the same slot to the same problem, `"counterfactual"` with replies that were
            given in exactly the same context. For that, episodes branch wherever agents speak, and everything after a reply
            is generated anew. What a reply earns is the mean over the episodes that contain it. Evaluation never
            branches.
        fanout (`list[int]`, *optional*):
            With `credit="counterfactual"`, number of replies in the same context at each stage, such as `[2, 4]`: two plans,
            and four programs for each. Their product must be `num_generations`. By default, all replies are given at the
            first stage, and later agents have nothing to compare.
        max_joint_actions (`int`, *optional*, defaults to `1024`):
            Maximum number of joint actions per problem where episodes branch.
        gamma_turn (`float`, *optional*, defaults to `1.0`):
            Discount per turn, in [0, 1].
        reward_shift (`float`, *optional*, defaults to `0.0`):
            Added to the weighted sum of rewards of every turn. A negative one is the cost of a turn. The metrics `rewards/...` are
            logged before this step, and `agents/.../reward` after it.
        on_reward_error (`str`, *optional*, defaults to `"raise"`):
            What to do if a reward function raises an error, takes longer than `reward_timeout`, or does not return one
            finite number, dict or `None` per episode: `"raise"` stops the run on all processes, `"mask"` excludes the
            episodes of that call from the update, warns once, and logs their share as `rewards/failed`. If workers cannot
            start, the run always stops. The same holds if the endpoint of an agent does not answer: `"mask"` excludes the
            episode, and logs the share of missing replies as `agents/.../failed`.
        on_workflow_error (`str`, *optional*, defaults to `"raise"`):
            What to do if the code of a workflow raises an exception. `"raise"` stops the run with the problem, the reply and the
            lines of the workflow. `"mask"` excludes the episode from the update, warns once, and counts it in `episodes/masked`.
        reward_timeout (`float`, *optional*):
            Seconds after which a call of a coroutine reward function is cancelled. Other functions have no limit, except
            that rewards that run tests have `execution_timeout`. By default there is no limit.
        agent_loss_weighting (`str`, *optional*, defaults to `"agent"`):
            `"agent"` gives all agents the same weight in the loss, `"token"` weights agents by their number of tokens (rows,
            with `loss_type="grpo"`).
        turn_weights (`list[float]`, *optional*):
            Weight of each turn in the policy and value losses, not negative. Defaults to 1 for all turns.
        trained_agents (`list[str]`, *optional*):
            Names of the agents to train. The others speak, and their rewards and replies are logged, but their replies are
            not in the loss or in statistics of advantages, and cost no update. An adapter that agents share still changes all of
            them. Defaults to all agents.

        > Parameters that control the curriculum

        curriculum (`dict`, *optional*):
            Stages in which to train, such as `{"column": "difficulty", "pass_rate": 0.6}`. By default there are none. `column` is
            the column of the training problems that defines the stages. `stages` has the values of each stage, in order, where
            `"easy+medium"` joins two; by default, all values in ascending order. The next stage begins at the optimizer step
            that the list `steps` says, or once the share of passed tests, averaged over `window` generation batches (8 by
            default), reaches `pass_rate`.

        > Parameters that control what is trained

        full_finetuning (`bool`, *optional*, defaults to `False`):
            Whether to train all weights of the model, as TRL does without `peft_config`, in place of a LoRA adapter. Needs the
            memory of a gradient and an optimizer state for every weight, and, if `beta` is not 0, of TRL's reference model.
            Does not support `peft_config`, or quantised models.
        share_prompts (`bool`, *optional*, defaults to `False`):
            Whether the update runs each prompt of a micro-batch through the model once, in a line with all replies to it. Pays if
            prompts are longer than replies, and micro-batches hold all replies to a prompt: the siblings of
            `num_generations`. Results differ by rounding. Needs full attention with `attn_implementation="sdpa"`, and agents
            with the same weights.

        > Parameters that control the logging

        num_completions_to_print (`int`, *optional*):
            Number of episodes that `log_completions=True` prints at each log, in place of TRL's table. At most 2, which is the
            default.

        max_logged_episodes (`int`, *optional*, defaults to `32`):
            Number of episodes per logged step, over all processes, that are written to `episodes/` in `output_dir` (see
            [`~marcog_trl.report.episodes.EpisodeLog`]). 0 writes none.
        log_episodes_steps (`int`, *optional*):
            Steps between two steps whose episodes are written. Defaults to `logging_steps`.

        > Parameters that control the report

        write_report (`bool`, *optional*, defaults to `False`):
            Whether to write `report.html` to `output_dir` at every save and at the end (see
            [`~marcog_trl.report.callback.ReportCallback`]).
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "roles", "endpoints", "expert", "curriculum"]
    _scales_rewards: ClassVar[bool] = False  # whether the trainer uses scale_rewards
    # Of inherited fields. Others only have to be finite: TRL and transformers check them when the trainer is made
    _ranges: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(
            "max_completion_length per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps generation_batch_size "
            "steps_per_generation num_generations num_generations_eval num_iterations ref_model_sync_steps".split(),
            COUNT,
        ),
        **dict.fromkeys(
            "temperature repetition_penalty adam_epsilon delta sapo_temperature_neg sapo_temperature_pos save_steps "
            "vllm_importance_sampling_clip_max".split(),
            POSITIVE,
        ),
        **dict.fromkeys(
            "num_train_epochs learning_rate weight_decay neftune_noise_alpha dataloader_num_workers top_k "
            "max_tool_calling_iterations beta epsilon epsilon_high vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
            "entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold "
            "vllm_importance_sampling_clip_min".split(),
            NOT_NEGATIVE,
        ),
        **dict.fromkeys(("ref_model_mixup_alpha", "min_p"), UNIT),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), Range(0, 1, below=True)),
        **dict.fromkeys(("top_entropy_quantile", "top_p"), Range(0, 1, above=True)),
        "data_seed": Range(0, 2**32 - 1),
        "max_steps": Range(-1),
        "max_grad_norm": Range(0, infinite=True),
    }
    # Of inherited fields that TRL checks only after the first rollout
    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
        "importance_sampling_level": ("token", "sequence"),
        "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "scale_rewards": ("none", "group", "batch"),
    }

    learning_rate: float = 1e-5
    num_generations: int = 4
    num_generations_eval: int | None = 1
    per_device_eval_batch_size: int | None = None  # type: ignore[assignment]  # until the trainer sets it
    save_steps: float | None = None  # type: ignore[assignment]  # until `__post_init__`
    scale_rewards: str = "none"
    disable_dropout: bool = True

    # Parameters that control credit
    credit: Literal["group", "counterfactual"] = "group"
    fanout: list[Count] | None = None
    max_joint_actions: Count = 1024
    gamma_turn: Unit = 1.0
    reward_shift: float = 0.0
    on_reward_error: Literal["raise", "mask"] = "raise"
    on_workflow_error: Literal["raise", "mask"] = "raise"
    reward_timeout: Positive | None = None
    agent_loss_weighting: Literal["agent", "token"] = "agent"

    turn_weights: list[NotNegative] | None = None

    trained_agents: list[str] | None = None

    # Parameters that control the curriculum
    curriculum: dict[str, Any] | str | None = None

    # Parameters that control what is trained
    full_finetuning: bool = False
    share_prompts: bool = False

    # Parameters that control the logging
    max_logged_episodes: NaturalNumber = 32
    log_episodes_steps: Count | None = None

    # Parameters that control the report
    write_report: bool = False

    def __new__(cls, *args: Any, **options: Any):
        own = [f.name for f in fields(cls) if f.init]
        check_names(cls.__name__, options, own, TRAINER_ARGUMENTS, "the trainer")
        return super().__new__(cls)

    @property
    def critic_share(self) -> float | None:
        """Share of the critic in counterfactual baselines: none without a critic."""
        return 0.0

    def __post_init__(self):
        check_fields(self, self._ranges)
        check_mappings(self)
        check_output_dir(self.output_dir)
        if self.max_steps == 0:
            raise ValueError("max_steps=0 trains nothing. Set max_steps=1, or max_steps=-1 to train num_train_epochs.")
        if self.max_steps == -1 and self.num_train_epochs == 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs} trains nothing. Set num_train_epochs=1.")
        run_on_cpu(self)
        use_new_names(self)
        self._set_batch_sizes()
        self.check_play()
        for name, allowed in self._choices.items():
            check_choice(name, getattr(self, name), allowed)
        self._check_scale()
        self._check_branches()
        if self.write_report and self.logging_strategy == "no":
            raise ValueError(
                "write_report=True needs logged metrics, but logging_strategy='no' logs nothing. Set "
                "logging_strategy='steps', or write_report=False."
            )
        for name in ("generation_kwargs", "chat_template_kwargs"):
            try:
                json.dumps(getattr(self, name))
            except TypeError as error:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot be written to team.json: {error}. Use numbers, strings, lists "
                    "and dictionaries only."
                ) from None
        self._check_generation()

    def _set_batch_sizes(self):
        """Lets GRPOConfig check and set batch sizes. The trainer completes them, because it knows the number of slots."""
        self.auto_generation_batch = self.generation_batch_size is None and self.steps_per_generation is None
        self.names_generation_batch = self.generation_batch_size is not None  # a number that counts all processes
        self.auto_eval_batch = self.per_device_eval_batch_size is None
        self.auto_save_steps = self.save_steps is None
        if self.auto_save_steps:
            # For the best model, TrainingArguments wants a multiple. The trainer completes the number
            unit = max(1, int(self.eval_steps or self.logging_steps)) if self.load_best_model_at_end else 1
            self.save_steps = unit * math.ceil(500 / unit)
        if self.num_generations_eval is None:
            self.num_generations_eval = self.num_generations
        if self.auto_eval_batch:
            self.per_device_eval_batch_size = self.num_generations_eval
        # GRPOConfig wants at least two generations, and multiples of them. The trainer later checks that batches hold problems
        num_generations, self.num_generations = self.num_generations, 2
        rows, self.per_device_train_batch_size = self.per_device_train_batch_size, 2 * self.per_device_train_batch_size
        size = self.generation_batch_size
        if self.steps_per_generation is None:
            self.generation_batch_size = None
        super().__post_init__()
        self.per_device_train_batch_size, self.num_generations = rows, num_generations
        if size is None:
            self.generation_batch_size //= 2
            return
        rows *= self.world_size
        if size % rows:
            raise ValueError(
                f"generation_batch_size={size} must be a multiple of {rows}: per_device_train_batch_size="
                f"{self.per_device_train_batch_size} x {self.world_size} processes. Set generation_batch_size={rows * math.ceil(size / rows)}."
            )
        self.generation_batch_size, self.steps_per_generation = size, size // rows

    def _check_scale(self) -> None:
        if self._scales_rewards:
            return
        if self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' needs MultiAgentGRPOTrainer, because trainers with a critic do "
                "not normalise over siblings. Set multi_objective_aggregation='sum_then_normalize'."
            )
        if self.scale_rewards != "none":
            warnings.warn(
                f"scale_rewards={self.scale_rewards!r} has no effect: {type(self).__name__} has its own settings for the "
                "scale of advantages.",
                stacklevel=4,
            )
            self.scale_rewards = "none"

    def _check_branches(self) -> None:
        if self.credit == "group":
            if self.fanout is not None:
                raise ValueError(f"fanout={self.fanout} needs credit='counterfactual'. Set it, or leave fanout out.")
        elif self.fanout is not None and math.prod(self.fanout) != self.num_generations:
            episodes = math.prod(self.fanout)
            raise ValueError(
                f"fanout={list(self.fanout)} plays {episodes} episodes of each problem, but "
                f"num_generations={self.num_generations}. Set num_generations={episodes}."
            )

    def _check_generation(self) -> None:
        """Refuses options that do not return one reply per prompt, or change what is sampled, of which the loss knows nothing."""
        for name, value in cast(dict, self.generation_kwargs or {}).items():
            if name in _HARMLESS or value is None or value == _OFF.get(name, False):
                continue
            found = f"generation_kwargs has {name}={value!r}"
            if name in ("num_return_sequences", "n"):
                raise ValueError(
                    f"{found}, but each prompt needs one reply. Leave it out, and set num_generations to the number of episodes "
                    "per problem."
                )
            if name == "stop_strings":
                raise ValueError(
                    f"{found}, for which transformers needs a tokenizer in each call of generate. Set eos_token_id to the ids of the tokens that "
                    "end a reply."
                )
            setting = _SETTINGS.get(name)
            if setting is None:
                raise ValueError(
                    f"{found}, which would sample from another policy than the one that the loss assumes. Leave it out."
                )
            if value != getattr(self, setting):
                raise ValueError(
                    f"{found}, but {setting}={getattr(self, setting)!r}, which the loss assumes. Set {setting}, and leave it out."
                )


@documented
@dataclass
class MultiAgentGRPOConfig(MultiAgentConfig):
    """
    Configuration of [`MultiAgentGRPOTrainer`].

    Args:
        > Parameters that control credit

        advantage (`str`, *optional*, defaults to `"mean"`):
            Baseline of a return: the `"mean"` of its siblings (MAGRPO), the mean of its other siblings (`"rloo"`, MARLOO),
            the `"max"` of its siblings (MAReMax), or no baseline (`"none"`, MAREINFORCE). Siblings are the replies of the
            same slot to the same problem. With `credit="counterfactual"`, the baseline is always the mean of the other
            siblings.
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            Divides the advantages by the standard deviation of the siblings (`"group"`), of all rows of the generation
            batch (`"batch"`), or of the rows of the same agent in it (`"agent"`). `"none"` does not scale. Does not change
            the mean.
        multi_objective_aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`):
            As in [`~trl.GRPOConfig`]. `"normalize_then_sum"` normalises the rewards of each function over siblings before they
            are weighted and summed. It needs one turn, `credit="group"`, `joint_mode="align"` and `advantage="mean"`, and does
            not read `scale_rewards`.

        > Parameters that control joint actions

        joint_mode (`str`, *optional*, defaults to `"align"`):
            `"align"` evaluates the g-th replies of all agents together, `"cross"` every combination of their replies. The
            return of a reply is then the mean over the combinations that contain it. `"cross"` needs agents that reply at
            the same time, and supports at most 4 agents.
        turn_tree (`bool`, *optional*, defaults to `False`):
            Whether every joint action branches into `num_generations` joint actions of the next turn. Siblings are then the
            replies at the same node. Evaluation never branches.
    """

    _scales_rewards: ClassVar[bool] = True
    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        **MultiAgentConfig._choices,
        "scale_rewards": ("none", "group", "batch", "agent"),
    }

    # Parameters that control credit
    advantage: Literal["mean", "rloo", "max", "none"] = "mean"
    scale_rewards: str = "none"

    # Parameters that control joint actions
    joint_mode: Literal["align", "cross"] = "align"
    turn_tree: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.joint_mode == "cross" and self.num_turns > 1 and not self.turn_tree:
            raise ValueError(
                f"joint_mode='cross' with num_turns={self.num_turns} needs turn_tree=True, because every joint action has its "
                "own next turn. Set turn_tree=True, or num_turns=1."
            )
        if self.credit == "counterfactual":
            branches = {"joint_mode": ("align",), "turn_tree": (False,), "advantage": ("mean", "rloo")}
            check_together(self, "credit", branches, "which has its own branches and baseline")
        if self.multi_objective_aggregation == "normalize_then_sum":
            plain = {"credit": ("group",), "joint_mode": ("align",), "advantage": ("mean",)}
            scales = {"scale_rewards": ("none", "group", "batch")}
            check_together(self, "multi_objective_aggregation", plain | scales, "which has its own baseline and scale")
        if self.num_generations == 1 and (self.advantage != "none" or self.scale_rewards == "group"):
            raise ValueError(
                f"advantage={self.advantage!r} with scale_rewards={self.scale_rewards!r} compares the replies of a group, but "
                "num_generations=1. Set num_generations=4, for example."
            )


@documented
@dataclass
class MultiAgentPPOConfig(MultiAgentConfig):
    """
    Configuration of [`MultiAgentPPOTrainer`].

    Args:
        > Parameters that control the critic

        critic (`str`, *optional*, defaults to `"team"`):
            Baseline: `"team"`, `"agent"` or `"none"`. `"team"`: the value head also gets the prompt states of the agents that
            act at the same stage or earlier (MAPPO). `"agent"`: it gets only the agent's own row (IPPO). `"none"`: there is no
            value head, and the mean return of the problem's episodes is the baseline.
        critic_mix (`float` or `str`, *optional*):
            Share α of the critic in the baseline, in [0, 1]: `(1 − α)` times the mean return of the other siblings plus `α` times
            the critic's value. `"auto"` estimates the best α from earlier batches. Defaults to 1, the critic alone, and with
            `credit="counterfactual"` to 0. A reply without live siblings has the critic's value as its baseline, or with 0 no
            advantage.
        critic_backprop (`bool`, *optional*, defaults to `False`):
            Whether to backpropagate the value loss into the policy.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the value head. Defaults to 0.256 divided by its width, the hidden size of the model but at most
            1024, since wider heads learn faster.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss, which is that of standardised returns.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Maximum distance of a value from its value at rollout, in standard deviations of the returns.

        > Parameters that control credit

        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per token, in [0, 1].
        lam (`float`, *optional*, defaults to `1.0`):
            GAE's lambda within a reply, in [0, 1]. Below 1, a constant error of the critic favours short or long replies.
        lam_turn (`float`, *optional*):
            GAE's lambda across turns, in [0, 1]. Defaults to `lam`.
        kl_penalty (`str`, *optional*, defaults to `"loss"`):
            How to apply the KL divergence to the reference model, with coefficient `beta`: as TRL's term of the `"loss"`, or
            subtracted from the token rewards (`"reward"`).
        advantage_normalization (`str`, *optional*, defaults to `"agent"`):
            Normalise advantages over the replies of each `"agent"`, of the whole `"batch"`, or not at all (`"none"`). Their mean
            over tokens is subtracted. They are divided by the root of the mean over replies of each reply's mean square, so that
            lengths do not matter, and by at least half of that of earlier batches: where all replies earn nearly the same, hardly
            more than the errors of the critic is left.
    """

    # Parameters that control the critic
    critic: Literal["team", "agent", "none"] = "team"
    critic_mix: str | None = None
    critic_backprop: bool = False
    critic_learning_rate: NotNegative | None = None
    vf_coef: NotNegative = 0.1
    cliprange_value: Annotated[float, Range(0, above=True, infinite=True)] = 0.2

    # Parameters that control credit
    gamma: Unit = 1.0
    lam: Unit = 1.0
    lam_turn: Unit | None = None
    kl_penalty: Literal["loss", "reward"] = "loss"
    advantage_normalization: Literal["agent", "batch", "none"] = "agent"

    def __post_init__(self):
        super().__post_init__()
        share = self.critic_share
        if self.critic_mix is not None and share != 0:
            check_together(self, "critic_mix", {"critic": ("team", "agent")}, "a share of the critic in the baseline")
        if self.num_generations == 1 and share != 1:
            raise ValueError(
                f"critic={self.critic!r} and critic_mix={self.critic_mix!r} compare the episodes of a problem, but "
                "num_generations=1. Set num_generations=4, or critic='team' and critic_mix=1.0."
            )

    @property
    def critic_share(self) -> float | None:
        """Share of the critic in the baseline, or `None` to estimate it."""
        if self.critic_mix == "auto":
            return None
        if self.critic_mix is None:
            return float(self.critic != "none" and self.credit == "group")
        try:
            share = float(self.critic_mix)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 <= share <= 1:
            raise ValueError(f"critic_mix={self.critic_mix!r} must be a number in [0, 1], or 'auto'.")
        return share


@documented
@dataclass
class SHPPOConfig(MultiAgentPPOConfig):
    """
    Configuration of [`SHPPOTrainer`].

    Args:
        > Parameters that control the heterogeneity layer

        parameter_sharing (`str`, *optional*, defaults to `"latent"`):
            `"latent"`: one adapter, with latents that make agents differ (SHPPO); `"shared"`: one adapter without latents;
            `"separate"`: one adapter per agent, as a baseline.
        latent_scope (`str`, *optional*, defaults to `"observation"`):
            Input of the latents: `"observation"`, role text and prompt of the row with equal weight, or `"agent"`, role text
            only, with one draw per agent and generation batch. Each agent is then one LoRA adapter, as vLLM needs. Of the
            role texts counts how they differ from their mean over the team.
        latent_size (`int`, *optional*, defaults to `8`):
            Size of the latent.
        policy_gradient_to_latent (`bool`, *optional*, defaults to `False`):
            Whether to backpropagate the PPO loss into LatentNet. Otherwise LatentNet learns from the latent loss only.
        init_core_scale (`float`, *optional*, defaults to `1.5`):
            Initial size of the cores, relative to the identity, for layers with LoRA's B at 0, where cores have no effect
            yet. Layers with another B start with cores of 0. With larger values, agents separate sooner and share less. With
            `init_core_scale=0`, training starts at plain shared LoRA, and agents separate slowly (see [`CoreDecoder`]).

        > Parameters that control the latent losses

        latent_entropy_coef (`float`, *optional*, defaults to `0.01`):
            Weight of the entropy of the latents. It is minimised.
        latent_distance_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the distance between the latents of agents. It is maximised.
        latent_distance (`str`, *optional*, defaults to `"cosine"`):
            Distance of latents: `"cosine"`, or `"minmax"`, which is normalised over the generation batch.
        behaviour_distance_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the distance between what an agent does and what it would do with the latent of another agent that
            reads the same prompt (see [`behaviour_distance`]). It is maximised, as a mean over tokens. One of eight rows is
            compared. Agents with prompts of their own are not compared.
        latent_learning_rate (`float`, *optional*, defaults to `3e-3`):
            Learning rate of LatentNet. With the default, agents have distant latents after a few steps.
        inference_learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate of InferenceNet.
    """

    # Parameters that control the heterogeneity layer
    parameter_sharing: Literal["latent", "shared", "separate"] = "latent"
    latent_scope: Literal["observation", "agent"] = "observation"
    latent_size: Count = 8
    policy_gradient_to_latent: bool = False

    init_core_scale: NotNegative = 1.5

    # Parameters that control the latent losses
    latent_entropy_coef: NotNegative = 0.01
    latent_distance_coef: NotNegative = 0.1
    behaviour_distance_coef: NotNegative = 0.1
    latent_distance: Literal["cosine", "minmax"] = "cosine"
    latent_learning_rate: NotNegative = 3e-3
    inference_learning_rate: NotNegative = 1e-4

    def __post_init__(self):
        super().__post_init__()
        if self.full_finetuning:
            raise ValueError(
                "full_finetuning=True is not supported by SHPPO: its latents act inside the adapter, and are folded into it for "
                "export. Set full_finetuning=False, or use MultiAgentPPOTrainer."
            )
        if self.use_vllm and self.parameter_sharing != "shared":
            if self.parameter_sharing == "latent" and self.latent_scope == "observation":
                raise ValueError(
                    "use_vllm=True does not support latent_scope='observation': vLLM serves one adapter per agent, not one "
                    "per row. Set latent_scope='agent'."
                )
            engine = {
                "vllm_mode": ("colocate",),
                "vllm_tensor_parallel_size": (1,),
                "vllm_enable_sleep_mode": (False,),
            }
            check_together(self, "parameter_sharing", engine, "whose adapters each process serves from its own engine")
        if self.share_prompts and self.parameter_sharing != "shared":
            raise ValueError(
                f"share_prompts=True does not support parameter_sharing={self.parameter_sharing!r}: rows with the same prompt have "
                "weights of their own. Set share_prompts=False."
            )
        reentrant = self.gradient_checkpointing and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if reentrant and self.parameter_sharing == "latent":
            raise ValueError(
                "parameter_sharing='latent' does not support reentrant gradient checkpointing: all layers decode their cores "
                "from one latent. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        if self.use_transformers_continuous_batching and self.parameter_sharing != "shared":
            raise ValueError(
                f"use_transformers_continuous_batching=True does not support parameter_sharing={self.parameter_sharing!r}: all "
                "rows must use one adapter. Set use_transformers_continuous_batching=False, or parameter_sharing='shared'."
            )


# Shared with the configurations of trainers that learn from preferences


def check_together(args: Any, cause: str, needed: Mapping[str, tuple], why: str) -> None:
    """Refuses values of other fields that the value of `cause` does not go with; `needed` has those that it does, by field."""
    for name, accepted in needed.items():
        value = getattr(args, name)
        if value not in accepted:
            raise ValueError(
                f"{name}={value!r} does not support {cause}={getattr(args, cause)!r}, {why}. Set {name}={accepted[0]!r}, or "
                f"another {cause}."
            )


def check_mappings(args: Any) -> None:
    """Refuses fields that are neither a mapping nor a mapping in JSON."""
    for name in args._VALID_DICT_FIELDS:  # those of transformers and TRL depend on their versions
        value = getattr(args, name)
        if value is None or name in ("accelerator_config", "fsdp_config", "deepspeed"):  # may be a path
            continue
        try:
            mapping = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            mapping = None
        if not isinstance(mapping, dict):
            raise ValueError(f"{name}={value!r} must be a mapping. Use JSON on the command line.")


def use_new_names(args: Any) -> None:
    """
    Sets transformers' new names of fields to which TRL gives defaults by their old names. Otherwise a warning names the old. Those
    of TRL's and PEFT's own code are hidden.
    """
    warnings.filterwarnings("ignore", f".*{OLD_NAMES}", FutureWarning)
    known = {f.name for f in fields(args)}  # older transformers have only the old ones
    for kind in ("checkpointing", "checkpointing_kwargs"):
        new, old = f"activation_{kind}", f"gradient_{kind}"
        if new in known and getattr(args, new) is None:
            setattr(args, new, getattr(args, old))


def check_output_dir(output_dir: str | Path | None) -> None:
    """Refuses a folder without a name, such as `..`, which a run would fill with its files, and which names its model card."""
    if output_dir is not None and Path(str(output_dir).strip()).name in ("", ".."):
        raise ValueError(
            f"output_dir={str(output_dir)!r} has no name of its own. Set output_dir='outputs/team', for example."
        )


class NamedArguments:
    """Base of trainers, which refuses arguments that they do not have. It is not in `__init__`, whose signature is that of TRL."""

    _config_class: type

    def __new__(cls, *args: Any, **options: Any):
        settings = [f.name for f in fields(cls._config_class)]
        check_names(cls.__name__, options, TRAINER_ARGUMENTS, settings, f"args={cls._config_class.__name__}(...)")
        return super().__new__(cls)


def check_launcher(args: Any) -> None:
    """Refuses `deepspeed` in a process that no launcher has started, where it would miss the process group, or be ignored."""
    if args.deepspeed and not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK")):
        raise ValueError(
            "deepspeed needs a launcher, also for one process. Run the script with `accelerate launch --num_processes 1 script.py` or "
            "`torchrun script.py` in place of `python script.py`, or leave deepspeed out."
        )


def run_on_cpu(args: Any) -> None:
    """Sets the options for machines without accelerator, so that the same launch configuration runs everywhere."""
    check_launcher(args)
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
