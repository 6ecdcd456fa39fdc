"""Quick checks of a base model before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer


_WHERE_FROM = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder")


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
    folder, options = Path(name), {key: model_init_kwargs[key] for key in _WHERE_FROM if key in model_init_kwargs}
    if not folder.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise ValueError(
                f"{field}={name!r} is not a folder, and not a model on the Hub. Check the path."
            ) from None
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # it would log each of its attempts, where the error says it all
    try:
        AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{field}={name!r} cannot be loaded: {_line(error)}") from error
    finally:
        hub_logging.set_verbosity(verbosity)
    if tokenizer:
        try:
            found = AutoTokenizer.from_pretrained(name, **options)
        except (OSError, ValueError) as error:
            raise ValueError(f"{field}={name!r} has a tokenizer that cannot be loaded: {_line(error)}") from error
        if len(found) <= len(
            found.all_special_ids
        ):  # transformers builds an empty tokenizer if the vocabulary is missing
            raise ValueError(
                f"{field}={name!r} has no tokenizer. Save one there with tokenizer.save_pretrained({name!r})."
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{field}={name!r}: {file.name} is damaged or incomplete ({error}). Copy it again."
            ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
