"""
The decisions of an algorithm: what replies are compared with and credited with, and losses beside TRL's.

It knows nothing of TRL and of processes that train. A trainer asks it, in this order:

    check, adapter_config, make_modules     once, before training
    begin_rollout                           once per generation batch, before the episodes are played
    inputs, credit                          after they are played, and after they are scored
    context, loss                           in every micro-batch
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import nn

from marcog_trl.agents import Slot, Workflow
from marcog_trl.rollout.prompts import stages_of
from marcog_trl.rollout.records import Row
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.modules import ForwardContext, TeamModule
from marcog_trl.trainers.adapter_targets import adapter_config
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.credit import over_siblings


PROBLEMS_TO_PLAY = 32

Mean = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`mean(total, count)`: makes a sum over a micro-batch the mean over `count` items of the generation batch, in an optimizer step."""


@dataclass
class Credit:
    """
    The credit of the replies of a batch.

    Args:
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`): Advantages in the loss, before the weights of agents and turns.
        of_rows (`torch.Tensor` of shape `(B,)`, *optional*): Advantage of each row in reward units, before it is normalised, for
            metrics. Defaults to `advantages`, averaged over tokens.
        inputs (`dict[str, torch.Tensor]`, *optional*): What [`Algorithm.loss`] needs: tensors of rows, `(B, ...)`, and numbers.
    """

    advantages: torch.Tensor
    of_rows: torch.Tensor | None = None
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm:
    """
    Group-relative credit: the advantage of a row is its return minus the mean return of its siblings. It has no losses of its own.

    Subclasses override what they change.

    Args:
        args ([`MultiAgentConfig`]): Configuration.
        workflow ([`Workflow`]): The team's workflow.

    Attributes:
        penalizes_rewards (`bool`): Whether the KL penalty is in the rewards, so that TRL's loss has none.
        skips_rows (`bool`): Whether rows whose advantages are all 0 add nothing to the losses, so that they need no forward pass.
        serves_agents (`bool`): Whether vLLM serves an adapter for each agent.
        modules ([`TeamModule`], *optional*): The team's modules, once they are made.
        memory (`dict`): What is known from earlier batches, as JSON. Checkpoints hold it.
        log (`Callable`): `log(name, total, count)` adds a sum over `count` values to a metric, which is their mean over the
            logging window and all processes. The trainer sets it.

    Source: GRPO (https://huggingface.co/papers/2402.03300), without the division by the standard deviation.
    """

    skips_rows = False

    def __init__(self, args: Any, workflow: Workflow):
        self.args = args
        self.workflow = workflow
        self.agents = [agent.name for agent in workflow.agents]
        self.modules: TeamModule | None = None
        self.memory: dict[str, Any] = {}
        self._stages: list[tuple[Slot, ...]] = []  # who speaks when, with credit="counterfactual"
        self.log: Callable[[str, torch.Tensor, torch.Tensor], None] = lambda name, total, count: None

    # Episodes

    def check(self, problems: Any) -> None:
        """
        Checks that episodes can branch as the configuration says.

        Args:
            problems (`Dataset` or `list`, *optional*): Training problems.

        Raises:
            ValueError: If they cannot.
        """
        by_stage = self.args.credit == "counterfactual"
        if not self.workflow.replayable and (by_stage or self.tree(training=True).branches_later):
            raise ValueError(
                f"replayable=False says that episodes of {type(self.workflow).__name__} cannot be played again up to where they "
                "branch. Set replayable=True if it asks the same, given the same replies, or train without "
                "credit='counterfactual', turn_tree and joint_mode='cross'."
            )
        if by_stage:
            self._stages = find_stages(self.workflow, self.args, problems)

    def tree(self, training: bool) -> Tree:
        """Returns where the episodes of a problem branch. Lines branch once, at the beginning. Evaluation never branches."""
        if training and self.args.credit == "counterfactual":
            return Tree.of_stages(self._stages, fanout_of(self.args, len(self._stages)))
        generations = self.args.num_generations if training else self.args.num_generations_eval
        return Tree.of_turns(self.workflow, [generations] + [1] * (self.workflow.num_turns - 1))

    def begin_rollout(self, step: int, training: bool, process: int) -> dict[str, Any]:
        """
        Returns the options of [`Team.engine_functions`].

        Args:
            step (`int`): Optimizer steps so far.
            training (`bool`): Whether a batch of training is played, not of evaluation.
            process (`int`): Index of this process.
        """
        return {}

    def inputs(self, batch: TeamBatch) -> dict[str, torch.Tensor]:
        """Returns the inputs of forward passes besides token ids, each of shape `(B, ...)`. The batch is not scored yet."""
        return {}

    # The team

    def adapter_config(self, model: Any, peft_config: PeftConfig | None) -> PeftConfig | None:
        """Returns the configuration of the adapter to train, or `None` if the model has one, or all weights are trained."""
        return adapter_config(model, peft_config, self.args, experts=True)

    def make_modules(self, model: Any) -> TeamModule | None:
        """Makes the team's modules, without attaching them to the model."""
        return None

    def parameter_groups(self) -> dict[str, tuple[nn.Module, float | None]]:
        """Returns the module and the learning rate of each parameter group beside the policy, by name. `None`: the policy's rate."""
        return {}

    def describe(self) -> dict[str, Any]:
        """
        Returns the settings that determine the shapes of the team's modules, and as `note`, what readers of a saved team should
        know.
        """
        return {}

    def save_agents(self, model: Any, paths: list[Path | None], is_main_process: bool) -> None:
        """Writes the agents that have an adapter of their own to these folders, beside the team's adapter."""

    # Serving

    @property
    def serves_agents(self) -> bool:
        return False

    @property
    def penalizes_rewards(self) -> bool:
        return False

    def serve(self, rows: list[Row], training: bool) -> bool:
        """Called before a stage is generated, if vLLM serves the agents. Returns whether the engine's adapters are out of date."""
        return False

    def served_adapters(self, model: Any, observations: Callable[[], torch.Tensor]) -> list[tuple[dict, LoraConfig]]:
        """Returns the current adapter of each agent. `observations()` are those of their role texts, `(N, 2H)`."""
        raise NotImplementedError

    # Learning

    def credit(self, batch: TeamBatch) -> Credit:
        """Returns the credit of a batch that is closed. `batch.run_policy()` gives it values and log-probabilities."""
        return Credit(self.group_advantages(batch))

    def group_advantages(self, batch: TeamBatch) -> torch.Tensor:
        """Returns the advantage of each row over its siblings, `(B,)`, in reward units. 0 for rows that are not in statistics."""
        return over_siblings(batch, kind="mean")

    def context(self, inputs: Mapping[str, Any], keep: int, part: int | None = None) -> ForwardContext:
        """
        Returns the context of a forward pass, for the team's modules.

        Args:
            inputs (`Mapping`): What `inputs` and, in an update, `credit` returned for the rows of the pass.
            keep (`int`): T, number of tokens of the replies.
            part (`int`, *optional*): Number of the micro-batch in its generation batch, in updates.
        """
        return ForwardContext(keep=keep)

    def loss(self, forward: ForwardContext, inputs: Mapping[str, torch.Tensor], mean: Mean) -> torch.Tensor | None:
        """
        Returns what is added to TRL's loss, if anything.

        Args:
            forward ([`ForwardContext`]): The forward pass of TRL's loss, with `logps` and what the team's modules computed.
            inputs (`Mapping`): The micro-batch: TRL's tensors, and what `inputs` and `credit` returned.
            mean ([`Mean`]): `mean(total, count)`, with `count=inputs["num_items_in_batch"]` for sums over tokens.
        """
        return None


