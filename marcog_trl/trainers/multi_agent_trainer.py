"""
The base trainer: plays a workflow in place of TRL's completions, and computes rewards and credit by agent and turn.

The path of a problem through TRL. * marks TRL's methods:

    train*                        checks the checkpoint to resume from, then runs TRL's loop (checkpointing.py)
      get_train_dataloader*       repeats each problem once per row (dataloaders.py)
      training_step*
        _prepare_inputs*          once per generation batch:
          _generate_and_score_completions*
            _rollout              TRL's `rollout_func`: plays the workflow on the problems, one row per reply
              team.play_tree      plays stage by stage (rollout/), and scores every turn but the last as it ends
                generate          generates one stage with TRL's `_generate_single_turn`* (training_team.py)
            _calculate_rewards*   scores the last turn (rewards/scoring.py), and returns the rewards of the rows
            _assign_credit        replaces TRL's advantages
            _log_batch            logs metrics of agents, turns and episodes (metrics.py)
        _compute_loss*            once per micro-batch: TRL's loss. The advantages include the weights of agents and turns
          _get_per_token_logps_and_entropies*
      log*                        adds the means over the logging window

TRL passes nothing from `_rollout` to `_log_batch`, so `self._batch` holds the batch in between.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from marcog_trl.agents import Workflow, with_tools
from marcog_trl.execution import CodeExecutor
from marcog_trl.report.callback import ReportCallback
from marcog_trl.report.console import MOST_EPISODES, print_episodes
from marcog_trl.report.diagnosis import Diagnosis
from marcog_trl.rewards.scoring import Scorer, is_over, is_reward_model
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.data_checks import check_dataset, check_eval_dataset, usable
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.modules import TeamModule
from marcog_trl.team.settings import TeamSettings
from marcog_trl.trainers import metrics
from marcog_trl.trainers.adapter_targets import adapter_config
from marcog_trl.trainers.argument_checks import (
    check_arguments,
    check_curriculum,
    check_optimizer,
    check_workflow,
    check_zero3,
)
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.checkpointing import RolloutCheckpoints
from marcog_trl.trainers.config import MultiAgentConfig
from marcog_trl.trainers.credit import over_siblings, row_weights
from marcog_trl.trainers.dataloaders import lent
from marcog_trl.trainers.head import HeadOnReplies
from marcog_trl.trainers.layout import fit_batches
from marcog_trl.trainers.loss_scale import loss_window, rows_to_train, rows_with_signal, share_of_live_rows
from marcog_trl.trainers.prompts import as_in_trl, check_prompts
from marcog_trl.trainers.reward_functions import reward_functions
from marcog_trl.trainers.sampling import make_curriculum
from marcog_trl.trainers.sharing import Sharing
from marcog_trl.trainers.tool_use import ToolUse, check_environments
from marcog_trl.trainers.training_team import TrainingTeam


class MultiAgentTrainer(RolloutCheckpoints, Sharing, ToolUse):
    """
    Base of the trainers for teams of LLM agents that share one model and one adapter.

    It is a [`~trl.GRPOTrainer`] that trains on episodes of a workflow instead of single completions. One row of the batch
    is one reply of one agent. With the `single` workflow (the default), it takes the arguments of `GRPOTrainer`. The
    advantage of a row is its return minus the mean return of its group (Source: GRPO,
    https://huggingface.co/papers/2402.03300, without the division by the standard deviation).

    Differences from [`~trl.GRPOTrainer`]: `args` is a [`MultiAgentConfig`]. `rollout_func` is not supported: write a workflow
    instead. Models are text-only.

    Args:
        model, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config:
            As in [`~trl.GRPOTrainer`].
        reward_funcs (`str`, `Callable` or `list`):
            As in [`~trl.GRPOTrainer`], or the name of a reward of this package such as `"execution_reward"`. A function
            is called once per turn with lists that have one entry per episode: `completions` (the solutions), `replies`
            (agent -> text), `turn`, `verdicts` and the dataset's columns. It returns one float or dict (agent -> float) per
            episode, or `None` if the reward does not apply. Episodes without any reward are not trained on, and neither are
            those for which a function returns an [`~marcog_trl.rewards.InfrastructureFailure`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            Defaults to LoRA of rank 16 on all linear layers, except for those of Mamba layers that PEFT cannot adapt.
        workflow ([`Workflow`] or `str`, *optional*):
            Which agents speak when, and what they see. Defaults to `args.workflow`.
        tools, environment_factory: As in [`~trl.GRPOTrainer`]. `tools` needs a workflow of one agent: in a team, agents have
            their own (see [`Agent`]). `environment_factory` needs episodes of one reply.

    Raises:
        ValueError: If a batch cannot hold whole problems, or the workflow, the dataset and the rewards do not fit together.
            Raised before any work starts.
    """

    _tag_names = ["trl", "marcog-trl", "multi-agent"]
    _name = "Multi-agent RL"
    _config_class: type[MultiAgentConfig] = MultiAgentConfig
    args: MultiAgentConfig
    model: Any  # a PeftModel, or a causal LM
    num_generations: int
    num_generations_eval: int
    # Inputs of forward passes besides token ids; set while TRL computes log-probabilities
    _row_tensors: dict[str, torch.Tensor] | None = None
    _wait: Callable[[], None] | None = None  # waits for the verdicts on the solutions of the last turn
    # Told what the trainer does, as a step may take minutes
    on_activity: Callable[[str], None] = staticmethod(lambda activity: None)

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
        args = check_arguments(
            type(self),
            model,
            args,
            peft_config,
            quantization_config,
            rollout_func=rollout_func,
        )
        self.args = args  # TRL sets it too, but the checks below need it
        self.workflow = with_tools(args.make_workflow(workflow), tools)
        self.agents = [agent.name for agent in self.workflow.agents]
        reward_funcs = reward_functions(reward_funcs, optional=environment_factory is not None)
        self.trained_agents = check_workflow(self.workflow, args)
        given, self.workflow = self.workflow, as_in_trl(self.workflow, args, train_dataset)
        if environment_factory is None:
            check_dataset("train_dataset", train_dataset, self.workflow, reward_funcs)
            check_eval_dataset(eval_dataset, self.workflow, reward_funcs)
            train_dataset = usable("train_dataset", train_dataset, self.workflow, reward_funcs)
        else:
            check_environments(self, {"train_dataset": train_dataset, "eval_dataset": eval_dataset}, reward_funcs)
        self._check_tree(train_dataset)
        fit_batches(self, args, train_dataset)
        num_rows = len(self._tree(training=True).slots)
        self._curriculum = make_curriculum(args, train_dataset, cast(int, args.generation_batch_size) // num_rows)
        self.scorer = Scorer(reward_funcs, self.agents, lambda: self.executor, args)
        # Created before the model is loaded, because it may not support this machine
        executor = args.make_executor() if self.workflow.needs_tests or self.scorer.runs_tests else None
        check_curriculum(args, self._curriculum is not None, executor is not None)
        self.diagnosis = Diagnosis()
        peft_config = self._adapter_config(model, peft_config)
        if args.ddp_find_unused_parameters is None:
            # The Trainer's default for adapters is True, which fails if the forward pass computes values that it does not
            # return
            args.ddp_find_unused_parameters = False

        super().__init__(
            model=model,
            reward_funcs=list(reward_funcs),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=list(dict.fromkeys(tool for agent in self.workflow.agents for tool in agent.tools)) or None,
            environment_factory=environment_factory,
        )
        if environment_factory is not None:
            self._adopt_environments()
        for callback in (self._curriculum, self.diagnosis):
            if callback is not None:
                self.add_callback(callback)
        if self._is_vlm:
            raise ValueError("processing_class is a multimodal processor. Pass a text tokenizer.")
        check_optimizer(self.optimizer, self.model)
        if environment_factory is None:
            parts = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
            datasets = {"train_dataset": train_dataset, **parts}
            check_prompts(datasets, self.workflow, args, self._tokenizer, self.workflow is not given)
        self.scorer.check_tokenizer(self._tokenizer)
        self.scorer.funcs = self.reward_funcs  # TRL has loaded reward models, and added the rewards of environments
        self.scorer.weights = lambda: self.reward_weights
        self.scorer.score_models = self._score_models
        self.scorer.given = self._given_to_rewards
        self.scorer.timed = lambda name: profiling_context(self, name)
        if self.scale_rewards == "agent":
            self.scale_rewards = "none"  # TRL does not know this value, and its advantages are replaced
        # TRL warns that rollout functions are experimental if they are passed to its constructor
        self.rollout_func = self._rollout
        check_zero3(self.model, args)
        self.team = TrainingTeam(
            self,
            workflow=self.workflow,
            settings=TeamSettings.of(args),
            description=self._describe_team(),
            modules=self._make_modules(),
            executor=executor,
        )
        self.report: ReportCallback | None = None
        if args.write_report:
            self.report = ReportCallback(self._name, self.team.description.to_dict(), self.diagnosis.found)
            self.add_callback(self.report)
        self._window_means = metrics.WindowMeans()
        self._gradient_shares = metrics.GradientShares(self.agents, self.accelerator.device)
        # Factor of the gradient of TRL's entropy bonus, set while TRL computes a loss
        self._entropy_share: torch.Tensor | None = None
        self._batch: TeamBatch | None = None  # see the top of this file
        self._inputs: list[dict[str, Any]] = []  # of the generation batch; TRL's rollout function gets only prompts
        # With log_completions, episodes are printed in place of TRL's table, which has a row per reply
        shown = MOST_EPISODES if args.num_completions_to_print is None else args.num_completions_to_print
        self.num_episodes_to_print, self.num_completions_to_print = min(shown, MOST_EPISODES), 0
        self._episodes_to_show: list[Episode] = []
        self._warned: set[str] = set()

    def _adapter_config(self, model, peft_config: PeftConfig | None) -> PeftConfig | None:
        """Returns the configuration of the adapter to train."""
        return adapter_config(model, peft_config, self.args, experts=True)

    # Team

    def _describe_team(self) -> TeamDescription:
        """Returns the content of `team.json`."""
        return TeamDescription.of(
            type(self).__name__, self.model, self.workflow, self.reward_func_names, self.args, self._describe_modules()
        )

    def _describe_modules(self) -> dict[str, Any]:
        """Returns the settings that determine the shapes of the team's modules."""
        return {}

    def _make_modules(self) -> TeamModule | None:
        """Creates the team's modules and attaches them to the model."""
        return None

    @property
    def executor(self) -> CodeExecutor:
        """Runs the agents' code in worker processes, which start when they are first needed."""
        return self.team.executor

    @contextmanager
    def use_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Makes `trainer.model` act as an agent outside of rollouts, for example in a callback. See [`Team.use_agent`]."""
        with self.team.use_agent(agent, inputs):
            yield

    # Play

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's rollout function: plays the episodes of this process, and arranges their replies as rows."""
        block = len(self._tree(self.model.training).slots)
        begin = self.accelerator.process_index * len(self._inputs)  # a problem may begin on another process
        for i, problem in enumerate(self._inputs):
            first = max(0, i - (begin + i) % block)
            if self.environments is None and problem["prompt"] != self._inputs[first]["prompt"]:
                raise ValueError(
                    f"rows {first} and {i} of a batch have different problems, but a batch must repeat every problem {block} "
                    f"times in a row. Use the dataloaders of {type(self).__name__}."
                )
        tree = self._tree_here()
        self._batch = self._play(self._inputs[:: len(tree.slots)], tree)
        rows = self._batch.rows
        # An unused slot has one end-of-sequence token, which the loss ignores
        dead = [self._tokenizer.eos_token_id]
        has_logprobs = any(row is not None and row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [dead if row is None else row.prompt_ids for row in rows],
            "completion_ids": [dead if row is None else row.completion_ids for row in rows],
            "logprobs": [[0.0] if row is None else row.logprobs for row in rows] if has_logprobs else None,
            "env_mask": [[0] if row is None else row.mask for row in rows],
        }

    def _play(self, problems: list[dict[str, Any]], tree: Tree) -> TeamBatch:
        """Plays the episodes of these problems, and starts to execute their last solutions."""
        threshold = self.args.early_termination_threshold
        ends = None if threshold is None else lambda episode: is_over(episode, threshold)
        turns = self.team.play_tree(problems, tree, self._end_turn, ends, **self._playing())
        self._wait = self.scorer.execute(turns[-1], [len(turns) - 1]) if self.scorer.runs_tests else None
        training = self.model.training
        return TeamBatch.of(
            tree,
            turns,
            self.agents,
            self.workflow.slots,
            self.trained_agents,
            self.accelerator.device,
            training,
            self._tree(training).siblings[0] if self._splits_groups(training) else None,
        )

    def _playing(self) -> dict[str, Any]:
        """Returns the options of [`Team.playing`] for rollouts."""
        return {} if self.environments is None else {"tools_of": self._environment_tools}

    def _before_generation(self, rows: list[Row]) -> None:
        """Called before a stage is generated."""

    # Score

    def _given_to_rewards(self) -> dict[str, Any]:
        """What TRL passes to reward functions beside columns."""
        return {"trainer_state": self.state} | (
            {} if self.environments is None else {"environments": self.environments}
        )

    def _score_models(self, *inputs: list) -> torch.Tensor:
        """Returns the scores of the reward models, `(E, number of models)`. TRL calls them."""
        models = [f for f, func in enumerate(self.reward_funcs) if is_reward_model(func)]
        names = ("reward_funcs", "reward_processing_classes", "reward_func_names")
        with lent(self, **{name: [getattr(self, name)[f] for f in models] for name in names}):
            scores = super()._calculate_rewards(*inputs)
        own = self.accelerator.process_index * len(inputs[0])
        return scores[own : own + len(inputs[0])]

    def _end_turn(self, episodes: list[Episode], turn: int) -> None:
        """Scores a turn, except for the last: its solutions are executed until TRL asks for rewards."""
        if turn < self.workflow.num_turns - 1:
            self._log_metrics_of_rewards(self.scorer.end_turn(episodes, turn))

    def _log_metrics_of_rewards(self, logged: Iterable[tuple[str, float]]) -> None:
        for name, value in logged:
            self._log_metric(name, value)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Returns the immediate reward of every row, which TRL logs."""
        batch = self._batch
        assert batch is not None
        self.on_activity(f"judging {len(batch.episodes)} episodes")
        self._log_metrics_of_rewards(self.scorer.score(batch.episodes, batch.num_turns - 1, self._wait))
        batch.close(self.args.gamma_turn)
        extra = cast(dict[str, deque], self._logs["extra"])
        for column, values in metrics.extra_columns(batch, list(extra)).items():
            if column not in extra:
                extra[column].extend([None] * len(self._logs["prompt"]))
            self._log_completion_extra(column, values)
        return self.accelerator.gather(batch.row_scores())

    # Credit

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        self._inputs = inputs
        branches = self.model.training and self.args.credit == "counterfactual"
        with self._whole_problems() if branches else nullcontext():  # TRL logs the spread within groups
            output = super()._generate_and_score_completions(inputs)
        batch = self._batch
        assert batch is not None
        # TRL may mask more rows, such as truncated ones
        batch.in_loss = batch.in_statistics & (output["completion_mask"] * output["tool_mask"]).any(1)
        output["tool_mask"] = output["tool_mask"] * batch.in_loss[:, None]
        mask = output["completion_mask"] * output["tool_mask"]
        output["num_items_in_batch"] = self._sum_over_processes(mask.sum())
        output["agent"], output["turn"] = batch.agent, batch.turn
        self._assign_credit(output, batch)
        self._log_batch(batch, output["advantages"], mask)
        self._batch = None
        parts = cast(int, self.args.steps_per_generation) if self.model.training else 1
        return rows_to_train(batch, output | batch.inputs, parts)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    def _assign_credit(self, output: dict[str, Any], batch: TeamBatch) -> None:
        """Replaces TRL's advantages by ours, `(B,)` or `(B, T)`."""
        mask = output["completion_mask"] * output["tool_mask"]
        batch.advantages = self._group_advantages(batch)
        output["advantages"] = batch.advantages * self._row_weights(batch, mask)

    def _row_weights(self, batch: TeamBatch, mask: torch.Tensor) -> torch.Tensor:
        unit = "row" if self.loss_type == "grpo" else "token"
        return row_weights(batch, mask, self.args.agent_loss_weighting, unit, self.args.turn_weights)

    def _group_advantages(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the advantage of each row over its siblings, `(B,)`, in reward units. 0 for rows that do not learn."""
        return over_siblings(batch, kind="mean")

    # Loss

    def _loss_window(self, count: torch.Tensor) -> torch.Tensor:
        if not self.model.training:
            return loss_window(count)
        return loss_window(count, self.current_gradient_accumulation_steps, cast(int, self.args.steps_per_generation))

    def _rows_without_advantage_matter(self) -> bool:
        """Whether rows whose advantages are all 0 change the update."""
        return (
            self.beta != 0.0
            or self._entropy_bonus_enabled
            or self.aux_loss_enabled
            or self.top_entropy_quantile < 1.0  # a quantile of all rows
            or self.loss_type == "bnpo"  # a mean over the tokens of all rows
        )

    def _compute_loss(self, model, inputs):
        beta = self.beta
        mask = of_all_rows = inputs["completion_mask"] * inputs["tool_mask"]
        tokens = inputs["prompt_mask"].sum() + mask.sum()
        if self.model.training:
            parts = cast(int, self.args.steps_per_generation)
            self.on_activity(f"learning from part {self._step % parts + 1} of {parts} of the replies")
        if self.model.training and not self._rows_without_advantage_matter():
            inputs = rows_with_signal(inputs)
            mask = inputs["completion_mask"] * inputs["tool_mask"]
        share = share_of_live_rows(self.loss_type, inputs, mask)
        if share is not None:  # the policy and KL terms are linear in advantages and beta
            inputs = inputs | {"advantages": inputs["advantages"] * share}
            beta = beta * share.item()
        if self.model.training:
            # Each pass over a rollout counts for its share of the tokens, those of skipped rows included
            tokens = tokens / self.num_iterations
            self._pool("tokens_per_second", tokens, torch.zeros_like(tokens))
            # Turns TRL's entropy bonus, a mean over the tokens of the micro-batch, into a mean over those of the step
            window = self._loss_window(inputs["num_items_in_batch"])
            self._entropy_share = mask.sum() * self.current_gradient_accumulation_steps / window
        logged = self._window_means.logged(self._metrics[self._mode])
        with lent(self, beta=beta), self._gradient_shares.watching(self._causal_lm, inputs["agent"]):
            loss = super()._compute_loss(model, inputs)
        self._entropy_share = None
        self._window_means.add_micro_batch(
            self._mode,
            self._metrics[self._mode],
            logged,
            mask,
            of_all_rows,
            self.importance_sampling_level == "sequence",
        )
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            HeadOnReplies(model, self.accelerator.unwrap_model(model)), *args, **kwargs
        )
        if entropies is not None and self._entropy_share is not None:
            # Scales only the gradient: TRL logs the values, and adapts the coefficient to them
            values = entropies.detach()
            entropies = values + self._entropy_share * (entropies - values)
        return logps, entropies, aux_loss

    @property
    def _causal_lm(self) -> PreTrainedModel:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # Log

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _metric(self, name: str, value: float) -> None:
        self._metrics[self._mode][name].append(value)

    def _pool(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Adds a sum over `count` values to a mean over the logging window."""
        self._window_means.add(self._mode, name, total, count)

    def _pooled_means(self) -> dict[str, float]:
        """Returns the means over the logging window, by name."""
        return self._window_means.take(self._mode)

    def _log_batch(self, batch: TeamBatch, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Logs a generation batch after its advantages are computed."""
        lengths, ends = metrics.reply_lengths(batch, {*self.eos_token_ids, self._tokenizer.pad_token_id})
        found = metrics.rollout_metrics(
            batch,
            lengths,
            ends,
            outside=self.team.outside,
            with_tools=[agent.name for agent in self.workflow.agents if agent.tools],
            runs_tests=self.scorer.runs_tests,
            masks_errors=self.args.on_reward_error == "mask",
        )
        found |= metrics.advantage_metrics(batch, advantages, mask)
        for name, value in found.items():
            self._metric(name, value)
        self._warn_of_threshold(found.get("episodes/turns"))
        if self.log_completions and self.model.training:
            self._episodes_to_show = metrics.spread(batch.episodes, self.num_episodes_to_print)
        if self._curriculum is not None and self.model.training:
            self._metric("curriculum/stage", self._curriculum.stage_of(self._curriculum.batches) + 1)
            by_rate = self.args.curriculum_pass_rate is not None  # otherwise problems need no tests
            self._curriculum.note(metrics.pass_rate(batch.episodes) if by_rate else None)
        for name, value in metrics.completion_metrics(lengths, ends).items():
            self._metrics[self._mode][name][-1] = value  # TRL's count unused rows
        for column, values in metrics.table_columns(batch, advantages, mask, bool(self.team.outside)).items():
            shown = cast(deque, self._logs[column])
            for _ in range(min(len(values), len(shown))):
                shown.pop()
            shown.extend(values)

    def _warn_of_threshold(self, turns: float | None) -> None:
        """Warns if the threshold ended all episodes of the first batch after one turn, or none."""
        threshold = self.args.early_termination_threshold
        if threshold is None or turns is None or "threshold" in self._warned:
            return
        self._warned.add("threshold")
        if turns in (1, self.workflow.num_turns):
            found = "every episode earned more in its first turn" if turns == 1 else "no episode earned more"
            warnings.warn(f"early_termination_threshold={threshold}: in the first batch {found}", stacklevel=2)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._complete_metrics()
        super().log(logs, start_time)
        if self.accelerator.is_main_process:
            print_episodes(self._episodes_to_show, self.state.global_step)
        self._episodes_to_show = []

    def _complete_metrics(self) -> None:
        """Adds what was pooled over the logging window to the metrics of the log that is about to be written."""
        logged = self._metrics[self._mode]
        if self.model.training:
            seconds = sum(logged.get("step_time", ()))
            if seconds:
                per_process = torch.tensor(seconds / self.accelerator.num_processes, device=self.accelerator.device)
                self._pool("tokens_per_second", torch.zeros_like(per_process), per_process)
            if len(self.agents) > 1:
                for name, share in self._gradient_shares.take().items():
                    self._metric(name, share)
        for name, mean in self._pooled_means().items():
            self._metric(name, mean)
        if self.num_generations_eval == 1:  # TRL's metrics of the spread among siblings
            for name in ("reward_std", "frac_reward_zero_std"):
                self._metrics["eval"].pop(name, None)
