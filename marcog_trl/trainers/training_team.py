"""The team of a trainer, which generates through TRL."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from accelerate.utils import gather_object
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models import unwrap_model_for_generation

from marcog_trl.rollout.player import WorkflowError
from marcog_trl.rollout.records import Episode, Row
from marcog_trl.team.lending import lent
from marcog_trl.team.team import Team


class TrainingTeam(Team):
    """
    A [`Team`] in training.

    Args:
        trainer ([`MultiAgentTrainer`]): The trainer, which generates.
        **options: See [`Team`].
    """

    def __init__(self, trainer: Any, **options: Any):
        super().__init__(trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer, **options)
        self._trainer = trainer
        self.on_activity = lambda activity: trainer.on_activity(activity)  # a callback may set the trainer's
        self.masks_failures = trainer.args.on_reward_error == "mask"
        self._warned_of_workflow = False
        if trainer.args.on_workflow_error == "mask":
            self.on_workflow_error = self._warn_of_workflow
        if not trainer.use_vllm:
            self.generation_config = trainer.generation_config
        ends = [
            token for token in self.eos_token_ids if token not in trainer.eos_token_ids
        ]  # of the chat template alone
        if ends:
            self._stop_at(ends)

    def _stop_at(self, ends: list[int]) -> None:
        """Ends TRL's replies at these tokens, too."""
        trainer = self._trainer
        trainer.eos_token_ids = self.eos_token_ids
        given = cast(dict[str, Any], trainer.args.generation_kwargs or {})
        if trainer.use_vllm:
            trainer.vllm_generation.generation_kwargs = {"stop_token_ids": ends, **given}
        elif "eos_token_id" not in given:
            trainer.generation_config.eos_token_id = self.eos_token_ids
            trainer.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _warn_of_workflow(self, error: WorkflowError) -> None:
        if not self._warned_of_workflow:
            self._warned_of_workflow = True
            where = "; ".join(error.__notes__)
            warnings.warn(
                f"on_workflow_error='mask' excludes an episode from training, and later ones without a warning; they are counted as "
                f"episodes/masked in the log: {error} {where}",
                stacklevel=2,
            )

    def play(self, *args: Any, **options: Any) -> list[Episode]:
        if self._trainer.environment_factories is not None and "tools_of" not in options:
            raise ValueError(
                "Only train() and evaluate() of the trainer reset its environments. Use trainer.evaluate()."
            )
        return super().play(*args, **options)

    def generate(self, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Generates one stage in one call. Without rows, takes part in the call of the other processes."""
        trainer = self._trainer
        prompt_ids = [row.prompt_ids for row in rows] or [[self.tokenizer.eos_token_id]]
        self._check_context(rows)
        trainer._before_generation(rows)
        if trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.vllm_tensor_parallel_size > 1):
            # TRL joins the prompts of several processes, and expects the same number from each
            most = max(gather_object([len(prompt_ids)]))
            prompt_ids += [[self.tokenizer.eos_token_id]] * (most - len(prompt_ids))
        with (
            self._kept_as_it_is() if trainer.use_transformers_continuous_batching else nullcontext(),
            self.generating(rows),
        ):
            completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 1)
        return completion_ids, logprobs

    @contextmanager
    def evaluating(self, on_activity: Callable[[str], None] | None = None) -> Iterator[None]:
        """Also reports nothing to trackio outside of a training: it has no run there, and TRL, which logs times, would fail."""
        args, in_train = self._trainer.args, self._trainer.is_in_train
        reported = [name for name in args.report_to if in_train or name != "trackio"]
        with lent(args, report_to=reported), super().evaluating(on_activity):
            yield

    @contextmanager
    def _kept_as_it_is(self) -> Iterator[None]:
        """
        Restores the model after TRL's continuous batching, which leaves it in training mode and casts all parameters to the
        precision of autocast. Small updates of trainable parameters would be lost.
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

    @property
    def other_generation(self) -> str | None:
        trainer = self._trainer
        names = {
            "use_vllm": trainer.use_vllm,
            "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        }
        return next((name for name, used in names.items() if used), None)

    @contextmanager
    def greedy(self) -> Iterator[None]:
        trainer = self._trainer
        if trainer.use_vllm:
            with lent(trainer.vllm_generation, temperature=0.0):
                yield
        else:
            with super().greedy(), lent(trainer, generation_config=self.generation_config):
                yield

    @contextmanager
    def _unwrapped(self) -> Iterator[Any]:
        trainer, args = self._trainer, self._trainer.args
        with unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=cast(dict | None, args.gradient_checkpointing_kwargs),
        ) as model:
            yield model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters under ZeRO-3, which does so by itself only after training has begun."""
        trainer = self._trainer
        if trainer.deepspeed is not None or not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        with (
            lent(trainer.args, ds3_gather_for_generation=False),
            deepspeed.zero.GatheredParameters(trainer.model.parameters()),
        ):
            yield

    def autocast(self) -> AbstractContextManager[None]:
        return self._trainer.accelerator.autocast()
