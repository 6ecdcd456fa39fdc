"""Credit does not depend on how long a reply is: a reward that text cannot influence leaves lengths as they are."""

import random

import pytest
import teams
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


ENDS = list(range(1, 9))  # so many tokens end a reply that lengths can fall and rise
REWARDS = {
    "constant": lambda coin: 1.0,
    "mostly 1": lambda coin: float(coin.random() < 0.9),
    "mostly 0": lambda coin: float(coin.random() < 0.1),
}


def mean_length(trainer, replies=256):
    """Of replies to the training problems, which are sampled with the same random numbers every time."""
    trainer.model.eval()
    torch.manual_seed(0)
    problems = [trainer.train_dataset[i % len(trainer.train_dataset)] for i in range(replies)]
    return sum(len(episode.rows[0].completion_ids) for episode in trainer.team.play(problems)) / replies


@pytest.mark.parametrize(
    ("reward", "lam"),
    [("constant", 0.95), *(pytest.param(name, 1.0, marks=pytest.mark.slow) for name in ("mostly 1", "mostly 0"))],
)
def test_a_reward_that_text_cannot_influence_leaves_the_length(tiny_model, tmp_path, reward, lam):
    model, coin = AutoModelForCausalLM.from_pretrained(tiny_model), random.Random(0)
    model.generation_config.eos_token_id = ENDS
    trainer = teams.make(
        model,
        tmp_path,
        reward=lambda completions, **kwargs: [REWARDS[reward](coin) for _ in completions],
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
        data=teams.dataset(8),
        lora={"init_lora_weights": True, "r": 8, "lora_alpha": 16, "target_modules": ["o_proj", "down_proj"]},
        per_device_train_batch_size=16,
        max_completion_length=48,
        learning_rate=3e-2,
        max_grad_norm=1.0,
        critic_learning_rate=1e-4,
        max_steps=50,
        lam=lam,
    )
    before = mean_length(trainer)
    trainer.train()
    assert mean_length(trainer) == pytest.approx(before, rel=0.2)
