"""Quick checks of a base model before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer


WHERE_FROM = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder")


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
