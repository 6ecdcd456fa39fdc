import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_lora import make_base, make_model, random_cores

from marcog_trl.heterogeneity.cores import LoraCores, block_mask
from marcog_trl.heterogeneity.fold import fold_adapters, save_adapters, split_adapter, stack_config


PATTERNS = [
    {},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"up_proj": 32}},
    {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "bias": "lora_only"},
]


class TestFold:
    @pytest.mark.parametrize("options", PATTERNS)
    def test_vanilla_peft_reads_the_same_agent(self, batch, tmp_path, options):
        model = make_model(**options)
        cores = LoraCores(model)
        values = random_cores(cores.ranks, 3)
        cores.set(values)
        live = model(**batch).logits
        save_adapters(model, fold_adapters(model, values), [tmp_path / str(row) for row in range(3)])
        for row in range(3):
            folded = PeftModel.from_pretrained(make_base(), tmp_path / str(row)).eval()
            torch.testing.assert_close(folded(**batch).logits[row], live[row], rtol=1e-12, atol=1e-12)

    def test_zero_cores_are_what_peft_saves(self, tmp_path):
        model = make_model()
        model.save_pretrained(tmp_path / "peft")
        save_adapters(model, fold_adapters(model, [torch.zeros(1, 4, 4)] * 14), [tmp_path / "folded"])
        one, other = (PeftModel.from_pretrained(make_base(), tmp_path / name) for name in ("peft", "folded"))
        for (name, parameter), folded in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, folded), name
        configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "folded")]
        assert {**configs[0], "target_modules": None} == {**configs[1], "target_modules": None}
        assert set(configs[0]["target_modules"]) == set(configs[1]["target_modules"])

    def test_folding_changes_nothing_in_the_model(self, batch):
        model = make_model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for state, _ in fold_adapters(model, random_cores([4] * 14, 2)):
            for tensor in state.values():
                tensor.zero_()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert not model.peft_config["default"].inference_mode

    def test_only_the_main_process_writes(self, tmp_path):
        paths = [tmp_path / "agent"]
        model = make_model()
        save_adapters(model, fold_adapters(model, random_cores([4] * 14, 1)), paths, is_main_process=False)
        assert not (tmp_path / "agent").exists()


class TestSplit:
    @pytest.mark.parametrize("options", PATTERNS)
    def test_vanilla_peft_reads_the_same_agents(self, batch, tmp_path, options):
        one = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})
        wide = stack_config(one, 3)
        assert (wide.r, one.r) == (12, 4)
        fields = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
        model = make_model(**{**options, **{field: getattr(wide, field) for field in fields}})
        cores = LoraCores(model)
        cores.set_masks([block_mask(torch.tensor([2, 0, 1]), 3, rank) for rank in cores.ranks])
        live = model(**batch).logits
        paths = [tmp_path / name for name in ("planner", "coder", "debugger")]
        save_adapters(model, split_adapter(model, len(paths)), paths)
        for agent, row in ((0, 1), (1, 2), (2, 0)):
            alone = PeftModel.from_pretrained(make_base(), paths[agent]).eval()
            for field in fields:
                assert getattr(alone.peft_config["default"], field) == getattr(one, field), field
            torch.testing.assert_close(alone(**batch).logits[row], live[row], rtol=1e-12, atol=1e-12)

    def test_stacking_keeps_the_scaling(self):
        one = make_model(r=4, lora_alpha=8).base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
        wide = stack_config(LoraConfig(r=4, lora_alpha=8), 5)
        assert wide.lora_alpha / wide.r == one == 2.0
