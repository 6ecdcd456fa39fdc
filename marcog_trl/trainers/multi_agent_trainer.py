"""What all multi-agent trainers share: workflows as rollouts, scoring by episode, row layout, logs and checks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers.trainer
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset, IterableDataset
from huggingface_hub import CommitInfo
from peft import LoraConfig, PeftConfig, PeftModel
from rich.console import Console
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from marcog_trl.agents import Slot, Workflow
from marcog_trl.algorithms.advantages import SumOverProcesses, agent_weights, group_advantages, turn_returns
from marcog_trl.execution import CodeExecutor
from marcog_trl.execution.isolation import IsolationLevel
from marcog_trl.files import write_json
from marcog_trl.problems import solution_job
from marcog_trl.report.callback import ReportCallback
from marcog_trl.report.console import episode_trace
from marcog_trl.rollout.engine import encode_prompts, play
from marcog_trl.rollout.records import Episode, Row, Score
from marcog_trl.team import card, export, hub
from marcog_trl.team.data_checks import check_dataset, usable
from marcog_trl.team.description import TEAM_FILE, describe_team
from marcog_trl.team.merging import merged_adapter
from marcog_trl.trainers.adapter_targets import outside_zero3, resolve_all_linear
from marcog_trl.trainers.checkpoints import (
    COMPLETE_FILE,
    check_checkpoint,
    checkpoints_in,
    find_checkpoint,
    full_disk_explained,
    mark_complete,
    only_run_in,
)
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig
from marcog_trl.trainers.sampling import CurriculumSampler, make_curriculum
from marcog_trl.trainers.scoring import Scorer, named_reward
from marcog_trl.workflows import Centralized, ClassTeam, Rounds, make_workflow
from marcog_trl.workflows.expert import ExpertEdits


# What TRL logs of each micro-batch as a mean over tokens
_MICRO_BATCH_MEANS = (
    "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"
)  # fmt: skip


@dataclass
class Rollout:
    """
    One generation batch of this process, in row order: problem, then group (slot; in a tree: node and slot), then generation.

    Args:
        levels (`list[list[Episode]]` of length K): Episodes by the turn that they come to. Without a tree all K lists are
            one and the same: problem by problem, generation by generation. In a tree, those of a later turn begin with
            those of the turn before, which they branch off. E is the length of the last list.
        rows (`list[Row | None]` of length B): `None` where an episode did not use the slot.
        wait (`Callable`, *optional*): Waits for the verdicts on the solutions of the last turn.
        scores (`torch.Tensor` of shape `(E, K, F)`): What each reward function returned, averaged over agents; NaN where
            it returned nothing, and before scoring.
        agent (`torch.Tensor` of shape `(B,)`): Index of the row's agent.
        turn (`torch.Tensor` of shape `(B,)`): Turn of the row.
        episodes_of_row (`torch.Tensor` of shape `(B, M)`): Which episodes of its turn's list hold the row, dead rows
            included: one, or, where joint actions share replies, several.
        live (`torch.Tensor` of shape `(B,)`): Whether the row is used, and, once it is scored, not masked.
        trained (`torch.Tensor` of shape `(B,)`): Whether the row is live, and the loss may see it, unlike one that was cut
            off under `mask_truncated_completions`: such a row earned its reward, and its siblings are compared with it.
        rewards, returns (`torch.Tensor` of shape `(E, N, K)`): Reward of each agent in each turn, and return from that
            turn on; 0 where none was given, and before scoring.
        counted (`torch.Tensor` of shape `(E, K)`): Whether the turn was played and is not masked.
    """

    levels: list[list[Episode]]
    rows: list[Row | None]
    wait: Callable[[], None] | None
    scores: torch.Tensor
    agent: torch.Tensor
    turn: torch.Tensor
    episodes_of_row: torch.Tensor
    live: torch.Tensor
    trained: torch.Tensor
    rewards: torch.Tensor
    returns: torch.Tensor
    counted: torch.Tensor

    @property
    def episodes(self) -> list[Episode]:
        """The episodes at their ends."""
        return self.levels[-1]

    @functools.cached_property
    def last_act(self) -> torch.Tensor:
        """Whether the row is its agent's last one of the turn, `(B,)`."""
        turn_of = [None if row is None else (row.episode, row.slot.agent, row.slot.turn) for row in self.rows]
        last_row = {turn: i for i, turn in enumerate(turn_of)}  # of an agent's acts in a turn, the last one stays
        return torch.tensor([last_row[turn] == i for i, turn in enumerate(turn_of)], device=self.live.device)

    def mean_over_episodes(self, values: torch.Tensor) -> torch.Tensor:
        """From `(E, K, ...)` to rows, `(B, ...)`: mean over the episodes that hold the row and count, 0 without any."""
        of_row = values[self.episodes_of_row, self.turn[:, None]]
        counted = self.counted[self.episodes_of_row, self.turn[:, None]].view(
            *of_row.shape[:2], *[1] * (of_row.dim() - 2)
        )
        total = torch.where(counted, of_row, torch.zeros_like(of_row)).sum(1)
        return total / counted.sum(1).clamp(min=1)

    def of_agent(self, values: torch.Tensor) -> torch.Tensor:
        """From `(E, N, K)` to rows, `(B,)`: the mean of the row's own agent and turn."""
        by_agent = self.mean_over_episodes(values.transpose(1, 2))
        return by_agent.gather(1, self.agent[:, None]).squeeze(1)


class _OrderOfEpoch(Sampler):
    """TRL's order of the problems, also in a resumed run, where TRL's own sampler begins with its first epoch."""

    def __init__(self, sampler: RepeatSampler, seed: int, epoch: Callable[[], int]):
        self.sampler = sampler
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            generator = self.sampler.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def _agree_with_workflow(args: MultiAgentConfig, workflow: Workflow) -> None:
    """Lets the settings say what a workflow that was passed as an instance is; others that were set are refused."""
    brought: dict[str, Any] = {"num_turns": workflow.num_turns, "num_agents": len(workflow.agents)}
    brought["roles"] = {agent.name: agent.role for agent in workflow.agents}
    brought |= dict.fromkeys(("feedback", "visible_tests", "class_split", "expert_model", "expert_base_url"))
    if isinstance(workflow, Rounds):
        # 0 is the configuration's word for all tests
        visible_tests = workflow.visible_tests if isinstance(workflow.visible_tests, int) else 0
        brought |= {"feedback": workflow.feedback, "visible_tests": visible_tests}
        if isinstance(workflow.expert, ExpertEdits):
            brought |= {"expert_model": workflow.expert.model, "expert_base_url": workflow.expert.base_url}
    if isinstance(workflow, ClassTeam):
        brought["class_split"] = workflow.split
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    for name, value in brought.items():
        asked = getattr(args, name)
        agrees = asked.items() <= value.items() if isinstance(asked, dict) else asked == value
        if asked != defaults[name] and not agrees:
            raise ValueError(
                f"{name}={asked!r} contradicts the {type(workflow).__name__} that was passed as workflow. Give {name} to the "
                "workflow, or pass the workflow's name."
            )
    args.num_turns = workflow.num_turns
    if isinstance(workflow, Rounds):
        args.visible_tests = brought["visible_tests"]
        # A function, and an expert of another kind, cannot be written into team.json
        if isinstance(workflow.feedback, str) and (workflow.expert is None or brought["expert_model"] is not None):
            args.feedback = workflow.feedback
            args.expert_model, args.expert_base_url = brought["expert_model"], brought["expert_base_url"]
    if isinstance(workflow, ClassTeam):
        args.class_split = workflow.split


