import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from tiny_lora import make_base, make_model, random_cores
from torch.utils.checkpoint import CheckpointError

from marcog_trl.heterogeneity.cores import LoraCores, adapted_layers, block_mask, check_peft_config
from marcog_trl.heterogeneity.networks import CoreDecoder


def row_losses(logits, batch):
    """Sum of the log-probabilities of every row's tokens, `(B,)`."""
    logps = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return -(logps * batch["attention_mask"][:, :-1]).sum(1)


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged_logits(model, cores, row, batch):
    """Logits of one row from the base model with `W + s·B (I + C) A` written into its weights, with gradient."""
    base, weights = make_base(), {}
    for (name, layer), core in zip(adapted_layers(model).items(), cores, strict=True):
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        weights[name.removeprefix("base_model.model.") + ".weight"] = (
            layer.get_base_layer().weight + layer.scaling["default"] * B @ (torch.eye(len(A)) + core[row]) @ A
        )
    inputs = {name: tensor[row : row + 1] for name, tensor in batch.items()}
    return torch.func.functional_call(base, weights, kwargs=inputs).logits


LORA_OPTIONS = [
    {},
    {"use_rslora": True, "lora_bias": False},
    {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "alpha_pattern": {"up_proj": 32}},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
]


class TestCores:
    @pytest.mark.parametrize("options", LORA_OPTIONS)
    def test_loss_and_gradients_equal_merged_weights_row_by_row(self, batch, options):
        model = make_model(**options)
        cores = LoraCores(model)
        values = [core.requires_grad_() for core in random_cores(cores.ranks, 3)]
        inputs = [*trainable(model).values(), *values]

        cores.set(values)
        losses = row_losses(model(**batch).logits, batch)
        cores.clear()
        expected = row_losses(torch.cat([merged_logits(model, values, row, batch) for row in range(3)]), batch)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            torch.autograd.grad(losses.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs),
            rtol=1e-9,
            atol=1e-12,
        )

    def test_ranks_follow_the_rank_pattern(self):
        cores = LoraCores(make_model(**LORA_OPTIONS[2]))
        ranks = {name.rpartition(".")[2]: rank for name, rank in zip(cores.names, cores.ranks, strict=True)}
        assert ranks["q_proj"] == 2 and ranks["down_proj"] == 3 and ranks["k_proj"] == 4

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_zero_cores_are_plain_lora_bit_for_bit(self, batch, dtype):
        model = make_model(dtype)
        plain = model(**batch).logits
        row_losses(plain, batch).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in trainable(model).items()}

        cores, decoder = LoraCores(model), CoreDecoder(8, [4] * 14)
        model.zero_grad()
        cores.set(decoder(torch.randn(3, 8)))
        logits = model(**batch).logits
        assert torch.equal(logits, plain)
        row_losses(logits, batch).sum().backward()
        assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in trainable(model).items())
        assert decoder.cores.weight.grad.any()

    def test_plain_lora_until_set_and_after_clear(self, batch):
        model = make_model()
        plain = model(**batch).logits
        cores = LoraCores(model)
        assert torch.equal(model(**batch).logits, plain)
        cores.set(random_cores(cores.ranks, 3))
        assert not torch.allclose(model(**batch).logits, plain)
        cores.clear()
        assert torch.equal(model(**batch).logits, plain)

    def test_generation_with_cache_equals_without(self, batch):
        model = make_model()
        cores = LoraCores(model)
        options = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
        cores.set(random_cores(cores.ranks, 3))
        cached = model.generate(**batch, use_cache=True, **options)
        again = model.generate(**batch, use_cache=False, **options)
        assert torch.equal(cached.sequences, again.sequences)
        torch.testing.assert_close(cached.logits, again.logits, rtol=1e-9, atol=1e-9)
        cores.clear()
        assert not torch.equal(model.generate(**batch, use_cache=True, **options).sequences, cached.sequences)

    def test_disabled_and_other_adapters_run_no_cores(self, batch):
        model = make_model()
        model.add_adapter("ref", LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        base = make_base()(**batch).logits
        model.set_adapter("ref")
        reference = model(**batch).logits
        model.set_adapter("default")
        cores = LoraCores(model)
        cores.set(random_cores(cores.ranks, 3))
        with model.disable_adapter():
            torch.testing.assert_close(model(**batch).logits, base, rtol=1e-12, atol=1e-12)
        model.set_adapter("ref")
        assert torch.equal(model(**batch).logits, reference)

    def test_gradient_checkpointing_sees_the_same_cores(self, batch):
        model = make_model().train()
        cores = LoraCores(model)
        values = [core.requires_grad_() for core in random_cores(cores.ranks, 3)]
        inputs = [*trainable(model).values(), *values]
        cores.set(values)
        loss = row_losses(model(**batch).logits, batch).sum()
        expected = torch.autograd.grad(loss, inputs)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        checkpointed = row_losses(model(**batch).logits, batch).sum()
        assert torch.equal(checkpointed, loss)
        torch.testing.assert_close(torch.autograd.grad(checkpointed, inputs), expected, rtol=1e-9, atol=1e-12)

        loss = row_losses(model(**batch).logits, batch).sum()
        cores.clear()  # too early: it must not pass silently
        with pytest.raises(CheckpointError):
            loss.backward()

    def test_bfloat16_autocast(self, batch):
        model = make_model(torch.float32)
        cores = LoraCores(model)
        values = [0.1 * core.requires_grad_() for core in random_cores(cores.ranks, 3, torch.float32)]
        cores.set(values)
        exact = model(**batch).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**batch).logits
        torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)
        logits.float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in trainable(model).values())

        half = make_model(torch.bfloat16)
        cores = LoraCores(half)
        cores.set(values)  # float32 cores in a bfloat16 model
        torch.testing.assert_close(half(**batch).logits.float(), exact, rtol=0.1, atol=0.1)


