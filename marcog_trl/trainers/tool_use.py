"""Gives tools and environments to the agents of a trainer."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from marcog_trl.agents import Tools, with_tools
from marcog_trl.rollout.records import Row
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.trainers.argument_checks import TOOLS_WITHOUT_VLLM
from marcog_trl.trainers.batch import TeamBatch
from marcog_trl.trainers.dataloaders import ProblemLoaders


class ToolUse(ProblemLoaders):
    """The part of [`MultiAgentTrainer`] that lets agents call tools, and adopts TRL's environments."""

    _batch: TeamBatch | None
    _inputs: list[dict[str, Any]]
    environments: Any = None
    environment_factories: Any

    def _adopt_environments(self) -> None:
        """Adds the methods of environments to the tools of the only agent, which every row replaces by those of its own."""
        [agent] = self.workflow.agents
        known = {tool.__name__ for tool in agent.tools}
        methods = {
            tool.__name__: tool for tool in self.tools if tool.__name__ not in known
        }  # environments may share names
        self.workflow = with_tools(self.workflow, list(methods.values()))

    def _given(self, name, dataset):
        return dataset if self.environment_factories is not None else super()._given(name, dataset)

    def _generate(self, prompts: list):
        if self.environments is not None:  # TRL has reset them, and added their observations to the prompts
            self._inputs = [{**row, "prompt": prompt} for row, prompt in zip(self._inputs, prompts, strict=True)]
        return super()._generate(prompts)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *rest):
        """Returns what the calls of the rollout gave. TRL would call the tools once more."""
        assert self._batch is not None
        rows = self._batch.rows
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


def check_environments(trainer: ToolUse, datasets: dict[str, Any], reward_funcs: list) -> None:
    """
    Checks that the trainer can use TRL's environments, and the datasets, which need no prompts.

    Raises:
        ValueError: If a row is not an episode, or a dataset is invalid.
    """
    workflow = trainer.workflow
    if len(workflow.slots) > 1:
        raise ValueError(
            f"environment_factory needs episodes of one reply, but {type(workflow).__name__} has {len(workflow.slots)} slots. "
            "Use workflow='single' and num_turns=1, or give the agents tools."
        )
    if trainer.args.use_vllm:
        raise ValueError(TOOLS_WITHOUT_VLLM)
    for name, dataset in datasets.items():
        if isinstance(dataset, Dataset):
            if "prompt" not in dataset.column_names:
                dataset = dataset.add_column("prompt", [[{"role": "user", "content": name}]] * len(dataset))
            check_dataset(name, dataset, workflow, reward_funcs)
