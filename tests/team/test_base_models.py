import logging

import pytest
from transformers import AutoConfig

from marcog_trl.team.base_models import check_model


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, caplog):
    """`huggingface_hub` logs each attempt."""
    logger = logging.getLogger("huggingface_hub.file_download")

    def fail(name, **options):
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect\nto the Hub.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with pytest.raises(ValueError) as found:
        check_model("model_name_or_path", "someone/model")
    assert str(found.value) == "model_name_or_path='someone/model' cannot be loaded: We couldn't connect to the Hub."
    assert caplog.messages == []
    assert logger.isEnabledFor(logging.WARNING)