def loss_mask(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns 1 on the tokens of a micro-batch that are in the loss, `(B, T)`."""
    return inputs["completion_mask"] * inputs["tool_mask"]


def fanout_of(args: Any, num_stages: int) -> list[int]:
    """Returns the number of replies in the same context, by stage: `args.fanout`, or all at the first stage."""
    return list(args.fanout or [args.num_generations] + [1] * (num_stages - 1))


def find_stages(workflow: Workflow, args: Any, problems: Iterable[Mapping[str, Any]] | None) -> list[tuple[Slot, ...]]:
    """
    Returns the slots of each stage, from the first problems.

    Raises:
        ValueError: If there are no problems, agents speak in another order than that of the slots, `args.fanout` does not fit
            the stages, or there are more than `args.max_joint_actions`.
    """
    if problems is None:
        raise ValueError(
            "credit='counterfactual' needs problems to find out who speaks when. Leave out --prompt-tokens."
        )
    stages = stages_of(workflow, list(itertools.islice(problems, PROBLEMS_TO_PLAY)))
    fanout, title = fanout_of(args, len(stages)), type(workflow).__name__
    names = [" and ".join(slot.agent for slot in stage) for stage in stages]
    if len(fanout) != len(stages):
        raise ValueError(
            f"fanout={fanout} has {len(fanout)} entries, but an episode of {title} has {len(stages)} stages: {', '.join(names)}. "
            f"Set fanout={[2] * len(stages)} and num_generations={2 ** len(stages)}, for example."
        )
    alone = [name for name, replies in zip(names, fanout, strict=True) if replies == 1]
    if alone and len(stages) > 1 and args.critic_share == 0:
        warnings.warn(
            f"fanout={fanout} gives {', '.join(alone)} one reply in each context, which has nothing to be compared with: these "
            "stages are not trained. Give them at least 2, or set critic_mix in trainers with a critic.",
            stacklevel=2,
        )
    evaluations = sum(Tree.of_stages(stages, fanout).joint_actions)
    if evaluations > args.max_joint_actions:
        raise ValueError(
            f"max_joint_actions={args.max_joint_actions} is below the {evaluations} joint actions per problem of fanout={fanout}. "
            f"Set max_joint_actions={evaluations}, or a smaller fanout."
        )
    return stages
