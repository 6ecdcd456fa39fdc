"""An algorithm of one's own, as in the guide: one class, and no other change."""

import re

import pytest
import teams
import torch
from guides import ROOT

from marcog_trl.trainers import MultiAgentTrainer


@pytest.fixture
def a2c():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "marcog_trl/trainers/README.md").read_text(), re.DOTALL)
    names = {}
    exec(next(block for block in blocks if "class A2C" in block), names)
    return names["A2C"]


def make(model, path, a2c, **options):
    options = {"workflow": teams.Pair(num_turns=2), "max_steps": 4, "per_device_train_batch_size": 8, **options}
    return teams.make(model, path, MultiAgentTrainer, algorithm=a2c, **options)


def test_trains_policy_and_critic(tiny_model, tmp_path, a2c):
    trainer = make(tiny_model, tmp_path, a2c)
    teams.script(trainer)
    before = teams.trainable(trainer)
    trainer.train()
    assert all(not torch.equal(before[name], tensor) for name, tensor in teams.trainable(trainer).items())
    errors = teams.logged(trainer, "critic/error")
    assert len(errors) == 4 and all(error > 0 for error in errors)
    assert all(norm > 0 for norm in teams.logged(trainer, "grad_norm/critic"))
    assert teams.logged(trainer, "clip_ratio/region_mean") == [0.0] * 4


def test_credits_a_reply_with_what_it_earns_beyond_the_value(tiny_model, tmp_path, a2c):
    trainer = make(
        tiny_model, tmp_path, a2c, reward=lambda turn, completions, **kwargs: [2.0 + turn[0]] * len(completions)
    )
    teams.randomize(trainer.modules)
    teams.script(trainer)
    seen = []
    teams.change_credit(trainer, lambda batch, credit: seen.append((batch, credit)))
    output = teams.generation_batch(trainer)
    [(batch, credit)] = seen
    mask = output["completion_mask"].bool()
    earned = torch.where(output["turn"] == 0, 5.0, 3.0)[:, None].expand(mask.shape)
    assert batch.values.std() > 0
    torch.testing.assert_close(credit.advantages[mask], (earned - batch.values)[mask])
