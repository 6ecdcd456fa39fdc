"""One policy for all agents takes TRL's own way: the adapter merged, and all weights sent after every step."""

import functools

import pytest
import teams
from trl.generation import vllm_generation

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.team.vllm import AgentGeneration
from marcog_trl.trainers import MultiAgentGRPOTrainer


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [(MultiAgentPPOTrainer, {}), (MultiAgentGRPOTrainer, {}), (SHPPOTrainer, {"parameter_sharing": "shared"})],
)
def test_trains_and_evaluates_on_samples_of_the_policy_of_now(
    tiny_model, tmp_path, monkeypatch, trainer_class, options
):
    # TRL leaves the precision to vLLM, which takes half of it
    monkeypatch.setattr(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, dtype="float32"))
    trainer = teams.make(
        tiny_model,
        tmp_path,
        trainer_class,
        workflow=teams.Pair("abc"),
        per_device_train_batch_size=6,
        max_steps=4,
        learning_rate=3e-2,
        use_vllm=True,
        eval_dataset=teams.dataset(),
        **options,
    )
    assert not isinstance(trainer.vllm_generation, AgentGeneration)
    before = teams.trainable(trainer)
    trainer.train()
    trainer.evaluate()
    moved = [name for name, p in teams.trainable(trainer).items() if (p - before[name]).abs().max() > 1e-3]
    assert any("lora_" in name for name in moved)
    for prefix, count in (("", 4), ("eval_", 1)):
        found = teams.logged(trainer, f"{prefix}sampling/sampling_logp_difference/max")
        assert len(found) == count and max(found) < 1e-3
        assert len(teams.logged(trainer, f"{prefix}sampling/importance_sampling_ratio/mean")) == count
