"""The adapter merged into a copy of the weights while agents generate."""

import pytest
import teams
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import BitsAndBytesConfig

from marcog_trl.team.merging import merged_adapter
from marcog_trl.trainers import MultiAgentConfig, SHPPOConfig


PROMPTS = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(left, right):
    return all(torch.equal(parameter, right[name]) for name, parameter in left.items())


def count_adapter_passes(model):
    passes = []
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.lora_A["default"].register_forward_hook(lambda *args: passes.append(1))
    return passes


def test_merged_logits_are_the_adapters_and_the_weights_come_back(tiny_model, tmp_path):
    model = teams.make(tiny_model, tmp_path).model.eval()
    before, passes = parameters(model), count_adapter_passes(model)
    with torch.no_grad():
        apart = model(PROMPTS).logits
        count = len(passes)
        with merged_adapter(model):
            merged = model(PROMPTS).logits
            assert not same(parameters(model), before)
        assert count and len(passes) == count
        with model.disable_adapter():
            base = model(PROMPTS).logits
        after = model(PROMPTS).logits
    assert torch.allclose(merged, apart, atol=1e-5)
    assert (merged - base).abs().max() > 1e-2  # the adapter acts
    assert torch.equal(after, apart)
    assert same(parameters(model), before)


def test_weights_come_back_after_an_error(tiny_model, tmp_path):
    model = teams.make(tiny_model, tmp_path).model.eval()
    before = parameters(model)
    with pytest.raises(RuntimeError, match="stopped"), merged_adapter(model):
        raise RuntimeError("stopped")
    assert same(parameters(model), before)
    assert model(PROMPTS).logits.requires_grad  # through the adapter again


def test_a_team_trains_alike_with_and_without(tiny_model, tmp_path):
    trained = {}
    for merge in (False, True):
        trainer = teams.make(
            tiny_model, tmp_path / str(merge), workflow=teams.Chain(), merge_for_generation=merge, max_steps=2
        )
        written = []
        generate = trainer._generate_single_turn

        def watched(*args, generate=generate, written=written, trainer=trainer):
            layers = [layer for layer in trainer.model.modules() if isinstance(layer, BaseTunerLayer)]
            written.append((all(layer.merged for layer in layers), generate(*args)))
            return written[-1][1]

        trainer._generate_single_turn = watched
        trainer.train()
        assert [merged for merged, _ in written] == [merge] * 4
        trained[merge] = [output[0] for _, output in written], teams.trainable(trainer)
    assert trained[True][0] == trained[False][0]
    for name, parameter in trained[True][1].items():
        assert torch.allclose(parameter, trained[False][1][name], atol=1e-5), name


@pytest.mark.parametrize("field", ["use_vllm", "use_transformers_continuous_batching"])
def test_refused_where_generate_does_not_generate(tmp_path, field):
    with pytest.raises(ValueError, match=rf"merge_for_generation=True .*{field}=True.* Set one of them to False"):
        MultiAgentConfig(str(tmp_path), merge_for_generation=True, use_cpu=True, **{field: True})


@pytest.mark.parametrize("sharing", ["latent", "separate"])
def test_refused_for_adapters_by_row(tmp_path, sharing):
    with pytest.raises(
        ValueError, match=rf"merge_for_generation=True .*'{sharing}'.* Set .*parameter_sharing='shared'"
    ):
        SHPPOConfig(str(tmp_path), merge_for_generation=True, use_cpu=True, parameter_sharing=sharing)


def test_refused_for_a_quantised_base(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="merge_for_generation=True does not support a quantised base model"):
        teams.make(
            tiny_model,
            tmp_path,
            merge_for_generation=True,
            quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        )
