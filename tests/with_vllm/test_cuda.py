"""Agents of a colocated engine on a GPU, wherever vLLM is installed for one: `python -m pytest tests/with_vllm/test_cuda.py`."""

import pytest
import torch
from test_agents import MODES, difference, make, refreshes


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("mode", ["latent", "separate"])
def test_samples_come_from_the_agents_of_now(tiny_model, tmp_path, mode):
    trainer = make(tiny_model, tmp_path, use_cpu=False, vllm_gpu_memory_utilization=0.2, max_steps=4, **MODES[mode])
    given = refreshes(trainer)
    trainer.train()
    assert trainer.accelerator.device.type == "cuda"
    assert len(given) == 4 and {len(adapters) for adapters in given} == {len(trainer.agents)}
    assert len(difference(trainer)) == 4 and max(difference(trainer)) < 1e-2  # kernels round differently
