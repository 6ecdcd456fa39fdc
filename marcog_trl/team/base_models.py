"""Quick checks of a base model before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils.integrations import gather_params_ctx
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import find_adapter_config_file

from marcog_trl.team.modules import ATTRIBUTE


WHERE_FROM = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder")
TRAIN_FURTHER = "PeftModel.from_pretrained(base_model, adapter_folder, is_trainable=True)"


def check_model(field: str, name: str, tokenizer: bool = True, **model_init_kwargs: Any) -> None:
    """
    Checks that a model has a configuration and a tokenizer, and that the weight files of a local model can be read.

    Args:
        field (`str`): Name of the argument in errors, such as `"model_name_or_path"`.
        name (`str`): Folder, or repository on the Hub.
        tokenizer (`bool`, *optional*, defaults to `True`): Whether to check the tokenizer.
        **model_init_kwargs: Keyword arguments for `from_pretrained`.

    Raises:
        ValueError: If something is missing or cannot be read.
    """
    check_no_adapter(field, name, **model_init_kwargs)
    options = {key: model_init_kwargs[key] for key in WHERE_FROM if key in model_init_kwargs}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        if tokenizer:
            check_vocabulary(config, load_tokenizer(name, **options))
        for file in sorted(Path(name).glob("*.safetensors")):
            with safe_open(file, "pt"):
                pass
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{field}={name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def check_no_adapter(field: str, name: str, **model_init_kwargs: Any) -> None:
    """
    Refuses the name of an adapter in place of a model's. transformers would load it into its base, from where it is not saved.

    Args:
        field, name, model_init_kwargs: See [`check_model`].

    Raises:
        ValueError: If the folder or repository has an adapter.
    """
    options = {
        key: model_init_kwargs[key] for key in set(WHERE_FROM) - {"trust_remote_code"} if key in model_init_kwargs
    }
    try:
        found = find_adapter_config_file(name, **options)
    except (OSError, ValueError) as error:  # the name can be none of a repository
        raise ValueError(f"{field}={name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    if found is not None:
        base = PeftConfig.from_pretrained(name, **options).base_model_name_or_path
        raise ValueError(
            f"{field}={name!r} is an adapter of {base!r}, not a model. Use {base!r}. To train the adapter further, pass {TRAIN_FURTHER} "
            "as model of a trainer."
        )


def check_vocabulary(config: Any, tokenizer: Any) -> None:
    """
    Checks that a model knows the tokens of a tokenizer. The first unknown one would end a run somewhere in PyTorch.

    Args:
        config (`PretrainedConfig`): Configuration of the model.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. Of its added tokens, only those that every text has count: some
            models, such as Gemma 3's smallest, have others that they do not know, and text never has.

    Raises:
        ValueError: If the vocabulary of the model is smaller.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so that no reply would end. Set tokenizer.eos_token to the token that ends "
            "replies of this model, and save the tokenizer."
        )
    known = config.get_text_config().vocab_size
    used = [
        index
        for index in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        if index is not None
    ]
    needed = max(tokenizer.vocab_size, *(index + 1 for index in used))
    if needed > known:
        raise ValueError(
            f"the tokenizer has {needed} tokens, but the model knows {known} (vocab_size). Use the tokenizer of this model, or "
            "call model.resize_token_embeddings(len(tokenizer)) and save both."
        )


@torch.no_grad()
def fingerprint(model: Any) -> dict[str, int]:
    """
    Returns sums of the bits of a base model's weights, which tell it from models with other weights. A collective operation under
    ZeRO-3.

    Weights are rounded to bfloat16 first, so that the sums are the same in float32 and bfloat16. What cannot be compared has a key
    of its own, or none: float16 rounds otherwise, and quantised layers have other weights.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The base model, with or without adapters, which do not count.

    Returns:
        `dict[str, int]`: `vocab_size`, and the sums of `embeddings` (with the head), `layers` and, unless adapters train them,
        `biases`.
    """
    adapters: dict[str, Any] = dict(model.peft_config) if isinstance(model, PeftModel) else {}
    trains_biases = any(getattr(config, "bias", "none") != "none" for config in adapters.values())
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    quantised = getattr(base, "is_quantized", False)
    vocab_size = base.config.get_text_config().vocab_size
    sums = {"vocab_size": vocab_size}
    for name, p in base.named_parameters():
        of_adapter = bool({ATTRIBUTE, *adapters} & set(name.split(".")))
        if of_adapter or not p.is_floating_point() or p.is_meta:
            continue
        with gather_params_ctx([p], modifier_rank=None):
            kind = "embeddings" if p.dim() == 2 and len(p) == vocab_size else "layers"
            kind = "biases" if name.endswith("bias") else kind
            if (quantised and kind != "embeddings") or (trains_biases and kind == "biases"):
                continue
            bits = p.detach().flatten().to(torch.bfloat16)
            words = torch.nn.functional.pad(bits, (0, -len(bits) % 4)).view(torch.int64)
            key = f"{kind}_float16" if p.dtype == torch.float16 else kind
            sums[key] = (sums.get(key, 0) + int(words.sum())) % 2**63
    return sums


def same_weights(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two [`fingerprint`]s agree in all that both have."""
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """
    Loads a tokenizer as teams use it: it pads on the left, with the end-of-sequence token if it has no token for that.

    Args:
        name (`str` or `Path`): Folder, or repository on the Hub.
        **options: Keyword arguments for `from_pretrained`.

    Raises:
        ValueError: If the vocabulary is missing, where transformers builds an empty tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"{str(name)!r} has no tokenizer. Save one there with tokenizer.save_pretrained({str(name)!r})."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
