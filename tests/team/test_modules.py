"""The hooks between the team's networks and the language model."""

import pytest
import teams
import torch

from marcog_trl import SHPPOTrainer
from marcog_trl.team.modules import ForwardContext


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    trainer = teams.make(tiny_model, tmp_path_factory.mktemp("team"), SHPPOTrainer, workflow=teams.Pair())
    teams.randomize(trainer.modules, scale=0.2)
    trainer.model.eval()
    return trainer


IDS = torch.randint(5, 300, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def z():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(trainer, flight=None, ids=IDS):
    if flight is None:
        return trainer.model(ids).logits
    with trainer.modules.rows(flight):
        return trainer.model(ids).logits


class TestHooks:
    def test_outside_of_a_flight_the_model_is_plain_lora(self, trainer, z):
        plain = logits(trainer)
        with_latents = logits(trainer, ForwardContext(z=z))
        assert (with_latents - plain).abs().max() > 1e-3
        assert torch.equal(logits(trainer), plain)
        assert torch.equal(logits(trainer, ForwardContext()), plain)
        with trainer.model.disable_adapter():
            assert torch.equal(logits(trainer, ForwardContext(z=z)), logits(trainer))

    def test_every_row_has_its_own_latent(self, trainer, z):
        together = logits(trainer, ForwardContext(z=z))
        for row in range(3):
            alone = logits(trainer, ForwardContext(z=z[row : row + 1]), IDS[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
        same = logits(trainer, ForwardContext(z=z[:1].expand(3, -1)), IDS[:1].expand(3, -1))
        torch.testing.assert_close(same[0], same[1])
        assert (same[0] - together[1]).abs().max() > 1e-3

    def test_generation_decodes_cores_once_and_samples_from_the_latents_policy(self, trainer, z):
        calls = []
        handle = trainer.modules.core_decoder.register_forward_hook(lambda *args: calls.append(args))
        with trainer.modules.rows(ForwardContext(z=z, frozen=True)):
            ids = trainer.model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, eos_token_id=None)
        handle.remove()
        assert len(calls) == 1 and ids.shape == (3, 14)
        # Greedy tokens are those of whole forward passes, without cache, with the same latents
        greedy = logits(trainer, ForwardContext(z=z), ids)[:, 8:-1].argmax(-1)
        assert torch.equal(greedy, ids[:, 9:])
        assert not torch.equal(logits(trainer, None, ids)[:, 8:-1].argmax(-1), ids[:, 9:])

    def test_values_read_the_state_before_each_token(self, trainer, z):
        flight = ForwardContext(keep=4, critic_state=torch.randn(3, 64), z=z)
        logits(trainer, flight)
        assert flight.values.shape == (3, 4)
        with trainer.modules.rows(ForwardContext(z=z)), torch.no_grad():
            hidden = trainer.model(IDS, output_hidden_states=True).hidden_states[-1]
        expected = trainer.modules.value_head(hidden[:, 4:8], flight.critic_state)
        torch.testing.assert_close(flight.values, expected)
        changed = IDS.clone()
        changed[:, 7] += 1  # token 2 of the completion: the values before tokens 0, 1 and 2 do not see it
        other = ForwardContext(keep=4, critic_state=flight.critic_state, z=z)
        logits(trainer, other, changed)
        torch.testing.assert_close(other.values[:, :3], flight.values[:, :3])
        assert ((other.values[:, 3] - flight.values[:, 3]).abs() > 1e-4).all()