class TestMask:
    def test_each_row_trains_its_own_block_alone(self, batch):
        model = make_model()
        cores = LoraCores(model)
        agents = torch.tensor([1, 0, 1])
        cores.set_masks([block_mask(agents, 2, rank=4)] * 14)
        row_losses(model(**batch).logits, batch)[0].backward()
        for name, parameter in trainable(model).items():
            first, second = parameter.grad.chunk(2, dim=0 if "lora_A" in name else 1)
            assert not first.any() and second.any(), name

    def test_equals_zeroed_weights(self, batch):
        model = make_model()
        cores = LoraCores(model)
        cores.set_masks([block_mask(torch.tensor([0, 1, 1]), 2, rank=4)] * 14)
        masked = model(**batch).logits
        cores.clear()
        for agent, rows in ((0, [0]), (1, [1, 2])):
            alone = make_model()
            for layer in adapted_layers(alone).values():
                with torch.no_grad():
                    layer.lora_A["default"].weight.chunk(2)[1 - agent].zero_()
            torch.testing.assert_close(masked[rows], alone(**batch).logits[rows], rtol=1e-12, atol=1e-12)

    def test_one_mask_per_layer_where_ranks_differ(self, batch):
        model = make_model(rank_pattern={"q_proj": 2})
        cores = LoraCores(model)
        agents = torch.tensor([0, 1, 0])
        cores.set_masks([block_mask(agents, 2, rank) for rank in cores.ranks])
        model(**batch)

    def test_block_mask(self):
        assert block_mask(torch.tensor([2, 0]), 3, 6).tolist() == [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]


class TestMisuse:
    def test_flattened_tokens(self):
        model = make_model()
        cores = LoraCores(model)
        cores.set(random_cores(cores.ranks, 2))
        layer = next(iter(adapted_layers(model).values()))
        with pytest.raises(ValueError, match="inputs of 2 dimensions, but cores need inputs of shape"):
            layer(torch.zeros(2, 64, dtype=torch.float64))

    def test_merged_adapter(self):
        model = make_model()
        cores = LoraCores(model)
        model.merge_adapter()
        with pytest.raises(ValueError, match="merged into the base weights"):
            cores.set(random_cores(cores.ranks, 2))


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (IA3Config(), "peft_config.peft_type=IA3. Use a LoraConfig"),
            (AdaLoraConfig(total_step=1), "peft_config.peft_type=ADALORA"),
            (LoraConfig(use_dora=True), "peft_config.use_dora=True. Leave use_dora out"),
            (LoraConfig(init_lora_weights="mica"), "peft_config.init_lora_weights='mica'"),
            (
                LoraConfig(target_parameters=["experts.gate_up_proj"]),
                r"expert parameters \['experts.gate_up_proj'\]\. .* linear layers in target_modules",
            ),
            (
                LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1]),
                r"peft_config.alora_invocation_tokens=\[1\]",
            ),
        ],
    )
    def test_by_configuration(self, config, message):
        with pytest.raises(ValueError, match=message):
            check_peft_config(config)

    @pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
    def test_embeddings_and_head(self, module):
        with pytest.raises(ValueError, match=f"target_modules adapts '{module}', but .*'all-linear'"):
            LoraCores(make_model(target_modules=["q_proj", module]))

    def test_what_is_not_a_linear_layer(self):
        base = make_base()
        base.model.conv = torch.nn.Conv1d(4, 4, 3)
        model = get_peft_model(base, LoraConfig(target_modules=["conv"]))
        with pytest.raises(ValueError, match=r"target_modules adapts 'conv', a Conv1d, but .* linear layers only"):
            LoraCores(model)

    def test_without_adapter(self):
        with pytest.raises(ValueError, match="Pass a PeftModel with a LoRA adapter"):
            LoraCores(make_base())
        base, config = make_base(), LoraConfig(target_modules=["q_proj"])
        with pytest.raises(ValueError, match="The model has no adapter 'default'"):
            LoraCores(get_peft_model(base, config, adapter_name="other"))

    def test_modules_to_save_is_fine(self):
        assert len(LoraCores(make_model(target_modules=["q_proj"], modules_to_save=["lm_head"])).ranks) == 2
