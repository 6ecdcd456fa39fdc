"""Trains a reward model on pairs of a team's episodes."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from trl import RewardConfig, RewardTrainer

from marcog_trl.checks import Range, check_number
from marcog_trl.files import write_json
from marcog_trl.preferences.reward_model import REWARD_MODEL_FILE, TeamRewardModel
from marcog_trl.preferences.transcript import tokenizer_digest, transcript
from marcog_trl.team.dropout import disable_dropout
from marcog_trl.trainers.config import check_output_dir, run_on_cpu, use_new_names


@dataclass
class TeamRewardConfig(RewardConfig):
    """
    Configuration of [`TeamRewardTrainer`]: that of [`~trl.RewardTrainer`] with other defaults.

    > [!NOTE]
    > These parameters have default values different from [`~trl.RewardConfig`]:
    > - `center_rewards_coefficient`: Defaults to `0.01` instead of `None`, since scores have a free constant.
    > - `max_length`: Defaults to `2048` instead of `1024`: a transcript has the replies of all agents. Pairs with a longer one
    >   are left out, and their number is reported.
    """

    center_rewards_coefficient: float | None = field(
        default=0.01,
        metadata={"help": "Weight of the squared mean score of a pair, which keeps scores near 0."},
    )
    max_length: int | None = field(
        default=2048,
        metadata={"help": "Tokens of the longest transcript. Pairs with a longer one are left out."},
    )

    def __post_init__(self):
        check_output_dir(self.output_dir)
        run_on_cpu(self)
        use_new_names(self)
        super().__post_init__()


class TeamRewardTrainer(RewardTrainer):
    """
    Trains a reward model on pairs of a team's episodes: [`~trl.RewardTrainer`] on [`transcript`]s.

    Example:

    ```python
    >>> train, held_out = hold_out_problems(pairs)
    >>> trainer = TeamRewardTrainer(base_model, TeamRewardConfig("outputs/reward_model"), train, held_out)
    >>> trainer.train()
    >>> trainer.save_model()
    ```

    Args:
        model, args, processing_class, compute_metrics, callbacks, optimizers, quantization_config:
            As in [`~trl.RewardTrainer`]. `model` has the team's tokenizer: take the team's base model.
        train_dataset ([`~datasets.Dataset`]):
            Pairs, as `collect_preferences` returns them. In pairs of turns, transcripts begin with the turns before.
        eval_dataset ([`~datasets.Dataset`], *optional*):
            Pairs of other problems, see [`hold_out_problems`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            Defaults to LoRA of rank 16 on all linear layers, with the score head trained in full.

    Raises:
        ValueError: Before any work starts, if there are no pairs, all are too long, the datasets share problems, or the pairs
            have token ids of another tokenizer.

    Source: Bradley-Terry loss on joint transcripts, as in MARLHF; centring: https://huggingface.co/papers/2312.09244, eq. 2.
    """

    _tag_names = ["trl", "marcog-trl", "reward-trainer"]
    _name = "Team reward model"

    def __init__(
        self,
        model,
        args: TeamRewardConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class=None,
        compute_metrics=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
    ):
        if train_dataset is None or len(train_dataset) == 0:
            raise ValueError("train_dataset has no pairs. Collect pairs with collect_preferences.")
        if eval_dataset is not None:
            shared = set(train_dataset["task_id"]) & set(eval_dataset["task_id"])
            if shared:
                raise ValueError(
                    f"train_dataset and eval_dataset share {len(shared)} problems, such as {min(shared)!r}. Use "
                    "hold_out_problems(pairs), which splits by problems."
                )
        args = args or TeamRewardConfig("reward_model")
        peft_config = peft_config or (None if isinstance(model, PeftModel) else default_adapter())
        loading = cast(dict, args.model_init_kwargs or {})
        if peft_config is not None and "revision" in loading:  # of the base model
            peft_config = replace(peft_config, revision=loading["revision"])
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if cast(TeamRewardConfig, self.args).disable_dropout:
            disable_dropout(cast(Any, self.model))

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if "chosen_ids" not in dataset.column_names:  # TRL prepares again what `evaluate` is given
            dataset = with_transcripts(dataset, processing_class, f"{dataset_name}_dataset")
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        dropped = len(dataset) - len(prepared)
        if dropped:
            counted = f"{dropped} of {len(dataset)} pairs of {dataset_name}_dataset are longer than max_length={args.max_length}"
            if dropped == len(dataset):
                raise ValueError(f"{counted} tokens. Set a longer max_length.")
            warnings.warn(f"{counted} tokens, and are left out.", stacklevel=2)
        return prepared

    def reward_model(self) -> TeamRewardModel:
        """
        The model as it is now, as a reward function: standardised on the transcripts of the training pairs.

        With several processes it is a collective operation.
        """
        types = {"bfloat16": self.args.bf16, "float16": self.args.fp16}
        kind = next((name for name, used in types.items() if used), None)
        model = TeamRewardModel(self.model, self.processing_class, autocast=kind)
        model.batch_size = 2 * self.args.per_device_eval_batch_size
        seen = {
            tuple(ids) for side in ("chosen_ids", "rejected_ids") for ids in cast(Dataset, self.train_dataset)[side]
        }
        scores = torch.tensor(model.score([list(ids) for ids in sorted(seen)]))
        model.mean, model.std = scores.mean().item(), scores.std(correction=0).item()
        if not model.std > 0:
            raise ValueError(
                f"the reward model gives all {len(seen)} training transcripts the score {model.mean:.3g}. Train it longer, or "
                "with a higher learning_rate."
            )
        return model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves model and tokenizer, and, except in checkpoints, what [`TeamRewardModel.from_pretrained`] needs besides."""
        super().save_model(output_dir, _internal_call=True)  # without a push, which comes last
        if _internal_call:
            return
        model = self.reward_model()
        if self.is_world_process_zero():
            folder = Path(cast(str, output_dir or self.args.output_dir))
            dtype = str(model.model.dtype).removeprefix("torch.")
            saved = {"mean": model.mean, "std": model.std, "dtype": dtype, "autocast": model.autocast}
            write_json(folder / REWARD_MODEL_FILE, saved)
        self.accelerator.wait_for_everyone()  # another process may load it next
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def with_transcripts(pairs: Dataset, tokenizer: Any, name: str) -> Dataset:
    """
    Adds the columns `chosen_ids` and `rejected_ids` to pairs: the transcripts of both sides, with the turns before them.

    Args:
        pairs ([`~datasets.Dataset`]): Pairs.
        tokenizer (`PreTrainedTokenizerBase`): The reward model's tokenizer.
        name (`str`): Name of the dataset in errors.

    Raises:
        ValueError: If the pairs were collected with another tokenizer.
    """
    if {json.loads(team)["tokenizer"] for team in pairs.unique("team")} != {tokenizer_digest(tokenizer)}:
        raise ValueError(
            f"{name} has token ids of another tokenizer than the reward model's. Train it on the team's base model."
        )

    def add(pair: dict[str, Any]) -> dict[str, list[int]]:
        played = {f"{side}_ids": [*pair["history"], *pair[side]] for side in ("chosen", "rejected")}
        return {name: transcript(tokenizer, pair["prompt"], replies) for name, replies in played.items()}

    return pairs.map(add, desc=f"Writing transcripts of {name}", load_from_cache_file=False)


def default_adapter() -> LoraConfig:
    """LoRA of rank 16 on all linear layers, with the score head trained in full."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["score"], task_type="SEQ_CLS")


def hold_out_problems(pairs: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """
    Splits pairs by their problems, so that no problem is in both parts.

    Args:
        pairs ([`~datasets.Dataset`]): Pairs with a `task_id`.
        share (`float`, *optional*, defaults to `0.1`): Share of the problems that is held out, between 0 and 1; at least one.
        seed (`int`, *optional*, defaults to `0`): Chooses the problems.

    Returns:
        `tuple[Dataset, Dataset]`: The other pairs, and the held-out ones.

    Raises:
        ValueError: If there is only one problem.
    """
    check_number("share", share, Range(0, 1, above=True, below=True))
    problems = sorted(set(pairs["task_id"]))
    if len(problems) < 2:
        raise ValueError(
            f"the pairs have {len(problems)} problem, so that none can be held out. Collect pairs on more problems."
        )
    count = min(max(1, round(share * len(problems))), len(problems) - 1)
    chosen = set(random.Random(f"hold out {seed}").sample(problems, count))
    held_out = [i for i, task in enumerate(pairs["task_id"]) if task in chosen]
    others = [i for i, task in enumerate(pairs["task_id"]) if task not in chosen]
    return pairs.select(others), pairs.select(held_out)
