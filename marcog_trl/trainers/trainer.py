"""
The trainer: TRL's `GRPOTrainer` on episodes of a team. It is the only file that knows TRL's.

It reads from top to bottom: play, score, credit, log, loss, save. The path of a problem through TRL, whose methods * marks:

    train*                        checks the checkpoint to resume from, then runs TRL's loop (checkpointing.py)
      get_train_dataloader*       repeats each problem once per row
      training_step*
        _prepare_inputs*          once per generation batch:
          _generate_and_score_completions*
            _rollout              TRL's `rollout_func`: plays the workflow on the problems, one row per reply
              team.play_tree      plays stage by stage (rollout/), and scores every turn but the last as it ends
                generate          generates one stage with TRL's `_generate_single_turn`* (training_team.py)
            _calculate_rewards*   scores the last turn (rewards/scoring.py), and returns the rewards of the rows
            algorithm.credit      replaces TRL's advantages (grpo.py, ppo.py, shppo.py)
            _log_batch            logs metrics of agents, turns and episodes (metrics.py)
        _compute_loss*            once per micro-batch: TRL's loss and the algorithm's. Advantages include the weights of rows
          _get_per_token_logps_and_entropies*
      log*                        adds the means over the logging window

TRL's methods do not pass on what the later ones need, so `self._in_flight` holds it in between.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel
from transformers.training_args import OptimizerNames
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.trainer.utils import RepeatSampler

from marcog_trl.agents import Tools, Workflow, with_tools
from marcog_trl.execution import CodeExecutor
from marcog_trl.processes import equally_many
from marcog_trl.report.callback import ReportCallback
from marcog_trl.report.console import MOST_EPISODES, ConsoleCallback, print_episodes
from marcog_trl.report.diagnosis import Diagnosis
from marcog_trl.report.episodes import EpisodeLog, episode_row, spread
from marcog_trl.rewards.scoring import Scorer, is_over, is_reward_model
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.team.data_checks import check_dataset, check_eval_dataset, completed, usable
from marcog_trl.team.description import TeamDescription
from marcog_trl.team.dropout import disable_dropout, own_dropout
from marcog_trl.team.lending import lent
from marcog_trl.team.modules import ATTRIBUTE, ForwardContext, TeamModule
from marcog_trl.team.positions import depends_on_width
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.vllm import AgentGeneration, LanguageModelGeneration
from marcog_trl.trainers import metrics
from marcog_trl.trainers.adapter_targets import adapter_name
from marcog_trl.trainers.algorithm import Algorithm, loss_mask
from marcog_trl.trainers.argument_checks import (
    TOOLS_WITHOUT_VLLM,
    as_in_trl,
    check_arguments,
    check_curriculum,
    check_is_saved,
    check_optimizer,
    check_prompts,
    check_shared_prompts,
    check_workflow,
    checkpoint_without_reentry,
    held_by,
    warn_of_slow_type,
)
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.config import MultiAgentConfig, NamedArguments
from marcog_trl.trainers.credit import loss_window, row_weights, rows_to_train, rows_with_signal, share_of_counted_rows
from marcog_trl.trainers.data import (
    OrderOfEpoch,
    check_rows,
    fit_batches,
    make_curriculum,
    spreads_siblings,
    tree_of_process,
    warn_of_schedule,
)
from marcog_trl.trainers.head import HeadOnReplies
from marcog_trl.trainers.optim import POLICY, ShardClipping, parameters_by_group, split_groups
from marcog_trl.trainers.plan import MemoryPlan, plan_run
from marcog_trl.trainers.reward_functions import reward_functions
from marcog_trl.trainers.sharing import Sharing
from marcog_trl.trainers.training_team import TrainingTeam
from marcog_trl.workflows.from_file import names_file


@dataclass
class InFlight:
    """
    Values that one of TRL's methods leaves for a later one.

    Args:
        problems (`list[dict]` of length B): While a generation batch is made, the dataset row of each of its rows: TRL's rollout
            function gets only prompts.
        batch ([`TeamBatch`], *optional*): The generation batch, once it is played.
        wait (`Callable`, *optional*): Waits for the verdicts on the solutions of the last turn.
        inputs (`Mapping`): What the algorithm gave for the rows of the next forward passes.
        part (`int`, *optional*): Number of the micro-batch in its generation batch, in updates.
        entropy_share (`torch.Tensor`, *optional*): Factor of the gradient of TRL's entropy bonus.
        passes (`list[ForwardContext]`): The last forward passes of the policy.
    """

    problems: list[dict[str, Any]] = field(default_factory=list)
    batch: TeamBatch | None = None
    wait: Callable[[], None] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    part: int | None = None
    entropy_share: torch.Tensor | None = None
    passes: list[ForwardContext] = field(default_factory=list)


class MultiAgentTrainer(NamedArguments, Sharing, GRPOTrainer):
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
        algorithm (`type[Algorithm]`, *optional*):
            What credits replies, and has losses beside TRL's. Defaults to the trainer's own.

    Raises:
        ValueError: If a batch cannot hold whole problems, or the workflow, the dataset and the rewards do not fit together.
            Raised before any work starts.
    """

    _tag_names = ["trl", "marcog-trl", "multi-agent"]
    _name = "Multi-agent RL"
    _config_class: type[MultiAgentConfig] = MultiAgentConfig
    algorithm_class: type[Algorithm] = Algorithm
    args: MultiAgentConfig
    model: Any  # a PeftModel, or a causal LM
    num_generations: int
    num_generations_eval: int
    environments: Any = None
    environment_factories: Any
    vllm_generation: Any
    _in_flight: InFlight | None = None  # see the top of this file
    _has_own_inputs = False  # whether the algorithm added tensors to the batch
    _eval_prefix = "eval"  # of the metrics of the evaluation that runs
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
        algorithm: type[Algorithm] | None = None,
    ):
        model = str(model) if isinstance(model, Path) else model
        args = check_arguments(type(self), model, args, peft_config, quantization_config, rollout_func=rollout_func)
        self.args = args  # TRL sets it too, but the checks below need it
        if isinstance(workflow, str) and args.workflow not in ("single", workflow):
            raise ValueError(
                f"workflow={workflow!r} contradicts workflow={args.workflow!r} of the configuration. Leave one of them out."
            )
        self.workflow = with_tools(args.make_workflow(workflow), tools)
        self.agents = [agent.name for agent in self.workflow.agents]
        named = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        # Rewards in files, by their place: they are saved with the team
        self._rewards_in_files = {
            i: name for i, name in enumerate(named) if isinstance(name, str) and names_file(name)
        }
        reward_funcs = reward_functions(reward_funcs, optional=environment_factory is not None)
        self.trained_agents = check_workflow(self.workflow, args)
        given, self.workflow = self.workflow, as_in_trl(self.workflow, args, train_dataset)
        if environment_factory is None:
            train_dataset = completed("train_dataset", train_dataset, self.workflow, reward_funcs)
            eval_dataset = completed("eval_dataset", eval_dataset, self.workflow, reward_funcs)
            check_dataset("train_dataset", train_dataset, self.workflow, reward_funcs, args.packages)
            check_eval_dataset(eval_dataset, self.workflow, reward_funcs, args.packages)
            train_dataset = usable("train_dataset", train_dataset, self.workflow, reward_funcs, args.packages)
        else:
            datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
            check_environments(self.workflow, args, datasets, reward_funcs)
        self.algorithm = (algorithm or self.algorithm_class)(args, self.workflow)
        self.algorithm.check(train_dataset)
        tree = self.algorithm.tree(training=True)
        fit_batches(args, tree, self.algorithm.tree(training=False), train_dataset)
        self._curriculum = make_curriculum(
            args, train_dataset, cast(int, args.generation_batch_size) // len(tree.slots)
        )
        self.scorer = Scorer(
            reward_funcs,
            self.workflow,
            lambda: self.executor,
            args,
            weights=lambda: self.reward_weights,
            score_models=self._score_models,
            given=self._given_to_rewards,
            timed=lambda name: profiling_context(self, name),
        )
        # Created before the model is loaded, because it may not support this machine
        executor = args.make_executor() if self.workflow.needs_tests or self.scorer.runs_tests else None
        check_curriculum(args, executor is not None)
        self.diagnosis = Diagnosis()
        peft_config = self.algorithm.adapter_config(model, peft_config)
        if args.ddp_find_unused_parameters is None:
            # The Trainer's default for adapters is True, which fails if the forward pass computes values that it does not
            # return
            args.ddp_find_unused_parameters = False

        # If agents have adapters of their own, TRL's engine does not serve them
        with lent(args, use_vllm=args.use_vllm and not self.algorithm.serves_agents):
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
        head = self._causal_lm.get_output_embeddings()
        if isinstance(head, TrainableTokensWrapper):  # tied to the embedding; TRL's fused head reads its bias, too
            vars(head)["bias"] = getattr(head.original_module, "bias", None)
        if args.disable_dropout:
            for used in filter(None, (self.model, self.ref_model)):
                disable_dropout(self.accelerator.unwrap_model(used))
        if environment_factory is not None:
            # The agent's tools are the methods of the environments. Each row calls those of its own environment
            known = {tool.__name__ for agent in self.workflow.agents for tool in agent.tools}
            methods = {tool.__name__: tool for tool in self.tools if tool.__name__ not in known}
            self.workflow = with_tools(self.workflow, list(methods.values()))
        for callback in (self._curriculum, self.diagnosis):
            if callback is not None:
                self.add_callback(callback)
        if self._is_vlm:
            raise ValueError("processing_class is a multimodal processor. Pass a text tokenizer.")
        check_optimizer(self.optimizer, self.model)
        warn_of_slow_type(self._causal_lm, args)
        if args.share_prompts:
            check_shared_prompts(self._causal_lm, self.aux_loss_enabled)
        if environment_factory is None:
            parts = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
            datasets = {"train_dataset": train_dataset, **parts}
            check_prompts(datasets, self.workflow, args, self._tokenizer, self.workflow is not given)
        self.scorer.check_tokenizer(self._tokenizer)
        self.scorer.funcs = self.reward_funcs  # TRL has loaded reward models, and added the rewards of environments
        if self.scale_rewards == "agent":
            self.scale_rewards = "none"  # TRL does not know this value, and its advantages are replaced
        # TRL warns that rollout functions are experimental if they are passed to its constructor
        self.rollout_func = self._rollout
        checkpoint_without_reentry(args)
        self.team = TrainingTeam(
            self,
            workflow=self.workflow,
            settings=TeamSettings.of(args),
            description=self._describe_team(),
            modules=self._attach_modules(),
            executor=executor,
        )
        if not isinstance(model, str) and (not args.full_finetuning or args.beta != 0):
            check_is_saved(self._causal_lm, self.team.description, args)
        if self.algorithm.serves_agents:
            self._serve_agents()
        self.episode_log: EpisodeLog | None = None
        if args.max_logged_episodes:
            process, count = self.accelerator.process_index, self.accelerator.num_processes
            folder = Path(args.output_dir or "")
            self.episode_log = EpisodeLog(folder, args.log_episodes_steps, args.max_logged_episodes, process, count)
            self.add_callback(self.episode_log)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ConsoleCallback):
                callback.attach(self)
        self.report: ReportCallback | None = None
        if args.write_report:
            self.report = ReportCallback(self._name, self.team.description.to_dict(), self.diagnosis.found)
            self.add_callback(self.report)
        self._shards: ShardClipping | None = None
        self._window_means = metrics.WindowMeans()
        self._eval_episodes: list[int] = []  # of each batch of an evaluation
        self.algorithm.log = self._pool
        self._gradient_shares = metrics.GradientShares(self.agents, self.accelerator.device)
        # With log_completions, episodes are printed in place of TRL's table, which has a row per reply
        shown = MOST_EPISODES if args.num_completions_to_print is None else args.num_completions_to_print
        self.num_episodes_to_print, self.num_completions_to_print = min(shown, MOST_EPISODES), 0
        self._episodes_to_show: list[dict[str, Any]] = []
        self._warned_of_threshold = False

    # The team

    def _describe_team(self) -> TeamDescription:
        """Returns the content of `team.json`."""
        modules = self.algorithm.describe()
        note = modules.pop("note", None)
        rewards = [self._rewards_in_files.get(i, name) for i, name in enumerate(self.reward_func_names)]
        return TeamDescription.of(type(self).__name__, self.model, self.workflow, rewards, self.args, modules, note)

    def _attach_modules(self) -> TeamModule | None:
        """Makes the team's modules and attaches them to the model."""
        with torch.random.fork_rng():  # the random state of the policy does not depend on them
            torch.manual_seed(self.args.seed)
            modules = self.algorithm.modules = self.algorithm.make_modules(self.model)
        if modules is None:
            return None
        optim = OptimizerNames(self.args.optim).value
        if self.algorithm.parameter_groups() and (optim.endswith("layerwise") or "lomo" in optim):
            raise ValueError(
                f"optim={optim!r} updates weights in the backward pass, at one learning rate, but {self._name} trains networks with "
                "rates of their own. Set another optim, such as 'galore_adamw' or 'adamw_torch'."
            )
        if self.is_fsdp_enabled:
            raise ValueError("FSDP is not supported: it cannot shard the team's modules. Use DeepSpeed ZeRO or DDP.")
        adapter = next(p for p in self.model.parameters() if p.requires_grad)
        # ZeRO-3 needs one dtype, and keeps float32 copies itself. Otherwise, small updates would be lost in bfloat16, which TRL
        # uses for the adapter of a quantized model
        dtype = adapter.dtype if self.is_deepspeed_enabled else torch.promote_types(adapter.dtype, torch.float32)
        modules.to(device=self.accelerator.device, dtype=dtype)
        modules.attach(self._causal_lm)
        if self.ref_model is not None and self.args.sync_ref_model:  # TRL's callback pairs the parameters of both
            reference = self.accelerator.unwrap_model(self.ref_model)
            reference.add_module(ATTRIBUTE, copy.deepcopy(modules).requires_grad_(False))
        held = held_by(self.optimizer)
        missing = [name for name, p in modules.named_parameters() if held is not None and id(p) not in held]
        if missing:
            networks = sorted({name.partition(".")[0] for name in missing})
            raise ValueError(
                f"The optimizer lacks the team's {', '.join(networks)}, which the trainer creates. Leave optimizers out and set "
                "optim, learning_rate and critic_learning_rate. Or, before train(), set trainer.optimizer to one that has the "
                "trainable parameters of trainer.model."
            )
        if self.use_vllm:
            self.vllm_generation = LanguageModelGeneration(self.vllm_generation)
        return modules

    @property
    def _causal_lm(self) -> PreTrainedModel:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def trained(self) -> str:
        """Describes what is trained, in one line."""
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model):
            kinds = len({name.rpartition(".")[2] for name in model.base_model.targeted_module_names})
            what = f"{adapter_name(model.peft_config['default'])} on {kinds} kind{'s' * (kinds > 1)} of layers"
            trained, total = model.get_nb_trainable_parameters()
        else:
            what, total = "all weights", model.num_parameters()
            trained = model.num_parameters(only_trainable=True)
        return f"{what}: {trained / 1e6:,.3g} of {total / 1e6:,.3g} million parameters, learning rate {self.args.learning_rate:g}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.team!r}, {self.trained})"

    @property
    def modules(self) -> TeamModule:
        """The team's modules."""
        assert self.team.modules is not None
        return self.team.modules

    @property
    def executor(self) -> CodeExecutor:
        """Runs the agents' code in worker processes, which start when they are first needed."""
        return self.team.executor

    def use_agent(self, agent: str, inputs: Mapping[str, torch.Tensor] | None = None) -> AbstractContextManager[None]:
        """Makes `trainer.model` act as an agent outside of rollouts, for example in a callback. See [`Team.use_agent`]."""
        return self.team.use_agent(agent, inputs)

    def plan(self, gpu_memory: float | None = None) -> MemoryPlan:
        """
        Computes what the run needs: parameters, memory by part, rows, tokens and calls of the evaluator.

        Args:
            gpu_memory (`float`, *optional*): Memory of each GPU, in GiB, to say whether the run fits and what to change. By
                default, plans for this machine.

        Returns:
            [`~marcog_trl.trainers.plan.MemoryPlan`].
        """
        adapter = None if self.args.full_finetuning else self.model.peft_config["default"]
        on_gpu = gpu_memory is not None or self.accelerator.device.type != "cpu"
        problems = cast(Iterable, self.train_dataset)
        return plan_run(self.algorithm, self._causal_lm, adapter, problems, self._tokenizer, gpu_memory, on_gpu)

    # Play

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's rollout function: plays the episodes of this process, and arranges their replies as rows."""
        flight = self._flight
        flight.batch = batch = self._play(flight.problems)
        flight.wait = self.scorer.execute(batch.episodes, [batch.num_turns - 1]) if self.scorer.runs_tests else None
        flight.inputs = batch.inputs = self.algorithm.inputs(batch)
        # An unused slot has one end-of-sequence token, which the loss ignores
        unused, rows = [self._tokenizer.eos_token_id], batch.rows
        has_logprobs = any(row is not None and row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [unused if row is None else row.prompt_ids for row in rows],
            "completion_ids": [unused if row is None else row.completion_ids for row in rows],
            "logprobs": [[0.0] if row is None else row.logprobs for row in rows] if has_logprobs else None,
            "env_mask": [[0] if row is None else row.mask for row in rows],
        }

    def _play(self, problems: list[dict[str, Any]]) -> TeamBatch:
        """Plays the episodes of these problems, one for each row of this process."""
        training, process, args = self.model.training, self.accelerator.process_index, self.args
        whole = self.algorithm.tree(training)
        if self.environments is None:
            check_rows(problems, len(whole.slots), process)
        tree, threshold = tree_of_process(whole), args.early_termination_threshold
        ends = None if threshold is None else lambda episode: is_over(episode, threshold)
        options = self.algorithm.begin_rollout(self.state.global_step, training, process)
        if self.environments is not None:
            options["tools_of"] = self._environment_tools
        turns = self.team.play_tree(problems[:: len(tree.slots)], tree, self._end_turn, ends, **options)
        return TeamBatch(
            tree,
            turns,
            self.agents,
            self.workflow.slots,
            self.trained_agents,
            self.accelerator.device,
            training,
            whole.siblings[0] if spreads_siblings(whole) else None,
        )

    @property
    def _flight(self) -> InFlight:
        assert self._in_flight is not None
        return self._in_flight

    # Score

    def _given_to_rewards(self) -> dict[str, Any]:
        """The arguments that TRL passes to reward functions beside columns."""
        environments = {} if self.environments is None else {"environments": self.environments}
        return {"trainer_state": self.state, **environments}

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

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Returns the immediate reward of every row, which TRL logs."""
        batch = self._flight.batch
        assert batch is not None
        self.on_activity(f"judging {len(batch.episodes)} episodes")
        self._log_metrics_of_rewards(self.scorer.score(batch.episodes, batch.num_turns - 1, self._flight.wait))
        batch.close(self.args.gamma_turn)
        extra = cast(dict[str, deque], self._logs["extra"])
        for column, values in metrics.extra_columns(batch, list(extra)).items():
            if column not in extra:
                extra[column].extend([None] * len(self._logs["prompt"]))
            self._log_completion_extra(column, values)
        return self.accelerator.gather(batch.row_scores())

    def _log_metrics_of_rewards(self, logged: Iterable[tuple[str, float]]) -> None:
        for name, value in logged:
            self._log_metric(name, value)

    # Credit

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        self._in_flight = flight = InFlight(problems=inputs)
        self.algorithm.memory = cast(dict, self.state.stateful_callbacks)
        branches = self.model.training and self.args.credit == "counterfactual"
        with self._whole_problems() if branches else nullcontext():  # TRL logs the spread within groups
            output = super()._generate_and_score_completions(inputs)
        batch = flight.batch
        assert batch is not None
        # TRL may mask more rows, such as truncated ones
        batch.in_loss = batch.in_statistics & loss_mask(output).any(1)
        output["tool_mask"] = output["tool_mask"] * batch.in_loss[:, None]
        batch.mask, batch.ref_logps = loss_mask(output), output.get("ref_per_token_logps")
        output["num_items_in_batch"] = self.accelerator.reduce(batch.mask.sum(), reduction="sum")
        output["agent"], output["turn"] = batch.agent, batch.turn
        self._assign_credit(batch, output)
        self._log_batch(batch, output["advantages"])
        self._in_flight = None
        parts = cast(int, self.args.steps_per_generation) if self.model.training else 1
        return rows_to_train(batch, output, parts)

    @torch.no_grad()
    def _assign_credit(self, batch: TeamBatch, output: dict[str, Any]) -> None:
        """Replaces TRL's advantages, and adds what the losses need."""
        args = self.args

        def run_policy() -> None:
            self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=args.per_device_train_batch_size if batch.training else args.per_device_eval_batch_size,
            )
            output["old_per_token_logps"] = batch.logps

        batch.run_policy = run_policy
        credit = self.algorithm.credit(batch)
        batch.advantages = batch.mean_over_tokens(credit.advantages if credit.of_rows is None else credit.of_rows)
        weights = row_weights(
            batch,
            batch.mask,
            args.agent_loss_weighting,
            unit="row" if self.loss_type == "grpo" else "token",
            turn_weights=args.turn_weights,
        )
        output["advantages"] = credit.advantages * (weights[:, None] if credit.advantages.dim() == 2 else weights)
        output["row_weight"] = weights
        output |= batch.inputs | credit.inputs
        self._has_own_inputs = bool(batch.inputs or credit.inputs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        flight = self._in_flight
        head = HeadOnReplies(model, self.accelerator.unwrap_model(model), self.args.share_prompts)
        batch = None if flight is None or torch.is_grad_enabled() else flight.batch
        size, device = len(input_ids), input_ids.device
        rows = torch.arange(size, device=device) if batch is None else equally_many(batch.is_used)

        def of_all_rows(values: torch.Tensor) -> torch.Tensor:
            return values if len(rows) == size else values.new_zeros(size, values.size(1)).index_copy(0, rows, values)

        if flight is None or model is self.ref_model or not _policy_acts(self.model):
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                head, input_ids[rows], attention_mask[rows], logits_to_keep, batch_size=batch_size, **kwargs
            )
            return of_all_rows(logps), entropies, aux_loss
        found, flight.passes = [], []
        # One call per chunk, because the team's modules must know the rows of a forward pass
        for chunk in rows.split(batch_size or size):
            if not torch.is_grad_enabled():
                done = len(flight.passes) * len(rows[:batch_size])
                self.on_activity(f"log-probabilities of replies {done + 1} to {done + len(chunk)} of {len(rows)}")
            given = {
                name: x[chunk] if isinstance(x, torch.Tensor) and x.dim() else x for name, x in flight.inputs.items()
            }
            forward = self.algorithm.context(given, logits_to_keep, flight.part)
            again = chunk[: 0 if forward.other_z is None else len(forward.other_z)]  # rows that run once more
            run = torch.cat([chunk, again])
            with nullcontext() if self.team.modules is None else self.modules.rows(forward):
                logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                    head, input_ids[run], attention_mask[run], logits_to_keep, **kwargs
                )
            forward.logps, forward.other_logps = logps[: len(chunk)], logps[len(chunk) :]
            flight.passes.append(forward)
            found.append((forward.logps, None if entropies is None else entropies[: len(chunk)], aux_loss))
        logps, entropies, aux_losses = zip(*found, strict=True)
        result = (
            of_all_rows(torch.cat(logps)),
            None if entropies[0] is None else self._shared_entropies(of_all_rows(torch.cat(entropies))),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )
        if batch is not None:
            values = [forward.values for forward in flight.passes]
            batch.logps = result[0]
            batch.values = None if None in values else of_all_rows(torch.cat(values))
        return result

    def _shared_entropies(self, entropies: torch.Tensor) -> torch.Tensor:
        """Scales the gradient of entropies: TRL logs the values, and adapts the coefficient to them."""
        share = self._flight.entropy_share
        return entropies if share is None else entropies.detach() + share * (entropies - entropies.detach())

    # Loss

    def _skips_rows(self) -> bool:
        """Whether rows whose advantages are all 0 do not change the update."""
        return self.algorithm.skips_rows and not (
            self.beta != 0.0
            or self._entropy_bonus_enabled
            or self.aux_loss_enabled
            or self.top_entropy_quantile < 1.0  # a quantile of all rows
            or self.loss_type == "bnpo"  # a mean over the tokens of all rows
        )

    def _loss_window(self, count: torch.Tensor) -> torch.Tensor:
        """Returns the normalizer of sums over a micro-batch, for a mean over `count` items of the generation batch."""
        if not self.model.training:
            return loss_window(count)
        return loss_window(count, self.current_gradient_accumulation_steps, cast(int, self.args.steps_per_generation))

    def _compute_loss(self, model, inputs):
        parts, beta = cast(int, self.args.steps_per_generation), self.beta
        mask = of_all_rows = loss_mask(inputs)
        tokens = inputs["prompt_mask"].sum() + mask.sum()
        if self.model.training:
            self.on_activity(f"learning from part {self._step % parts + 1} of {parts} of the replies")
        if self.model.training and self._skips_rows():
            width_matters = self._has_own_inputs or depends_on_width(self._causal_lm.get_decoder())
            inputs = rows_with_signal(inputs, cuts_columns=not width_matters)
            mask = loss_mask(inputs)
        if self.algorithm.penalizes_rewards:
            beta = 0.0
        share = share_of_counted_rows(self.loss_type, inputs, mask)
        if share is not None:  # the policy and KL terms are linear in advantages and beta
            inputs = inputs | {"advantages": inputs["advantages"] * share}
            beta = beta * share.item()
        flight = InFlight(inputs=inputs, part=self._step % parts if torch.is_grad_enabled() else None)
        if self.model.training:
            # Each pass over a rollout counts for its share of the tokens, those of skipped rows included
            tokens = tokens / self.num_iterations
            self._pool("tokens_per_second", tokens, torch.zeros_like(tokens))
            # Turns TRL's entropy bonus, a mean over the tokens of the micro-batch, into a mean over those of the step
            window = self._loss_window(inputs["num_items_in_batch"])
            flight.entropy_share = mask.sum() * self.current_gradient_accumulation_steps / window
        self._in_flight = flight
        with lent(self, beta=beta), self._gradient_shares.watching(self._causal_lm, inputs["agent"]):
            loss = super()._compute_loss(model, inputs)
        self._in_flight = None
        by_sequence = self.importance_sampling_level == "sequence"
        self._window_means.add_micro_batch(self._mode, self._metrics[self._mode], mask, of_all_rows, by_sequence)
        own = self.algorithm.loss(flight.passes[-1], inputs, lambda total, count: total / self._loss_window(count))
        return loss if own is None else loss + own

    # Log

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _metric(self, name: str, value: float) -> None:
        self._metrics[self._mode][name].append(value)

    def _pool(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Adds a sum over `count` values to a mean over the logging window."""
        self._window_means.add(self._mode, name, total, count)

    def _log_batch(self, batch: TeamBatch, advantages: torch.Tensor) -> None:
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
            may_fail=self.workflow.may_fail,
        )
        found |= metrics.advantage_metrics(batch, advantages)
        unused = torch.tensor(sum(row is None for row in batch.rows), device=batch.device)
        if self.model.training:
            # TRL has counted the token that an unused slot has
            self.state.num_input_tokens_seen -= int(self.accelerator.reduce(unused, reduction="sum"))
            self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        else:
            self._eval_episodes.append(len(batch.episodes))
        for name, value in found.items():
            self._metric(name, value)
        self._warn_of_threshold(found.get("episodes/turns"))
        if self.log_completions and self.model.training:
            chosen = spread(len(batch.episodes), self.num_episodes_to_print)
            self._episodes_to_show = self._rows_of(batch, advantages, chosen)
        if self.episode_log is not None:
            chosen = self.episode_log.chosen(batch.episodes, self.state.global_step + batch.training, self._mode)
            self.episode_log.add(self._rows_of(batch, advantages, chosen))
        if self._curriculum is not None and self.model.training:
            self._metric("curriculum/stage", self._curriculum.stage_of(self._curriculum.batches) + 1)
            by_rate = self._curriculum.pass_rate is not None  # otherwise problems need no tests
            self._curriculum.note(metrics.pass_rate(batch.episodes) if by_rate else None)
        for name, value in metrics.completion_metrics(lengths, ends).items():
            self._metrics[self._mode][name][-1] = value  # TRL's count unused rows
        for column, values in metrics.table_columns(batch, advantages, bool(self.team.outside)).items():
            shown = cast(deque, self._logs[column])
            for _ in range(min(len(values), len(shown))):
                shown.pop()
            shown.extend(values)

    def _rows_of(self, batch: TeamBatch, advantages: torch.Tensor, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Describes these episodes of a batch."""
        if not chosen:
            return []
        learned, ends = metrics.learned(batch, advantages), {*self.eos_token_ids}
        where = {"split": self._mode, "process": self.accelerator.process_index}
        where["step"] = self.state.global_step + batch.training
        siblings = batch.tree.joint_actions[-1]
        return [
            episode_row(batch.episodes[e], self.reward_func_names, ends, learned, generation=e % siblings, **where)
            for e in chosen
        ]

    def _warn_of_threshold(self, turns: float | None) -> None:
        """Warns if the threshold ended all episodes of the first batch after one turn, or none."""
        threshold = self.args.early_termination_threshold
        if threshold is None or turns is None or self._warned_of_threshold:
            return
        self._warned_of_threshold = True
        if turns in (1, self.workflow.num_turns):
            found = "every episode earned more in its first turn" if turns == 1 else "no episode earned more"
            warnings.warn(f"early_termination_threshold={threshold}: in the first batch {found}", stacklevel=2)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._complete_metrics()
        super().log(logs, start_time)
        if self.accelerator.is_main_process:
            print_episodes(self._episodes_to_show)
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
        else:  # the last batch may be smaller; TRL's means are over batches
            sizes, self._eval_episodes = self._eval_episodes, []
            for name, values in logged.items():
                if len(values) == len(sizes) and not name.startswith("ledger/"):  # the ledger counts by batch
                    logged[name] = [metrics.weighted_mean(values, sizes)]
        for name, mean in self._window_means.take(self._mode).items():
            self._metric(name, mean)
        if self.num_generations_eval == 1:  # TRL's metrics of the spread among siblings
            for name in ("reward_std", "frac_reward_zero_std"):
                self._metrics["eval"].pop(name, None)
        _, _, dataset = self._eval_prefix.partition("eval_")
        if dataset and not self.model.training:  # TRL would give all datasets the same names
            named = {f"{dataset}_{name}": value for name, value in self._metrics["eval"].items()}
            self._metrics["eval"].clear()
            self._metrics["eval"].update(named)

    # Optimize

    def _parameters_by_group(self) -> dict[str, list[nn.Parameter]]:
        return parameters_by_group(
            self.model, {name: module for name, (module, _) in self.algorithm.parameter_groups().items()}
        )

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if created and self.team.modules is not None:
            rates = {name: rate for name, (_, rate) in self.algorithm.parameter_groups().items() if rate is not None}
            split_groups(optimizer, self._parameters_by_group(), rates)
            if self.is_deepspeed_enabled and self.args.max_grad_norm:
                plugin = self.accelerator.deepspeed_plugin
                if plugin.zero_stage > 0 and not plugin.hf_ds_config.is_offload():
                    plugin.deepspeed_config["gradient_clipping"] = 0.0
                    self._shards = ShardClipping(optimizer, self.args.max_grad_norm)
        return optimizer

    def _clip_grad_norm(self, model):
        """Clips each group by its own norm. With one joint norm, a large value loss would shrink the policy's gradient."""
        if self.team.modules is None or (self.is_deepspeed_enabled and self._shards is None):
            return super()._clip_grad_norm(model)  # the joint norm, with DeepSpeed its own
        if self._shards is not None:
            norms = self._shards.norms()
        else:
            groups = self._parameters_by_group()
            # The policy first: with fp16, accelerate unscales the gradients of all groups in the first call
            norms = {POLICY: super()._clip_grad_norm(nn.ParameterList(groups.pop(POLICY)))}
            for name, params in groups.items():
                norms[name] = nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
        for name, norm in norms.items():
            if name != POLICY:
                self._metric(f"grad_norm/{name}", float(norm))
        return norms.get(POLICY)

    # Save and resume. A run resumes only where a rollout is used up

    def train(self, *args, **kwargs):
        if self.is_world_process_zero():
            print(f"Training {self.trained}", flush=True)
            warn_of_schedule(self.args, self.algorithm.tree(training=True))
        return super().train(*args, **kwargs)

    def _rollout_begun(self) -> bool:
        return self._step % (cast(int, self.args.steps_per_generation) * self.num_iterations) != 0

    def _issue_warnings_after_load(self, load_result) -> None:
        """Refuses a checkpoint that lacks weights, of which the Trainer only warns."""
        model = self.accelerator.unwrap_model(self.model)
        elsewhere = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
        missing = [name for name in load_result.missing_keys if name not in elsewhere]
        if missing:
            raise ValueError(
                f"The checkpoint lacks {len(missing)} weights of the model, such as {missing[0]}. Use a checkpoint of the same "
                "model."
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # vLLM's weights are out of date, although no step was made

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with own_dropout(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir, state_dict=state_dict)
        if is_peft_model(self.model):
            folder, own = self._folder(output_dir) / "agents", self.team.own_agents
            paths = [folder / agent if agent in own else None for agent in self.agents]
            self.algorithm.save_agents(self.model, paths, self.args.should_save)

    # Serve agents that have adapters of their own

    def _serve_agents(self) -> None:
        """Starts vLLM with one adapter per agent, in place of TRL's backend."""
        if self.team.tools is not None:
            raise ValueError(TOOLS_WITHOUT_VLLM)
        args, config = self.args, self.model.peft_config["default"]
        blocks = len(self.agents) if self.team.settings.parameter_sharing == "separate" else 1
        self.vllm_generation = AgentGeneration(
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            num_agents=len(self.agents),
            rank=config.r // blocks,
            revision=cast(dict, args.model_init_kwargs or {}).get("revision"),
            refresh=self._refresh_agents,
            mode=args.vllm_mode,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * cast(int, args.steps_per_generation),
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_completion_length=self.max_completion_length,
            logprobs=0,
            generation_kwargs={"stop_token_ids": self.team.eos_token_ids, **cast(dict, args.generation_kwargs or {})},
        )
        self.use_vllm, self._last_loaded_step = True, -1

    def _before_generation(self, rows: list[Row]) -> None:
        """Called before a stage is generated."""
        if self.algorithm.serves_agents:
            self.vllm_generation.row_agents = [self.agents.index(row.slot.agent) for row in rows] or [0]
            self.vllm_generation.stale |= self.algorithm.serve(rows, self.model.training)

    @torch.no_grad()
    def _refresh_agents(self) -> None:
        """Loads the current adapters of the agents into vLLM."""
        with profiling_context(self, "refresh_agents"):
            adapters = self.algorithm.served_adapters(self.model, lambda: self.team.role_observations)
            self.vllm_generation.load(adapters)

    # Data: each problem once per row. TRL's samplers repeat it once per generation

    def _whole_problems(self) -> AbstractContextManager[None]:
        """Makes TRL repeat each problem once per row, in its samplers and its `IterableDataset`s."""
        train, evaluation = (len(self.algorithm.tree(training).slots) for training in (True, False))
        return lent(self, num_generations=train, num_generations_eval=evaluation)

    def get_train_dataloader(self):
        with self._whole_problems():
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        sampler = cast(RepeatSampler, super()._get_train_sampler(dataset))
        return OrderOfEpoch(sampler, self.args.seed, self._epoch, self._curriculum)

    def _epoch(self) -> int:
        return int(self.state.epoch or 0)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None):
        named = eval_dataset is None or isinstance(eval_dataset, str)
        played = self.eval_dataset if eval_dataset is None else eval_dataset
        played = cast(dict, self.eval_dataset)[played] if isinstance(played, str) else played
        if not named or isinstance(played, IterableDataset):
            eval_dataset = self._given("eval_dataset", cast(Dataset | IterableDataset, played))
        with self._whole_problems():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset):
        test_dataset = self._given("test_dataset", test_dataset)
        if isinstance(test_dataset, IterableDataset):  # TRL repeats its problems in evaluation only
            return self.get_eval_dataloader(test_dataset)
        with self._whole_problems():
            return super().get_test_dataloader(test_dataset)

    def _given(self, name: str, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """Checks a dataset, and leaves problems out of streams that cannot be used."""
        if self.environment_factories is not None:
            return dataset
        dataset = completed(name, dataset, self.workflow, self.scorer.funcs)
        check_dataset(name, dataset, self.workflow, self.scorer.funcs, self.args.packages)
        return usable(name, dataset, self.workflow, self.scorer.funcs, self.args.packages)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval"):
        device = self.accelerator.device
        devices = [] if device.type == "cpu" else [device]
        with (
            torch.random.fork_rng(devices, device_type=device.type),  # training goes on as without the evaluation
            lent(self, _eval_prefix=metric_key_prefix),
        ):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test"):
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        # Clear the metrics, or the next evaluation would log them
        self._complete_metrics()
        known = {name: [v for v in values if not math.isnan(v)] for name, values in self._metrics["eval"].items()}
        self._metrics["eval"].clear()
        named = {f"{metric_key_prefix}_{name}": sum(values) / len(values) for name, values in known.items() if values}
        return output._replace(metrics={**(output.metrics or {}), **named})

    # Tools and environments

    def _generate(self, prompts: list):
        if self.environments is not None:  # TRL has reset them, and added their observations to the prompts
            rows = zip(self._flight.problems, prompts, strict=True)
            self._flight.problems = [{**row, "prompt": prompt} for row, prompt in rows]
        return super()._generate(prompts)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *rest):
        """Returns what the calls of the rollout gave. TRL would call the tools once more."""
        assert self._flight.batch is not None
        rows = self._flight.batch.rows
        written: list[Any] = [[{"role": "assistant", "content": ""}] for _ in rows]
        _, _, ids, logprobs, *_, images = super()._tool_call_loop(prompts, prompt_ids, completion_ids, written, *rest)
        calls = [(0, 0) if row is None else row.tool_calls for row in rows]
        return (
            [[0] if row is None else row.mask for row in rows],
            [
                c if row is None or row.messages is None else row.messages
                for c, row in zip(completions, rows, strict=True)
            ],
            ids,
            logprobs,
            sum(made for made, _ in calls),
            sum(failed for _, failed in calls),
            images,
        )

    def _environment_tools(self, row: Row) -> Tools:
        """Returns the tools of a row of a rollout: those of TRL for all rows, and the methods of the row's environment."""
        i = row.episode
        own = {**self._sync_tool_dicts[i], **self._async_tool_dicts[i]}
        return [own[tool.__name__] for tool in self._env_tools[self._batch_environments[i]]]


def _policy_acts(model: nn.Module) -> bool:
    """Whether forward passes use the trained adapter, not the reference."""
    layer = next((m for m in model.modules() if isinstance(m, BaseTunerLayer)), None)
    return layer is None or (not layer.disable_adapters and "default" in layer.active_adapters)


def check_environments(workflow: Workflow, args: Any, datasets: dict[str, Any], reward_funcs: list) -> None:
    """
    Checks that episodes can use TRL's environments, and the datasets, which need no prompts.

    Raises:
        ValueError: If a row is not an episode, or a dataset is invalid.
    """
    if len(workflow.slots) > 1:
        raise ValueError(
            f"environment_factory needs episodes of one reply, but {type(workflow).__name__} has {len(workflow.slots)} slots. "
            "Use workflow='single' and num_turns=1, or give the agents tools."
        )
    if args.use_vllm:
        raise ValueError(TOOLS_WITHOUT_VLLM)
    for name, dataset in datasets.items():
        if isinstance(dataset, Dataset):
            if "prompt" not in dataset.column_names:
                dataset = dataset.add_column("prompt", [[{"role": "user", "content": name}]] * len(dataset))
            check_dataset(name, dataset, workflow, reward_funcs)