class MultiAgentTrainer(GRPOTrainer):
    """
    Base of the trainers for teams of LLM agents that share one model and one adapter.

    It is [`~trl.GRPOTrainer`] with episodes of a workflow in place of completions: one row of the batch is one reply of
    one agent. With the `single` workflow (the default) it takes `GRPOTrainer`'s arguments. Credit is group-relative: the
    return of a row minus the mean return of its group (Source: GRPO, https://huggingface.co/papers/2402.03300, without
    the division by the standard deviation).

    What the base demands: `args` is a [`MultiAgentConfig`]; `tools`, `rollout_func` and `environment_factory` are refused,
    since a workflow does their work; models are text-only.

    Args:
        model, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config:
            As in [`~trl.GRPOTrainer`].
        reward_funcs (`str`, `Callable` or `list`):
            As in [`~trl.GRPOTrainer`], or the name of a reward of this package such as `"execution_reward"`. A function
            is called once per turn with one entry per episode: `completions` are the solutions, and `replies` (agent ->
            text), `turn`, `verdicts` and the dataset's columns come as keyword lists. It returns floats, or dicts agent ->
            float, or `None` where the reward does not apply: an episode to which none applies is left out of training.
            So is one for which a function returns an [`~marcog_trl.rewards.InfrastructureFailure`], whatever the others say.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Defaults to LoRA of rank 16 on all linear layers that PEFT can adapt; those of Mamba layers that it refuses are
            left out.
        workflow ([`Workflow`] or `str`, *optional*):
            Who speaks when, and who sees what. Defaults to `args.workflow`.

    Raises:
        ValueError: Before any work starts, if the batch cannot hold whole problems, or the workflow, the dataset or the
            rewards do not fit each other.
    """

    _tag_names = ["trl", "marcog-trl", "multi-agent"]
    _name = "Multi-agent RL"
    _config_class: type[MultiAgentConfig] = MultiAgentConfig
    args: MultiAgentConfig
    model: Any  # a PeftModel, or a causal LM
    num_generations: int
    num_generations_eval: int
    # Mean latent μ of every agent that acted since the log before, over all processes; where there are latents
    agent_latents: dict[str, list[float]] | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        workflow: Workflow | str | None = None,
    ):
        if not isinstance(model, str | PreTrainedModel | PeftModel):
            raise TypeError(f"model={model!r:.80} is not a model. Pass a causal LM, or the name or path of one.")
        if peft_config is not None and not isinstance(peft_config, PeftConfig):
            raise TypeError(
                f"peft_config={peft_config!r:.80} is not a PeftConfig. Pass an instance, such as LoraConfig(r=16)."
            )
        if args is None:
            name = model if isinstance(model, str) else str(model.config.name_or_path)
            args = self._config_class(
                f"{name.rstrip('/').split('/')[-1]}-{self._config_class.__name__.removesuffix('Config')}"
            )
        if not isinstance(args, self._config_class):
            given = f"the class {args.__name__}" if isinstance(args, type) else f"a {type(args).__name__}"
            needed = self._config_class.__name__
            raise TypeError(
                f"args is {given}, but {type(self).__name__} needs a {needed}. Pass {needed}('outputs/team'), for example."
            )
        for name, value in (
            ("tools", tools), ("rollout_func", rollout_func), ("environment_factory", environment_factory)
        ):  # fmt: skip
            if value is not None:
                raise ValueError(
                    f"{name} is not supported by {type(self).__name__}; write a Workflow, which does its work"
                )
        self.args = args  # the parent will set it too, but what is checked here reads it
        self.workflow = self._make_workflow(workflow, args)
        self.agents = [agent.name for agent in self.workflow.agents]
        if args.agent_loss_weighting == "agent" and len(self.agents) > 1 and args.loss_type not in ("dapo", "grpo"):
            raise ValueError(
                f"loss_type={args.loss_type!r} does not support agent_loss_weighting='agent'. Use loss_type='dapo' or "
                "'grpo', or set agent_loss_weighting='token'."
            )
        if args.turn_weights is not None and len(args.turn_weights) != self.workflow.num_turns:
            raise ValueError(
                f"turn_weights={args.turn_weights} has {len(args.turn_weights)} weights for "
                f"num_turns={self.workflow.num_turns}; {[1.0] * self.workflow.num_turns} works"
            )
        reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        reward_funcs = [named_reward(func) for func in reward_funcs]
        if not reward_funcs:
            raise ValueError("reward_funcs is missing; 'execution_reward', or a function of completions, works")
        self._check_datasets(train_dataset, eval_dataset, reward_funcs)
        train_dataset = usable("train_dataset", train_dataset, self.workflow, reward_funcs)
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                name: usable(f"eval_dataset[{name!r}]", dataset, self.workflow, reward_funcs)
                for name, dataset in eval_dataset.items()
            }
        else:
            eval_dataset = usable("eval_dataset", eval_dataset, self.workflow, reward_funcs)
        self._fit_batches(args, train_dataset)
        whole = args.num_generations * self._num_groups(training=True)
        self._curriculum = make_curriculum(args, train_dataset, cast(int, args.generation_batch_size) // whole)
        if self._curriculum is not None and args.restore_callback_states_from_checkpoint:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes callbacks anew from a few numbers, and a curriculum has "
                "its dataset; False works: a curriculum goes on where it was in any case"
            )
        self._executor: CodeExecutor | None = None
        self._scorer = Scorer(reward_funcs, self.agents, args, lambda: self.executor)
        if self.workflow.needs_tests or self._scorer.runs_tests:
            self._executor = self._make_executor(args)
        elif args.curriculum_pass_rate is not None:
            raise ValueError(
                f"curriculum_pass_rate={args.curriculum_pass_rate} needs a reward that runs tests; 'execution_reward' works"
            )
        self.report = ReportCallback(self) if args.write_report else None
        peft_config = self._adapter_config(model, peft_config, args)
        if args.ddp_find_unused_parameters is None:
            # The Trainer's default for adapters is True, which fails where values are computed inside the forward but
            # are not part of its output
            args.ddp_find_unused_parameters = False

        super().__init__(
            model=model,
            reward_funcs=self._scorer.wrapped,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if self._curriculum is not None:
            self.add_callback(self._curriculum)
        if self.report is not None:
            self.add_callback(self.report)
        if self._is_vlm:
            raise ValueError("processing_class is a multimodal processor; a text tokenizer works")
        self._check_optimizer()
        # Set here and not passed: TRL warns that rollout functions are experimental
        self.rollout_func = self._rollout
        zero3 = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
        if args.merge_for_generation:
            quantised = getattr(self.model.get_base_model(), "is_quantized", False)
            for what, found in (("a quantised base model", quantised), ("ZeRO-3, which shards the weights", zero3)):
                if found:
                    raise ValueError(f"merge_for_generation=True does not work with {what}; False works")
        if zero3 and args.gradient_checkpointing:
            # TRL asks for reentrant checkpointing with PEFT and ZeRO-3, under which tensors that enter a layer through a
            # hook lose their gradient; non-reentrant checkpointing works with deepspeed >= 0.19
            args.gradient_checkpointing_kwargs = {"use_reentrant": False}
        self._gradient_mass = torch.zeros(len(self.agents), device=self.accelerator.device)
        # Of this process since the last log, by mode and name: a sum, and how many it adds up
        self._pooled: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        # Set while TRL computes a loss: what the gradient of its entropy bonus is multiplied by
        self._entropy_share: torch.Tensor | None = None
        self._rollout_in_flight: Rollout | None = None
        self._episode_to_show: Episode | None = None
        self._inputs: list[dict[str, Any]] = []
        self._threshold_was_tried = False
        self._warned_of_context = False

    # What is checked and completed before any work starts

    @staticmethod
    def _make_workflow(workflow: Workflow | str | None, args: MultiAgentConfig) -> Workflow:
        if workflow is not None and not isinstance(workflow, str | Workflow):
            raise TypeError(f"workflow={workflow!r} is not a workflow. Pass an instance of Workflow, or a name.")
        if not isinstance(workflow, Workflow):
            options: dict[str, Any] = {"num_turns": args.num_turns}
            if args.num_turns > 1 or (workflow or args.workflow) == "pipeline":
                options |= {"feedback": args.feedback, "visible_tests": args.visible_tests}
            if args.num_turns > 1 and args.feedback == "expert_edits":
                options["expert"] = expert = ExpertEdits(args.expert_model or "", args.expert_base_url)
                expert.check()
            if args.num_agents is not None:
                options["num_agents"] = args.num_agents
            if args.roles is not None:
                options["roles"] = args.roles
            if args.class_split is not None:
                options["split"] = args.class_split
            args.workflow = workflow or args.workflow  # which a saved team is made from again
            workflow = make_workflow(args.workflow, **options)
        else:
            workflow.validate()
            _agree_with_workflow(args, workflow)
        if args.centralized:
            workflow = Centralized(workflow)
        workflow.validate()
        return workflow

    def _check_datasets(self, train_dataset, eval_dataset, reward_funcs: list) -> None:
        datasets = {"train_dataset": train_dataset}
        datasets |= (
            {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
            if isinstance(eval_dataset, dict)
            else {"eval_dataset": eval_dataset}
        )
        for name, dataset in datasets.items():
            if dataset is not None or name == "train_dataset":
                check_dataset(name, dataset, self.workflow, reward_funcs)

    def _num_groups(self, training: bool) -> int:
        """Groups of siblings per problem: one per slot."""
        return len(self.workflow.slots)

    def _splits_groups(self, training: bool) -> bool:
        """
        Whether a group of siblings may lie on several processes, as in TRL. Replies that stand alone allow it; those of a team
        belong to episodes, which one process plays.
        """
        return len(self.workflow.slots) == 1

    def _fit_batches(self, args: MultiAgentConfig, train_dataset) -> None:
        num_groups, num_processes = self._num_groups(training=True), args.world_size
        whole = args.num_generations * num_groups
        accumulation = args.gradient_accumulation_steps
        # Whole problems lie within so many processes
        spread = num_processes if self._splits_groups(training=True) else 1
        if args.auto_generation_batch:
            # The smallest number of micro-batches that holds whole problems and whole accumulation windows
            micro_batches = whole // math.gcd(whole, args.per_device_train_batch_size * spread)
            args.steps_per_generation = math.lcm(micro_batches, accumulation)
            args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * num_processes
        # The configuration has completed these
        assert args.steps_per_generation is not None and args.generation_batch_size is not None
        assert args.num_generations_eval is not None and args.per_device_eval_batch_size is not None
        assert args.save_steps is not None
        rows = args.per_device_train_batch_size * args.steps_per_generation * spread
        kind = "slots" if num_groups == len(self.workflow.slots) else "groups of a tree"
        layout = f"{whole} rows (num_generations={args.num_generations} x {num_groups} {kind})"
        if rows % whole:
            works = math.lcm(whole, args.per_device_train_batch_size * spread) * (num_processes // spread)
            where = f" on each of {num_processes} processes" if spread < num_processes else ""
            raise ValueError(
                f"generation_batch_size={args.generation_batch_size} cannot hold whole problems of {layout}{where}. Set "
                f"generation_batch_size={works}."
            )
        if isinstance(train_dataset, Dataset) and len(train_dataset) < args.generation_batch_size // whole:
            raise ValueError(
                f"train_dataset has {len(train_dataset)} problems, fewer than a generation batch of "
                f"generation_batch_size={args.generation_batch_size} rows holds; {args.generation_batch_size // whole} work"
            )
        num_slots = self._num_groups(training=False)
        whole = args.num_generations_eval * num_slots
        spread = num_processes if self._splits_groups(training=False) else 1
        if args.auto_eval_batch:
            args.per_device_eval_batch_size = whole * max(1, math.ceil(8 / whole))
        elif args.per_device_eval_batch_size * spread % whole:
            unit = whole // math.gcd(whole, spread)
            raise ValueError(
                f"per_device_eval_batch_size={args.per_device_eval_batch_size} cannot hold whole problems of {whole} rows "
                f"(num_generations_eval={args.num_generations_eval} x {num_slots} slots). Set "
                f"per_device_eval_batch_size={unit * math.ceil(args.per_device_eval_batch_size / unit)}."
            )
        # A checkpoint inside a generation cycle would resume with other rollouts than the uninterrupted run
        cycle = self._generation_cycle(args)
        evaluates_by_steps = args.eval_strategy == "steps" and args.eval_steps is not None and args.eval_steps >= 1
        if args.save_strategy == "best" and evaluates_by_steps and cast(float, args.eval_steps) % cycle:
            raise ValueError(
                f"save_strategy='best' saves where eval_steps={args.eval_steps} says, inside a generation cycle of {cycle} "
                f"optimizer steps, from which a run cannot resume exactly; "
                f"eval_steps={cycle * math.ceil(cast(float, args.eval_steps) / cycle)} works"
            )
        if args.auto_save_steps:
            # The best model is among those that were saved and evaluated at the same step
            best = evaluates_by_steps and args.load_best_model_at_end
            unit = math.lcm(cycle, int(cast(float, args.eval_steps))) if best else cycle
            args.save_steps = unit * math.ceil(args.save_steps / unit)
        elif args.save_strategy == "steps" and cycle > 1 and args.save_steps % cycle:
            # A share of the run, below 1, may fall anywhere
            works = cycle * math.ceil((args.save_steps if args.save_steps >= 1 else 500) / cycle)
            raise ValueError(
                f"save_steps={args.save_steps} falls inside a generation cycle of {cycle} optimizer steps, from which a "
                f"run cannot resume exactly; {works} works"
            )

    @staticmethod
    def _generation_cycle(args: MultiAgentConfig) -> int:
        """Optimizer steps after which a step begins with a new rollout again."""
        micro_batches = cast(int, args.steps_per_generation) * args.num_iterations
        return math.lcm(micro_batches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps

    def _warn_of_schedule(self) -> None:
        """Says what a user of TRL may not expect of the rollouts and the last checkpoint; an evaluation has neither."""
        args = self.args
        steps_per_generation, accumulation = cast(int, args.steps_per_generation), args.gradient_accumulation_steps
        if args.auto_generation_batch and steps_per_generation > accumulation:
            num_groups = self._num_groups(training=True)
            warnings.warn(
                f"Each rollout is used for {steps_per_generation // accumulation} optimizer steps: it has "
                f"{args.generation_batch_size} rows, since it holds whole problems of {args.num_generations * num_groups} rows "
                f"(num_generations={args.num_generations} x {num_groups} replies), and a step has "
                f"{cast(int, args.generation_batch_size) * accumulation // steps_per_generation}. Set "
                f"gradient_accumulation_steps={steps_per_generation} for one step per rollout.",
                stacklevel=3,
            )
        cycle = self._generation_cycle(args)
        if args.save_strategy != "no" and args.max_steps > 0 and args.max_steps % cycle:
            warnings.warn(
                f"max_steps={args.max_steps} ends inside a generation cycle of {cycle} optimizer steps, so the last checkpoint "
                f"cannot be continued. Set max_steps={cycle * math.ceil(args.max_steps / cycle)}.",
                stacklevel=3,
            )

    def _adapter_config(self, model, peft_config: PeftConfig | None, args: MultiAgentConfig) -> PeftConfig | None:
        """The adapter to train: the user's, or LoRA on all linear layers."""
        if isinstance(model, str) or not is_peft_model(model):
            if peft_config is None:
                peft_config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
            if peft_config.inference_mode:
                raise ValueError("peft_config.inference_mode=True freezes the adapter. Set inference_mode=False.")
            if isinstance(peft_config, LoraConfig) and peft_config.target_modules == "all-linear":
                with outside_zero3(args.deepspeed_plugin):
                    names = resolve_all_linear(model, self._adapts_experts, cast(dict | None, args.model_init_kwargs))
                peft_config = dataclasses.replace(peft_config, target_modules=names)
            return peft_config
        if "default" not in model.peft_config:
            raise ValueError(
                f"model has the adapters {list(model.peft_config)} and no 'default', which is the one that is trained; "
                "PeftModel.from_pretrained(..., adapter_name='default') works"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("model's adapter is frozen; PeftModel.from_pretrained(..., is_trainable=True) works")
        return peft_config  # with an adapter in place, TRL refuses another one

    def _check_optimizer(self) -> None:
        """Refuses an optimizer of the user's that was made of a model before it had its adapter, and would train nothing."""
        held = self._held_by_optimizer()
        if held is not None and not any(p.requires_grad and id(p) in held for p in self.model.parameters()):
            raise ValueError(
                "optimizers has an optimizer without any trainable parameter of the adapter, which the trainer adds to the "
                "model. Make the model a PeftModel with get_peft_model first, and the optimizer of its parameters, or leave "
                "optimizers out and set optim and learning_rate."
            )

    def _held_by_optimizer(self) -> set[int] | None:
        if self.optimizer is None:
            return None
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    @property
    def _adapts_experts(self) -> bool:
        """Whether `target_modules="all-linear"` may include a model's experts."""
        return True

    @staticmethod
    def _make_executor(args: MultiAgentConfig) -> CodeExecutor:
        return CodeExecutor(
            num_workers=args.num_workers,
            timeout=args.execution_timeout,
            memory_mb=args.execution_memory_mb,
            isolation=cast(IsolationLevel, args.isolation),
        )

    @property
    def executor(self) -> CodeExecutor:
        """Runs what agents write, in worker processes; started when first needed."""
        if self._executor is None:
            self._executor = self._make_executor(self.args)
        return self._executor

    # Whole problems in every batch

    @contextmanager
    def _whole_problems(self) -> Iterator[None]:
        """Lets TRL's samplers, and its repeated streams, repeat each problem once per row."""
        saved = self.num_generations, self.num_generations_eval
        self.num_generations = saved[0] * self._num_groups(training=True)
        self.num_generations_eval = saved[1] * self._num_groups(training=False)
        try:
            yield
        finally:
            self.num_generations, self.num_generations_eval = saved

    def get_train_dataloader(self):
        with self._whole_problems():
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        sampler = cast(RepeatSampler, super()._get_train_sampler(dataset))
        if self._curriculum is not None:
            return CurriculumSampler(sampler, self._curriculum, self._epoch)
        return _OrderOfEpoch(sampler, self.args.seed, self._epoch)

    def _epoch(self) -> int:
        return int(self.state.epoch or 0)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None):
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._given("eval_dataset", eval_dataset)
        played = self.eval_dataset if eval_dataset is None else eval_dataset
        played = cast(dict, self.eval_dataset)[played] if isinstance(played, str) else played
        # TRL repeats the problems of a stream here, and those of a dataset in its sampler
        with self._whole_problems() if isinstance(played, IterableDataset) else nullcontext():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset):
        test_dataset = self._given("test_dataset", test_dataset)
        if isinstance(test_dataset, IterableDataset):  # which TRL repeats for evaluations only
            return self.get_eval_dataloader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler:
        with self._whole_problems():
            return super()._get_eval_sampler(eval_dataset)

    def _given(self, name: str, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """A dataset that the trainer was not made with, checked."""
        check_dataset(name, dataset, self.workflow, self._scorer.reward_funcs)
        return usable(name, dataset, self.workflow, self._scorer.reward_funcs)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test"):
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        # What an evaluation would log, which the next one would otherwise take for its own
        logged = {name: sum(values) / len(values) for name, values in self._metrics["eval"].items()}
        self._metrics["eval"].clear()
        named = {f"{metric_key_prefix}_{name}": value for name, value in logged.items()}
        return output._replace(metrics={**(output.metrics or {}), **named})

    # Rollout

    @property
    def _group_size(self) -> int:
        """G, the episodes per problem in the current mode."""
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _siblings_here(self) -> int:
        """How many siblings always lie side by side on this process: G, or 1 where groups may be split."""
        return 1 if self._splits_groups(self.model.training) else self._group_size

    def _total(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        return int(
            self.accelerator.reduce(torch.tensor(count, device=self.accelerator.device), reduction="sum").item()
        )

    def _generate_rows(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Answers one stage in one generate call; without rows, takes part in the other processes' call."""
        prompt_ids = [row.prompt_ids for row in rows] or [[self._tokenizer.eos_token_id]]
        self._check_context(rows)
        if self.use_vllm and (self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1):
            # There TRL joins the prompts of several processes, and counts on as many from each
            most = max(gather_object([len(prompt_ids)]))
            prompt_ids += [[self._tokenizer.eos_token_id]] * (most - len(prompt_ids))
        merged = self.args.merge_for_generation
        with (
            merged_adapter(self.accelerator.unwrap_model(self.model)) if merged else nullcontext(),
            self._kept_as_it_is() if self.use_transformers_continuous_batching else nullcontext(),
        ):
            completion_ids, logprobs = self._generate_single_turn(prompt_ids, None, {}, 1)
        return completion_ids, logprobs

    def _check_context(self, rows: list[Row]) -> None:
        """Warns once of replies that may reach beyond the positions that the model was trained on."""
        context = self.model.config.get_text_config().to_dict().get("max_position_embeddings")
        longest = max(rows, key=lambda row: len(row.prompt_ids), default=None)
        if longest is None or context is None or self._warned_of_context:
            return
        if len(longest.prompt_ids) + cast(int, self.max_completion_length) > context:
            self._warned_of_context = True
            warnings.warn(
                f"A prompt of agent {longest.slot.agent!r} has {len(longest.prompt_ids)} tokens, which with "
                f"max_completion_length={self.max_completion_length} exceeds the model's context of {context} tokens. Shorten "
                "the prompts, or lower max_completion_length.",
                stacklevel=2,
            )

    @contextmanager
    def _kept_as_it_is(self) -> Iterator[None]:
        """
        Around TRL's continuous batching, which leaves the whole model in training mode, also in evaluation, and casts all
        parameters to the precision of autocast, in which small steps of trainable ones are lost.
        """
        training = self.model.training
        kept = [(p, p.data.clone()) for p in self.model.parameters() if p.requires_grad]
        try:
            yield
        finally:
            self.model.train(training)
            for p, data in kept:
                if p.dtype != data.dtype:
                    p.data = data

    def _play(
        self, problems: list[dict[str, Any]], score: Callable[[list[Episode], int], None] | None
    ) -> list[Episode]:
        """Plays one episode per problem with the current policy; with several processes, a collective operation."""
        ends = None if self.args.early_termination_threshold is None else lambda episode: self._is_over([episode])
        return play(self.workflow, problems, **self._playing, score=score, ends=ends)

    @property
    def _playing(self) -> dict[str, Any]:
        """What plays workflows with the current policy: arguments of `play`."""
        return {
            "generate": self._generate_rows,
            "encode": functools.partial(encode_prompts, self._tokenizer, **cast(dict, self.chat_template_kwargs)),
            "decode": functools.partial(self._tokenizer.batch_decode, skip_special_tokens=True),
            "executor": self._executor,
            "total": self._total,
        }

    def _is_over(self, episodes: list[Episode]) -> bool:
        """Whether the last turn of these siblings earned enough, or nothing that comes could count."""
        rewards = [list(episode.turns[-1].rewards.values()) for episode in episodes if episode.turns[-1].rewards]
        if not rewards:
            return all(episode.masked for episode in episodes)
        mean = sum(sum(by_agent) / len(by_agent) for by_agent in rewards) / len(rewards)
        return mean > cast(float, self.args.early_termination_threshold)

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Takes the most likely token, in place of sampling."""
        if self.use_vllm:
            with patch.object(self.vllm_generation, "temperature", 0.0):
                yield
            return
        saved = self.generation_config
        self.generation_config = copy.deepcopy(saved)
        self.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        try:
            yield
        finally:
            self.generation_config = saved

    @contextmanager
    def use_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """
        Lets `trainer.model` speak as an agent outside of rollouts, for example in a callback, the way evaluation does: in
        evaluation mode, and, where agents have latents, with the mean of the agent's.

        Example:

        ```python
        >>> inputs = trainer.processing_class(["def add(a, b):"], return_tensors="pt").to(trainer.model.device)
        >>> with trainer.use_agent("main", inputs):
        ...     output = trainer.model.generate(**inputs)
        ```

        Args:
            agent (`str`): Name of the agent.
            inputs (`Mapping[str, torch.Tensor]`, *optional*): The prompts, `input_ids` and `attention_mask` of shape
                `(B, P)`, as the model is called with them. Needed with `latent_scope="observation"` alone.

        Raises:
            ValueError: If there is no such agent, or `inputs` are needed and missing.
        """
        if agent not in self.agents:
            raise ValueError(f"agent={agent!r} is not one of {self.agents}. Name one of them.")
        was_training = self.model.training
        self.model.eval()
        try:
            with self._as_agent(agent, inputs):
                yield
        finally:
            self.model.train(was_training)

    def _as_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None) -> AbstractContextManager:
        """Where agents share all weights, they differ by their prompts alone."""
        return nullcontext()

    @contextmanager
    def _gathered_before_training(self) -> Iterator[None]:
        """ZeRO-3 shards the model when it is loaded, but gathers what a forward pass needs only once training began."""
        if self.deepspeed is not None or not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        gathers_itself = self.args.ds3_gather_for_generation
        self.args.ds3_gather_for_generation = False
        try:
            with deepspeed.zero.GatheredParameters(self.model.parameters()):
                yield
        finally:
            self.args.ds3_gather_for_generation = gathers_itself

    def play_episodes(self, problems: list[dict[str, Any]]) -> list[Episode]:
        """
        Plays and scores one episode per problem with the current policy, outside of training.

        With several processes it is a collective operation, and every process must bring the same number of problems.

        Args:
            problems (`list[dict]` of length E): Dataset rows with tests.

        Returns:
            `list[Episode]`: With rewards and, of every turn, the verdict of its solution.
        """
        return self.begin_episodes(problems)()

    def play_unscored(self, problems: list[dict[str, Any]]) -> list[Episode]:
        """
        Plays one episode per problem with the current policy, without rewards; otherwise as [`play_episodes`].

        Args:
            problems (`list[dict]` of length E): Dataset rows.

        Returns:
            `list[Episode]`: Without rewards.
        """
        with self._gathered_before_training():
            return self._play(problems, None)

    def close_executor(self) -> None:
        """Ends the worker processes, if there are any."""
        if self._executor is not None:
            self._executor.close()

    def begin_episodes(
        self, problems: list[dict[str, Any]], groups: Sequence[Sequence[int]] | None = None
    ) -> Callable[[], list[Episode]]:
        """
        As [`play_episodes`], but returns while solutions are still being executed, so that more can be played meanwhile.

        Args:
            problems (`list[dict]` of length E): Dataset rows with tests.
            groups (`Sequence[Sequence[int]]`, *optional*): Episodes that reward functions are called with together, by index;
                as many groups, of the same sizes, on all processes. By default all of them.

        Returns:
            `Callable[[], list[Episode]]`: To be called once, by all processes in the same order: waits for the verdicts,
            scores the episodes, and returns them.
        """
        groups = [range(len(problems))] if groups is None else groups
        # Only where rewards end episodes are turns scored as they are played
        last = self.workflow.num_turns - 1
        scored_first = last if self.args.early_termination_threshold is not None else 0

        def score(episodes: list[Episode], turns: Sequence[int], wait: Callable[[], None] | None) -> None:
            for turn, group in itertools.product(turns, groups):
                self._score([episodes[e] for e in group], turn, wait)
                wait = None

        def end_turn(episodes: list[Episode], turn: int) -> None:
            if turn < scored_first:
                score(episodes, [turn], self._execute(episodes, [turn]))

        with self._gathered_before_training():
            episodes = self._play(problems, end_turn)
        turns = range(scored_first, last + 1)
        wait = self._execute(episodes, turns)

        def finish() -> list[Episode]:
            score(episodes, turns, wait)
            return episodes

        return finish

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's rollout function: plays the episodes of this process and lays their replies out as rows."""
        block = self._group_size * self._num_groups(self.model.training)
        begin = self.accelerator.process_index * len(self._inputs)  # where a problem may have begun on another process
        for i, problem in enumerate(self._inputs):
            first = max(0, i - (begin + i) % block)
            if problem["prompt"] != self._inputs[first]["prompt"]:
                raise ValueError(
                    f"row {i} of a batch has another problem than row {first}, but every problem must stand there "
                    f"{block} times in a row. Take the dataloaders of {type(self).__name__}: they repeat the rows."
                )
        self._rollout_in_flight = self._play_rows(len(prompts))
        rows = self._rollout_in_flight.rows
        # An unused slot is one end-of-sequence token that no loss sees
        dead = [self._tokenizer.eos_token_id]
        has_logprobs = any(row is not None and row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [dead if row is None else row.prompt_ids for row in rows],
            "completion_ids": [dead if row is None else row.completion_ids for row in rows],
            "logprobs": [[0.0] if row is None else row.logprobs for row in rows] if has_logprobs else None,
            "env_mask": [[0] if row is None else [1] * len(row.completion_ids) for row in rows],
        }

    def _play_rows(self, num_rows: int) -> Rollout:
        """Plays the problems of a generation batch, `num_generations` episodes each."""
        slots = self.workflow.slots
        num_generations = self._siblings_here
        block = num_generations * len(slots)
        problems = [self._inputs[p] for p in range(0, num_rows, block) for _ in range(num_generations)]
        episodes = self._play(problems, self._end_turn)
        slot_index = {slot: index for index, slot in enumerate(slots)}
        rows: list[Row | None] = [None] * num_rows
        for e, episode in enumerate(episodes):
            problem, generation = divmod(e, num_generations)
            for row in episode.rows:
                rows[problem * block + slot_index[row.slot] * num_generations + generation] = row
        of_slot = [slots[i // num_generations % len(slots)] for i in range(num_rows)]
        index = torch.arange(num_rows)
        episode_of_row = index // block * num_generations + index % num_generations
        return self._make_rollout([episodes] * self.workflow.num_turns, rows, of_slot, episode_of_row[:, None])

    def _make_rollout(
        self, levels: list[list[Episode]], rows: list[Row | None], of_slot: list[Slot], episodes_of_row: torch.Tensor
    ) -> Rollout:
        """`of_slot`: the slot of every row, `(B,)`; `episodes_of_row`: see [`Rollout`]."""
        device = self.accelerator.device
        by_agent = len(levels[-1]), len(self.agents), self.workflow.num_turns
        live = torch.tensor([row is not None for row in rows], device=device)
        return Rollout(
            levels=levels,
            rows=rows,
            wait=self._execute(levels[-1], [self.workflow.num_turns - 1]) if self._scorer.runs_tests else None,
            scores=torch.full((by_agent[0], by_agent[2], len(self.reward_funcs)), torch.nan),
            agent=torch.tensor([self.agents.index(slot.agent) for slot in of_slot], device=device),
            turn=torch.tensor([slot.turn for slot in of_slot], device=device),
            episodes_of_row=episodes_of_row.to(device),
            live=live,
            trained=live,
            rewards=torch.zeros(by_agent, device=device),
            returns=torch.zeros(by_agent, device=device),
            counted=torch.zeros(by_agent[0], by_agent[2], dtype=torch.bool, device=device),
        )

    # Rewards

    def _execute(self, episodes: list[Episode], turns: Iterable[int]) -> Callable[[], None]:
        """Begins to execute the solutions of these turns; what it returns waits for their verdicts."""
        return self._scorer.execute(
            [(episode, episode.turns[k]) for k in turns for episode in episodes if len(episode.turns) > k]
        )

    def _score(self, episodes: list[Episode], turn: int, wait: Callable[[], None] | None) -> list[tuple[str, float]]:
        """Scores a turn once `wait` has its verdicts, and returns what reward functions gave to `log_metric`."""
        calculate = super()._calculate_rewards
        return self._scorer.score(episodes, turn, wait, calculate, self.accelerator, self.reward_weights)

    def _score_and_log(self, episodes: list[Episode], turn: int, wait: Callable[[], None] | None) -> None:
        for name, value in self._score(episodes, turn, wait):
            self._log_metric(name, value)

    def _end_turn(self, episodes: list[Episode], turn: int) -> None:
        """Scores a turn. The last one waits until TRL asks for rewards: meanwhile its solutions are executed."""
        if turn < self.workflow.num_turns - 1:
            self._score_and_log(episodes, turn, self._execute(episodes, [turn]) if self._scorer.runs_tests else None)

    def _end_rollout(self, rollout: Rollout) -> None:
        """Scores the last turn, and puts all rewards, and which rows they leave alive, into the rollout."""
        self._score_and_log(rollout.episodes, self.workflow.num_turns - 1, rollout.wait)
        rewards = torch.zeros(rollout.rewards.shape)
        played, counted = torch.zeros(2, *rollout.counted.shape, dtype=torch.bool)
        for k, episodes in enumerate(rollout.levels):
            for e, episode in enumerate(episodes):
                if len(episode.turns) <= k:
                    continue
                turn = episode.turns[k]
                assert turn.score is not None
                rollout.scores[e, k] = torch.tensor(turn.score.values)
                if turn.rewards is not None:
                    rewards[e, :, k] = torch.tensor([turn.rewards[agent] for agent in self.agents])
                played[e, k] = True
                counted[e, k] = turn.rewards is not None and not episode.masked
        rollout.rewards.copy_(rewards)
        rollout.counted.copy_(counted)
        self._set_returns(rollout, played.to(rollout.counted.device))
        rollout.live = rollout.live & rollout.counted[rollout.episodes_of_row, rollout.turn[:, None]].any(1)

    def _set_returns(self, rollout: Rollout, played: torch.Tensor) -> None:
        """Return of every agent from every turn on; `played`: whether an episode had the turn, `(E, K)`."""
        returns = turn_returns(rollout.rewards.flatten(0, 1), self.args.gamma_turn)
        rollout.returns = returns.view_as(rollout.rewards)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """
        The immediate reward of every row, which TRL logs; episodes were scored, through `super()`, when their turns ended.
        """
        rollout = self._rollout_in_flight
        assert rollout is not None
        self._end_rollout(rollout)
        rows = torch.full((len(prompts), len(self.reward_funcs)), torch.nan, device=self.accelerator.device)
        of_row = [None if row is None else self._score_of(rollout, row) for row in rollout.rows]
        logged = {column for score in of_row if score is not None for column in score.columns}
        # A column that was logged once has a value in every batch from then on, also where its function failed
        columns = sorted(self._logs["extra"].keys() | set(gather_object(list(logged))))
        for column in columns:
            if column not in self._logs["extra"]:
                self._logs["extra"][column].extend([None] * len(self._logs["prompt"]))
        scored = rollout.live & rollout.last_act
        rows[scored] = rollout.mean_over_episodes(rollout.scores.to(rows))[scored]
        for column in columns:
            if column not in ("agent", "turn"):
                values = [None if score is None else score.columns.get(column) for score in of_row]
                self._log_completion_extra(column, values)
        self._log_completion_extra("agent", [self.agents[i] for i in rollout.agent.tolist()])
        self._log_completion_extra("turn", rollout.turn.tolist())
        return self.accelerator.gather(rows)

    @staticmethod
    def _score_of(rollout: Rollout, row: Row) -> Score | None:
        """What the reward functions said of a row's turn; of several episodes that hold the row, in the first."""
        turn = row.slot.turn
        return rollout.levels[turn][row.episode].turns[turn].score

    # Credit

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        self._inputs = inputs
        output = super()._generate_and_score_completions(inputs)
        rollout = self._rollout_in_flight
        assert rollout is not None
        # TRL may have masked more rows than the rollout, such as truncated ones
        rollout.trained = rollout.live & (output["completion_mask"] * output["tool_mask"]).any(1)
        output["tool_mask"] = output["tool_mask"] * rollout.trained[:, None]
        mask = output["completion_mask"] * output["tool_mask"]
        output["num_items_in_batch"] = self._sum_over_processes(mask.sum())
        output["agent"], output["turn"] = rollout.agent, rollout.turn
        live, trained, total = self._sum_over_processes(
            torch.stack([rollout.live.sum(), rollout.trained.sum(), torch.ones_like(rollout.live).sum()])
        )
        output["rows_per_live_row"] = total / live.clamp(min=1)
        output["rows_per_trained_row"] = total / trained.clamp(min=1)
        self._assign_credit(output, rollout)
        self._log_rollout(output, rollout)
        self._rollout_in_flight = None
        return output

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    def _row_returns(self, rollout: Rollout) -> torch.Tensor:
        """Return of the row's agent from the row's turn on, `(B,)`, 0 on dead rows."""
        return rollout.of_agent(rollout.returns) * rollout.live

    def _row_weights(self, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Weight of each row in the loss, `(B,)`: its agent's times its turn's."""
        weights = self._agent_weights(mask, rollout)
        if self.args.turn_weights is not None:
            weights = weights * torch.tensor(self.args.turn_weights, device=mask.device)[rollout.turn]
        return weights

    def _agent_weights(self, mask: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Equal for all agents, or 1, `(B,)`."""
        if self.args.agent_loss_weighting == "token" or len(self.agents) == 1:
            return torch.ones(mask.size(0), device=mask.device)
        unit = "row" if self.loss_type == "grpo" else "token"
        return agent_weights(mask, rollout.agent, len(self.agents), unit=unit, reduce=self._sum_over_processes)

    def _assign_credit(self, output: dict[str, Any], rollout: Rollout) -> None:
        """Replaces TRL's advantages, `(B,)` or `(B, T)`."""
        mask = output["completion_mask"] * output["tool_mask"]
        output["advantages"] = self._group_advantages(rollout) * self._row_weights(mask, rollout)

    def _group_advantages(self, rollout: Rollout) -> torch.Tensor:
        """Advantage of each row over its siblings, `(B,)`, in reward units, 0 on dead rows."""
        return self._over_siblings(rollout, kind="mean")

    def _over_siblings(self, rollout: Rollout, **options: Any) -> torch.Tensor:
        """[`group_advantages`] with these options, `(B,)`; siblings may lie on other processes."""
        rows = self._row_returns(rollout), rollout.live, rollout.agent
        sums: SumOverProcesses | None = self._sum_over_processes
        here = slice(0, len(rollout.rows))
        if self._splits_groups(self.model.training) and self.accelerator.num_processes > 1:
            begin = self.accelerator.process_index * len(rollout.rows)
            here, sums = slice(begin, begin + len(rollout.rows)), None
            rows = tuple(self.accelerator.gather(x) for x in rows)
        returns, live, agents = rows
        return group_advantages(returns, self._group_size, mask=live, agents=agents, sums=sums, **options)[here]

    def _compute_loss(self, model, inputs):
        beta = self.beta
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        share = self._share_of_live_rows(inputs, mask)
        if share is not None:  # the policy and KL terms are linear in advantages and beta
            inputs = inputs | {"advantages": inputs["advantages"] * share}
            self.beta = beta * share.item()
        if self.model.training:
            # TRL's bonus is a mean over the micro-batch's tokens. This makes it the mean over those of the optimizer step
            window = self._window(inputs["num_items_in_batch"])
            self._entropy_share = mask.sum() * self.current_gradient_accumulation_steps / window
        metrics = self._metrics["train" if self.model.training else "eval"]
        logged = {name: len(metrics[name]) for name in _MICRO_BATCH_MEANS if name in metrics}
        try:
            with self._watching_gradients(inputs["agent"]):
                loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
            self._entropy_share = None
        self._pool_micro_batch(logged, mask)
        return loss

    def _share_of_live_rows(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
        """
        What the policy and KL terms of a micro-batch are multiplied by so that rows that nobody played do not dilute them;
        `None` where they do not.
        """
        if self.loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):  # means over the rows of the micro-batch
            return inputs["rows_per_live_row"]
        if (
            self.loss_type == "bnpo"
        ):  # a mean over its live tokens: only micro-batches with fewer of them count too much
            return mask.any(1).float().mean() * inputs["rows_per_trained_row"]
        return None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if entropies is not None and self._entropy_share is not None:
            # The same values, which TRL logs and controls the coefficient with, and another gradient
            values = entropies.detach()
            entropies = values + self._entropy_share * (entropies - values)
        return logps, entropies, aux_loss

    def _pool_micro_batch(self, logged: dict[str, int], mask: torch.Tensor) -> None:
        """
        Replaces TRL's means over the tokens of a micro-batch, of which `logged` are older, by means over the logging window: a
        micro-batch without live tokens has a mean of 0, which must not count.
        """
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in _MICRO_BATCH_MEANS:
            if len(metrics.get(name, ())) > logged.get(name, 0):
                mean = metrics[name].pop()
                if not metrics[name]:
                    del metrics[name]
                # By sequence, clipping is counted over all rows of the micro-batch, of which dead ones are never clipped
                rows = self.importance_sampling_level == "sequence" and "clip_ratio" in name
                size, count = (mask.new_tensor(len(mask)), mask.any(1).sum()) if rows else (mask.sum(), mask.sum())
                self._pool(name, mean * size.double(), count)

    def _window(self, count: torch.Tensor) -> torch.Tensor:
        """
        What a sum over a micro-batch is divided by, so that an optimizer step averages over the `count` items of the
        generation batch's share that it uses: TRL's own normaliser.
        """
        normalizer = count.clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normalizer

    @contextmanager
    def _watching_gradients(self, agent: torch.Tensor) -> Iterator[None]:
        """
        Adds up, per agent, the norms of the gradients that reach the policy's last hidden states, token by token; `agent`:
        of the rows of the micro-batch, `(B,)`.
        """

        def add(gradient: torch.Tensor) -> None:
            self._gradient_mass.index_add_(0, agent, gradient.detach().float().norm(dim=-1).sum(1))

        def watch(decoder: torch.nn.Module, args: Any, output: Any) -> None:
            if output[0].requires_grad:
                output[0].register_hook(add)

        causal_lm = self.model.get_base_model() if is_peft_model(self.model) else self.model
        handle = causal_lm.get_decoder().register_forward_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    # Logs

    def _metric(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _pool(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Adds to a mean over the logging window and all processes, each of which must add to the same names."""
        pooled = self._pooled["train" if self.model.training else "eval"]
        sums = torch.stack([total.detach().double(), count.detach().double()])
        pooled[name] = pooled[name] + sums if name in pooled else sums

    def _pooled_means(self) -> dict[str, float]:
        """The means of what was pooled since the log before, by name; those of nothing are left out."""
        pooled = self._pooled["train" if self.model.training else "eval"]
        if not pooled:
            return {}
        names = sorted(pooled)
        sums = self._sum_over_processes(torch.stack([pooled[name] for name in names])).tolist()
        pooled.clear()
        return {name: total / count for name, (total, count) in zip(names, sums, strict=True) if count}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and len(self.agents) > 1:
            self._log_gradient_shares()
        for name, mean in self._pooled_means().items():
            self._metric(name, mean)
        if self.num_generations_eval == 1:  # TRL's figures of how siblings differ
            for name in ("reward_std", "frac_reward_zero_std"):
                self._metrics["eval"].pop(name, None)
        super().log(logs, start_time)
        if self._episode_to_show is not None and self.accelerator.is_main_process:
            Console().print(episode_trace(self._episode_to_show, f"an episode of step {self.state.global_step}"))
            self._episode_to_show = None

    def _log_gradient_shares(self) -> None:
        """
        Each agent's share of the policy's gradient since the log before: of the sum over tokens, micro-batches and
        processes of the norm that the loss's gradient has at the last hidden state. Such a sum does not depend on how rows
        are split, and agents that weigh the same pull with the same share, however much they write.
        """
        mass = self._sum_over_processes(self._gradient_mass.clone())
        self._gradient_mass.zero_()
        if mass.sum() > 0:
            for agent, share in zip(self.agents, (mass / mass.sum()).tolist(), strict=True):
                self._metric(f"agents/{agent}/gradient_share", share)

    def _log_rollout(self, output: dict[str, Any], rollout: Rollout) -> None:
        """Metrics of the team and of every agent, over all processes."""
        replies = [[] if row is None else row.completion_ids for row in rollout.rows]
        lengths = torch.tensor([float(len(ids)) for ids in replies], device=rollout.live.device)
        eos_and_pad = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        ends = torch.tensor([bool(ids) and ids[-1] in eos_and_pad for ids in replies], device=lengths.device)
        columns = {
            "reward": rollout.of_agent(rollout.rewards),
            "return": self._row_returns(rollout),
            "completion_length": lengths,
            "clipped_ratio": (~ends).float(),
        }
        played = lengths > 0
        scored = {"reward": rollout.live & rollout.last_act, "return": rollout.live}
        groups = [(f"agents/{agent}", rollout.agent == i) for i, agent in enumerate(self.agents)]
        if self.workflow.num_turns > 1:
            groups += [
                (f"{prefix}/turn_{k + 1}", own & (rollout.turn == k))
                for prefix, own in groups
                for k in range(self.workflow.num_turns)
            ]
        chosen = torch.stack([own & scored.get(name, played) for _, own in groups for name in columns])
        values = torch.stack([column for _ in groups for column in columns.values()])
        sums = self._sum_over_processes(torch.stack([(values * chosen).sum(1), chosen.sum(1).float()])).tolist()
        names = [f"{prefix}/{name}" for prefix, _ in groups for name in columns]
        for name, total, count in zip(names, *sums, strict=True):
            if count:
                self._metric(name, total / count)
        if self.log_completions:
            self._episode_to_show = rollout.episodes[0]
        masked = torch.tensor([episode.masked for episode in rollout.episodes], device=lengths.device).float()
        masked_share = self._sum_over_processes(
            torch.stack([masked.sum(), torch.tensor(float(len(masked)), device=lengths.device)])
        )
        self._metric("episodes/masked", (masked_share[0] / masked_share[1]).item())
        if self.args.on_reward_error == "mask":
            turns = [e.turns[k] for k, level in enumerate(rollout.levels) for e in level if len(e.turns) > k]
            failures = [turn.score is not None and turn.score.failed for turn in turns]
            failed, scored_turns = self._sum_over_processes(
                torch.tensor([sum(failures), len(failures)], device=lengths.device)
            ).tolist()
            self._metric("rewards/failed", failed / max(1, scored_turns))
        advice = [text is None for episode in rollout.episodes for text in episode.advice]
        failed, asked = self._sum_over_processes(
            torch.tensor([sum(advice), len(advice)], dtype=torch.float, device=lengths.device)
        ).tolist()
        if asked:
            self._metric("feedback/failed", failed / asked)
        if self.workflow.num_turns > 1:
            self._log_turns(rollout)
        if self._curriculum is not None and self.model.training:
            self._metric("curriculum/stage", self._curriculum.stage_of(self._curriculum.batches) + 1)
            by_rate = self.args.curriculum_pass_rate is not None  # otherwise problems need no tests
            self._curriculum.note(self._pass_rate(rollout.episodes) if by_rate else None)
        # Dead rows are no completions: TRL's figures without them
        lengths, ends = self.accelerator.gather(torch.stack([lengths, ends.float()], dim=1)).T
        lengths, ends = lengths[lengths > 0], ends[lengths > 0] > 0
        metrics = self._metrics["train" if self.model.training else "eval"]
        for kind, of_kind in (("", lengths), ("terminated_", lengths[ends] if ends.any() else lengths.new_zeros(1))):
            for name, value in (("mean", of_kind.mean()), ("min", of_kind.min()), ("max", of_kind.max())):
                metrics[f"completions/{name}_{kind}length"][-1] = value.item()
        metrics["completions/clipped_ratio"][-1] = 1 - ends.float().mean().item()
        # The completions table shows the advantages that are trained on: a row's mean over its live tokens
        advantages = output["advantages"]
        if advantages.dim() == 2:
            mask = output["completion_mask"] * output["tool_mask"]
            advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        gathered = gather_object(advantages.tolist())
        shown = cast(deque, self._logs["advantages"])
        for _ in range(min(len(gathered), len(shown))):
            shown.pop()
        shown.extend(gathered)

    def _pass_rate(self, episodes: list[Episode]) -> float | None:
        """Share of the tests that the last solutions of all processes' episodes pass; `None` where nothing was tested."""
        rates = []
        for episode in episodes:
            known = dict(episode.turns[-1].verdicts)
            verdict = known.get(solution_job(episode.problem, episode.turns[-1].solution))
            if verdict is not None and verdict.status != "infrastructure":
                rates.append(verdict.passed / verdict.total)
        total, count = self._sum_over_processes(
            torch.tensor([sum(rates), len(rates)], dtype=torch.float, device=self.accelerator.device)
        ).tolist()
        return total / count if count else None

    def _log_turns(self, rollout: Rollout) -> None:
        """How many turns episodes had; a threshold that ends all of them at once, or none, is warned of at first."""
        turns = torch.tensor([len(episode.turns) for episode in rollout.episodes], device=rollout.live.device)
        total, single, full, count = self._sum_over_processes(
            torch.stack([turns.sum(), (turns == 1).sum(), (turns == self.workflow.num_turns).sum(), (turns > 0).sum()])
        ).tolist()
        self._metric("episodes/turns", total / count)
        self._metric("episodes/ended_early", 1 - full / count)
        threshold = self.args.early_termination_threshold
        if threshold is not None and not self._threshold_was_tried:
            self._threshold_was_tried = True
            if count in (single, full):
                found = "no episode earned more" if count == full else "every episode earned more in its first turn"
                warnings.warn(f"early_termination_threshold={threshold}: in the first batch {found}", stacklevel=2)

    # Checkpoints

    def team_description(self) -> dict[str, Any]:
        """What a saved team is: agents, role texts, workflow, base model, versions."""
        return describe_team(self, {})

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if self.is_world_process_zero():
            self._warn_of_schedule()
        with only_run_in(self._folder(None)):
            checkpoint = find_checkpoint(self.args, resume_from_checkpoint)
            if checkpoint is not None:
                check_checkpoint(self, checkpoint)
            elif (
                self.args.save_strategy != "no"
                and self.is_world_process_zero()
                and (earlier := checkpoints_in(self._folder(None)))
            ):
                warnings.warn(
                    f"output_dir={self.args.output_dir!r} has {earlier[-1].name} of an earlier run, and this run will add its own "
                    "checkpoints. Set another output_dir, or delete the earlier ones.",
                    stacklevel=2,
                )
            return super().train(checkpoint, *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args):
        begin = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        # A run that is resumed at its end has no epoch left; the Trainer would make one more step
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begin

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with full_disk_explained(self._folder(output_dir), self._folder(None)):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model, trial) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (checkpoint / COMPLETE_FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        # Older checkpoints are deleted once this one is whole, which the Trainer does not wait for
        with (
            full_disk_explained(checkpoint, checkpoint.parent),
            patch.object(transformers.trainer, "rotate_checkpoints") as rotate,
        ):
            super()._save_checkpoint(model, trial)
            self._mark_complete(checkpoint)
        for call in rotate.call_args_list:
            rotate_checkpoints(*call.args, **call.kwargs)

    def _mark_complete(self, checkpoint: Path) -> None:
        self.accelerator.wait_for_everyone()
        assert self.args.steps_per_generation is not None
        begun = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        if begun and self.accelerator.is_main_process:
            warnings.warn(
                f"{checkpoint} is written while rows are left to be trained on, and cannot be continued: the run ends, or its "
                f"steps_per_generation={self.args.steps_per_generation} x num_iterations={self.num_iterations} "
                f"micro-batches per rollout are no whole number of steps of gradient_accumulation_steps="
                f"{self.args.gradient_accumulation_steps}",
                stacklevel=2,
            )
        if self.args.should_save:
            mark_complete(checkpoint, rollout_begun=begun)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        states = cast(dict, self.state.stateful_callbacks)
        for callback in self.callback_handler.callbacks:
            saved = states.get(type(callback).__name__)
            # The Trainer does not restore callbacks by default, and the patience that was used up would begin anew
            if isinstance(callback, EarlyStoppingCallback) and isinstance(saved, dict):
                callback.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            # The next checkpoint takes for granted that this one knew the callback
            if isinstance(callback, ExportableState) and saved is None:
                states[type(callback).__name__] = callback.state()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # vLLM has other weights, though no step was made

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save:
            write_json(self._folder(output_dir) / TEAM_FILE, self.team_description())

    def _folder(self, output_dir: str | None) -> Path:
        folder = output_dir or self.args.output_dir
        assert folder is not None
        return Path(folder)

    # Sharing

    def export_agents(self, path: str | Path, problems: Iterable[dict[str, Any]] | None = None) -> dict[str, dict]:
        """Writes one ordinary PEFT adapter per agent; see [`~marcog_trl.team.export.export_agents`]."""
        return export.export_agents(self, path, problems)

    def push_agents_to_hub(
        self, repo_id: str, problems: Iterable[dict[str, Any]] | None = None, **options: Any
    ) -> CommitInfo | None:
        """Pushes the team and its agents as ordinary adapters; see [`~marcog_trl.team.hub.push_agents`]."""
        return hub.push_agents(self, repo_id, problems, **options)

    def push_to_hub(self, *args, **kwargs):
        # First of all, so that nothing is lost where the Hub does not take it
        names = {name: kwargs[name] for name in ("model_name", "dataset_name") if name in kwargs}
        hub.save_repository(self, **names)
        with hub.clear_push_errors(self.args.hub_model_id, self._folder(None)):
            commit = super().push_to_hub(*args, **kwargs)
            if self.is_world_process_zero():
                where = {name: kwargs[name] for name in ("token", "revision") if name in kwargs}
                hub.drop_other_agents(
                    cast(str, self.hub_model_id), self._folder(None), **{"token": self.args.hub_token, **where}
                )
        return commit

    def init_hf_repo(self, *args, **kwargs) -> None:
        with hub.clear_push_errors(self.args.hub_model_id, self._folder(None)):
            super().init_hf_repo(*args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        card.finish_card(self)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._mark_complete(Path(checkpoint_folder))  # what is pushed can be continued
        if hub.begin_checkpoint_push(self, checkpoint_folder):
            super()._push_from_checkpoint(checkpoint_folder)
