"""The parts of serving agents from vLLM that can be tested without it; tests/with_vllm has the rest."""

import importlib.util

import pytest
import teams
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from marcog_trl import SHPPOTrainer


BAD_ADAPTERS = [
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: .*Leave modules_to_save out, .*"),
    ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]: .*Leave trainable_token_indices out, .*"),
    ({"layer_replication": [[0, 1]]}, r"layer_replication=\[\[0, 1\]\]: .*Leave layer_replication out, .*"),
    ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern=.* rank and scale\. Leave .* out, or set use_vllm=False\."),
    ({"lora_bias": True}, "lora_bias=True: .*Leave lora_bias out, .*"),
    ({"bias": "lora_only"}, r"bias='lora_only': .*Set bias='none'\."),
]


@pytest.mark.parametrize("sharing", ["latent", "separate"])
@pytest.mark.parametrize(("lora", "message"), BAD_ADAPTERS)
def test_adapters_that_cannot_be_served_are_refused_before_the_model_loads(tmp_path, lora, message, sharing):
    options = {"use_vllm": True, "latent_scope": "agent", "parameter_sharing": sharing}
    with pytest.raises(ValueError, match=rf"^use_vllm=True does not support peft_config\.{message}$") as error:
        teams.make("nobody/no-such-model", tmp_path, SHPPOTrainer, lora=lora, **options)
    assert "\n" not in str(error.value)


def test_an_adapter_in_place_is_refused_as_well(tiny_model, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), teams.lora_config(lora_bias=True))
    with pytest.raises(ValueError, match=r"peft_config\.lora_bias=True"):
        teams.make(model, tmp_path, SHPPOTrainer, peft_config=None, use_vllm=True, latent_scope="agent")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_is_trl_s(tiny_model, tmp_path):
    with pytest.raises(ImportError, match="vLLM is not available"):
        teams.make(tiny_model, tmp_path, SHPPOTrainer, use_vllm=True, latent_scope="agent")
