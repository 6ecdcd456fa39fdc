"""The input of a reward model: an episode as one sequence of token ids, the same in its training and in reinforcement learning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from marcog_trl.parsing.prompts import Prompt, messages_of
from marcog_trl.rollout.engine import encode_prompts


def transcript(tokenizer: Any, prompt: Prompt, replies: Iterable[Mapping[str, Any]]) -> list[int]:
    """
    The token ids of an episode: its problem once, then `[agent · turn] reply` line by line, and an end-of-sequence token.

    Replies keep their token ids, so that one that was cut off lacks its end. The problem goes through the chat template where
    there is one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The team's tokenizer, which is the reward model's too.
        prompt (`str` or `list[dict]`): The problem's `prompt`.
        replies (`Iterable[Mapping]`): Replies in order: `agent`, `turn` (from 0) and `completion_ids`, as one side of a pair
            has them.

    Returns:
        `list[int]`: Token ids.
    """
    (ids,) = encode_prompts(tokenizer, [messages_of(prompt)])
    for reply in replies:
        label = f"[{reply['agent']} · {reply['turn'] + 1}] "
        ids += tokenizer(label, add_special_tokens=False)["input_ids"]
        ids += reply["completion_ids"]
        ids += tokenizer("\n", add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest that tells tokenizers apart whose token ids mean something else."""
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
