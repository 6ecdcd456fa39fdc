"""Dataloaders that repeat each problem once per row, and the order of the problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from marcog_trl.agents import Slot
from marcog_trl.rollout.tree import Tree
from marcog_trl.team.data_checks import check_dataset, usable
from marcog_trl.trainers.sampling import Curriculum, CurriculumSampler, OrderOfEpoch
from marcog_trl.trainers.stages import fanout_of, find_stages


if TYPE_CHECKING:
    from marcog_trl.trainers.plan import Plan


@contextmanager
def lent(owner: Any, **values: Any) -> Iterator[None]:
    """Lends an object other values of its attributes, and gives its own back."""
    own = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(own)


class ProblemLoaders(GRPOTrainer):
    """
    The part of [`MultiAgentTrainer`] that makes dataloaders, evaluates on them, and plans what their batches need.

    They repeat each problem once per row. TRL's dataloaders repeat it once per generation.
    """

    args: Any
    model: Any
    num_generations: int
    num_generations_eval: int
    workflow: Any
    scorer: Any
    _curriculum: Curriculum | None
    _stages: list[tuple[Slot, ...]]  # who speaks when, with credit="counterfactual"

    def _tree(self, training: bool) -> Tree:
        """Returns where the episodes of a problem branch. Lines branch once, at the beginning."""
        if training and self.args.credit == "counterfactual":
            return Tree.of_stages(self._stages, fanout_of(self.args, self._stages))
        generations = self.args.num_generations if training else self.args.num_generations_eval
        return Tree.of_turns(self.workflow, [generations] + [1] * (self.workflow.num_turns - 1))

    def _tree_here(self) -> Tree:
        """Returns the tree that this process plays: one episode per row if others may play its siblings."""
        if self._splits_groups(self.model.training):
            return Tree.of_turns(self.workflow, [1] * self.workflow.num_turns)
        return self._tree(self.model.training)

    def _check_tree(self, train_dataset: Any) -> None:
        """Refuses trees that do not fit the workflow."""
        if self.args.credit == "counterfactual":
            self._stages = find_stages(self.workflow, self.args, train_dataset)

    def _splits_groups(self, training: bool) -> bool:
        """
        Whether a group of siblings may be split over several processes, as in TRL. Only with one slot and without branches:
        otherwise an episode has several replies, and one process must play all of them.
        """
        return len(self.workflow.slots) == 1 and not (training and self.args.credit == "counterfactual")

    def plan(self, gpu_memory: float | None = None) -> Plan:
        """
        Computes what the run needs: parameters, memory by part, rows, tokens and calls of the evaluator.

        Args:
            gpu_memory (`float`, *optional*): Memory of each GPU, in GiB, to say whether the run fits and what to change. By
                default, plans for this machine.

        Returns:
            [`~marcog_trl.trainers.plan.Plan`].
        """
        from marcog_trl.trainers.plan import plan_trainer

        return plan_trainer(cast(Any, self), gpu_memory)

    def _whole_problems(self) -> AbstractContextManager[None]:
        """Makes TRL repeat each problem once per row, in its samplers and its `IterableDataset`s."""
        train, evaluation = (len(self._tree(training).slots) for training in (True, False))
        return lent(self, num_generations=train, num_generations_eval=evaluation)

    def get_train_dataloader(self):
        with self._whole_problems():
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        sampler = cast(RepeatSampler, super()._get_train_sampler(dataset))
        if self._curriculum is not None:
            return CurriculumSampler(sampler, self._curriculum, self._epoch)
        return OrderOfEpoch(sampler, self.args.seed, self._epoch)

    def _epoch(self) -> int:
        return int(self.state.epoch or 0)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None):
        named = eval_dataset is None or isinstance(eval_dataset, str)
        played = self.eval_dataset if eval_dataset is None else eval_dataset
        played = cast(dict, self.eval_dataset)[played] if isinstance(played, str) else played
        if isinstance(played, IterableDataset):
            # TRL repeats the problems of an `IterableDataset` here, and those of a `Dataset` in its sampler
            with self._whole_problems():
                return super().get_eval_dataloader(self._given("eval_dataset", played))
        return super().get_eval_dataloader(
            eval_dataset if named else self._given("eval_dataset", cast(Dataset, eval_dataset))
        )

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset):
        test_dataset = self._given("test_dataset", test_dataset)
        if isinstance(test_dataset, IterableDataset):  # TRL repeats its problems in evaluation only
            return self.get_eval_dataloader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler:
        with self._whole_problems():
            return super()._get_eval_sampler(eval_dataset)

    def _given(self, name: str, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """Checks a dataset, and leaves problems out of streams that cannot be used."""
        check_dataset(name, dataset, self.workflow, self.scorer.funcs)
        return usable(name, dataset, self.workflow, self.scorer.funcs)

    def evaluate(self, *args, **kwargs):
        device = self.accelerator.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):  # training goes on as without the evaluation
            return super().evaluate(*args, **kwargs)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test"):
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        # Clear the metrics, or the next evaluation would log them
        logged = {name: sum(values) / len(values) for name, values in self._metrics["eval"].items()}
        self._metrics["eval"].clear()
        named = {f"{metric_key_prefix}_{name}": value for name, value in logged.items()}
        return output._replace(metrics={**(output.metrics or {}), **named})
