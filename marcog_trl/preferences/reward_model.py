"""A reward model of episodes, as a reward function of the trainers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_trainer import suppress_seqcls_warning
from trl.trainer.utils import pad

from marcog_trl.files import read_json
from marcog_trl.parsing.prompts import Prompt
from marcog_trl.preferences.transcript import transcript
from marcog_trl.processes import this_process
from marcog_trl.rollout.records import Row


REWARD_MODEL_FILE = "reward_model.json"


def is_team_reward_model(path: str | Path) -> bool:
    """Whether a folder holds a saved [`TeamRewardModel`]."""
    return (Path(path) / REWARD_MODEL_FILE).is_file()


class TeamRewardModel:
    """
    A reward model that reads whole episodes, and a reward function of every trainer of this package.

    The reward of an episode is its standardised score `(r̂ - m) / s`, with the mean m and the standard deviation s of the
    transcripts that the model was trained on. In an episode of several turns, the first turn earns the score so far, and each
    later turn what it adds: the sum is the score of the whole episode, whichever turn ended it.

    Example:

    ```python
    >>> reward = TeamRewardModel.from_pretrained("outputs/reward_model")
    >>> args = MultiAgentGRPOConfig("outputs/team", workflow="collaboration", beta=0.02, reward_weights=[1, 0])
    >>> trainer = MultiAgentGRPOTrainer(model, [reward, "execution_reward"], args, problems)
    ```

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): A sequence classifier with one label.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer, which is also the team's.
        mean, std (`float`, *optional*, default to `0.0` and `1.0`): m and s.
        autocast (`str`, *optional*): The type that training computed in by autocast: `"bfloat16"` or `"float16"`.
        batch_size (`int`, *optional*, defaults to `16`): Transcripts that are scored together.
    """

    needs_tokenizer = True  # trainers check it before training
    __name__ = "reward_model"  # by which TRL logs it

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        mean: float = 0.0,
        std: float = 1.0,
        autocast: str | None = None,
        batch_size: int = 16,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.mean = mean
        self.std = std
        self.autocast = autocast
        self.batch_size = batch_size

    @classmethod
    def from_pretrained(cls, path: str | Path, device: str | torch.device | None = None) -> TeamRewardModel:
        """
        Loads a reward model.

        Args:
            path (`str`): Folder that [`TeamRewardTrainer.save_model`] wrote.
            device (`str` or `torch.device`, *optional*): Where it computes. Defaults to this process's accelerator, or the CPU.

        Returns:
            [`TeamRewardModel`].

        Raises:
            ValueError: If the folder is not a saved reward model.
        """
        path = Path(path)
        if not is_team_reward_model(path):
            raise ValueError(
                f"{str(path)!r} is not the reward model of a team: it has no {REWARD_MODEL_FILE}. Use a folder that "
                "TeamRewardTrainer.save_model wrote."
            )
        saved = read_json(path / REWARD_MODEL_FILE, "mean", "std", "dtype", "autocast")
        tokenizer = AutoTokenizer.from_pretrained(path)
        is_adapter = (path / "adapter_config.json").is_file()
        config = PeftConfig.from_pretrained(str(path)) if is_adapter else None
        base = str(path) if config is None else str(config.base_model_name_or_path)
        revision = "main" if config is None else config.revision or "main"
        with suppress_seqcls_warning():
            model = AutoModelForSequenceClassification.from_pretrained(
                base, num_labels=1, revision=revision, dtype=saved["dtype"]
            )
        # Not PEFT's AutoPeftModel, which fits the embeddings to the tokenizer
        model = PeftModel.from_pretrained(model, str(path)) if is_adapter else model
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model.requires_grad_(False).eval()
        model.to(this_process().device if device is None else device)
        return cls(model, tokenizer, saved["mean"], saved["std"], saved["autocast"])

    def check_tokenizer(self, tokenizer: Any) -> None:
        """
        Refuses a team whose token ids this model would read otherwise than the team wrote them.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The team's tokenizer.

        Raises:
            ValueError: If they differ in vocabulary, end-of-sequence token or chat template.
        """
        differences = {
            "vocabulary": self.tokenizer.get_vocab() != tokenizer.get_vocab(),
            "eos_token": self.tokenizer.eos_token_id != tokenizer.eos_token_id,
            "chat template": self.tokenizer.chat_template != tokenizer.chat_template,
        }
        found = [what for what, differs in differences.items() if differs]
        if found:
            raise ValueError(
                f"the reward model has another {' and '.join(found)} than the team, whose token ids it reads. Train a reward "
                "model on the team's base model."
            )

    def score(self, transcripts: Sequence[list[int]]) -> list[float]:
        """
        The scores r̂ of transcripts, as [`transcript`] makes them: log-odds, up to a constant.

        Args:
            transcripts (`Sequence[list[int]]` of length E): Token ids.

        Returns:
            `list[float]` of length E: Scores.
        """
        scores: list[float] = []
        for start in range(0, len(transcripts), self.batch_size):
            scores += self._score(transcripts[start : start + self.batch_size])
        return scores

    @torch.no_grad()
    def _score(self, transcripts: Sequence[list[int]]) -> list[float]:
        """Padded as in training, by TRL's collator."""
        ids = [torch.tensor(one) for one in transcripts]
        padded = pad(ids, padding_value=self.tokenizer.pad_token_id, padding_side="right")
        mask = pad([torch.ones_like(one) for one in ids], padding_value=0, padding_side="right")
        device = self.model.device
        kind = getattr(torch, self.autocast or "bfloat16")
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.autocast(device.type, dtype=kind, enabled=self.autocast is not None):
                output = self.model(input_ids=padded.to(device), attention_mask=mask.to(device), use_cache=False)
        finally:
            self.model.train(was_training)
        return output.logits.squeeze(-1).float().tolist()

    def __call__(
        self, prompts: Sequence[Prompt], rows: Sequence[Sequence[Row]], turn: Sequence[int], **columns: Any
    ) -> list[float]:
        """
        The rewards of one turn, as trainers ask for them.

        Args:
            prompts (`Sequence` of length E): Prompts of the problems.
            rows (`Sequence[Sequence[Row]]` of length E): Replies of each episode up to this turn.
            turn (`Sequence[int]` of length E): Turn of each episode, counted from 0.
            **columns: What trainers pass besides.

        Returns:
            `list[float]` of length E: Rewards, in standard deviations of the training transcripts' scores.
        """
        now = self.score([self._until(*episode) for episode in zip(prompts, rows, turn, strict=True)])
        late = [e for e, k in enumerate(turn) if k > 0]
        before = self.score([self._until(prompts[e], rows[e], turn[e] - 1) for e in late])
        starts = dict.fromkeys(range(len(prompts)), self.mean) | dict(zip(late, before, strict=True))
        return [(score - starts[e]) / self.std for e, score in enumerate(now)]

    def _until(self, prompt: Prompt, rows: Sequence[Row], turn: int) -> list[int]:
        played = [(row.slot, row.completion_ids) for row in rows if row.slot.turn <= turn]
        replies = [{"agent": slot.agent, "turn": slot.turn, "completion_ids": ids} for slot, ids in played]
        return transcript(self.tokenizer, prompt, replies)
