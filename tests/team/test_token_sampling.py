import copy
import math
from types import SimpleNamespace

import pytest
import teams
import torch
from transformers import GenerationConfig

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentTrainer
from marcog_trl.agents import Slot
from marcog_trl.rollout.records import Row
from marcog_trl.team import token_sampling
from marcog_trl.team.token_sampling import GivenDraws, fast_draws


ROWS = 4000
PROMPT = list(range(20, 40))


@pytest.fixture
def always(monkeypatch):
    """Replaces `torch.multinomial` at any size of the vocabulary."""
    monkeypatch.setattr(token_sampling, "SMALL_VOCABULARY", 0)


def draw(draws, scores, **sampling):
    """The tokens that follow a prompt of 3, step by step."""
    processor = GivenDraws(draws, GenerationConfig(**sampling)).construct_processor(scores.size(-1))
    prompts = (torch.zeros(len(draws), 3 + step, dtype=torch.long) for step in range(draws.size(1)))
    return torch.stack([processor(ids, scores.clone()).argmax(-1) for ids in prompts], 1)


def drawn(trainer):
    """How often each token is the first one of a reply, of `ROWS` that the trainer has TRL generate."""
    rows = [Row(i, Slot("solver"), 0, "", PROMPT) for i in range(ROWS)]
    torch.manual_seed(0)
    replies, _ = trainer.team.generate(rows)
    return torch.bincount(torch.tensor(replies)[:, 0], minlength=trainer.model.config.vocab_size)


def probabilities(trainer, **changed):
    """Those of the first token when `generate` samples."""
    config = copy.deepcopy(trainer.generation_config)
    config.update(output_scores=True, return_dict_in_generate=True, **changed)
    ids = torch.tensor([PROMPT])
    output = trainer.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output.scores[0][0].double().softmax(-1)


def p_value(counts, expected):
    """Of Pearson's chi-square test. Tokens that are expected less than 5 times count as one."""
    if counts[expected == 0].any():
        return 0.0
    rare = expected * ROWS < 5
    found = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    share = torch.cat([expected[~rare], expected[rare].sum()[None]]) * ROWS
    found, share = found[share > 0], share[share > 0]
    distance = ((found - share) ** 2 / share).sum()
    freedom = torch.tensor((len(share) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, distance / 2).item()


class TestDistribution:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"temperature": 0.5},
            {"top_k": 9},
            {"top_p": 0.6},
            {"min_p": 0.1},
            {"repetition_penalty": 3.0},
            # Cuts depend on penalties and the temperature, and top-p on top-k
            {"temperature": 1.5, "top_k": 40, "top_p": 0.85, "repetition_penalty": 2.0},
            {"temperature": 1.5, "min_p": 0.3, "repetition_penalty": 2.0},
            {"temperature": 0.7, "model_init_kwargs": {"dtype": "bfloat16"}},
        ],
        ids=lambda options: " ".join(options) or "none",
    )
    def test_is_that_of_generate(self, tiny_model, tmp_path, always, options):
        """And not the one without one of the options: the test has the power to tell them apart."""
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentTrainer, max_completion_length=1, **{"temperature": 1.0, **options}
        )  # fmt: skip
        head = trainer.model.get_output_embeddings()
        spread = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)) / 6
        head.weight = torch.nn.Parameter(spread.to(head.weight))
        counts = drawn(trainer)
        assert p_value(counts, probabilities(trainer)) > 0.01
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
        for name in neutral.keys() & options.keys():
            assert p_value(counts, probabilities(trainer, **{name: neutral[name]})) < 1e-6, name

    def test_warpers_act_in_the_order_of_generate(self):
        """After top-p, temperature would cut nothing; before it, three tokens are left."""
        scores = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log().expand(1000, -1)
        draws = torch.arange(1000, dtype=torch.float64)[:, None] / 1000
        chosen = draw(draws, scores, do_sample=True, temperature=0.5, top_p=0.9, top_k=4, min_p=0.05)
        weights = torch.tensor([0.25, 0.04, 0.0225, 0.0, 0.0])
        shares = torch.bincount(chosen[:, 0], minlength=5) / 1000
        assert torch.allclose(shares, weights / weights.sum(), atol=2e-3)

    def test_rounding_never_draws_what_is_impossible(self):
        """With sums a little above and below 1, the smallest and the largest number draw the first and the last possible token."""
        torch.manual_seed(0)
        scores = torch.randn(200, 5000) * torch.linspace(0, 20, 200)[:, None]
        scores[:, :7] = scores[:, -7:] = -torch.inf
        possible = scores.softmax(-1) > 0
        sums = scores.softmax(-1).cumsum(-1)[:, -1]
        assert (sums < 1).any() and (sums > 1).any()
        for number in (0.0, 2.0**-60, 1 - 2.0**-53):
            tokens = draw(torch.full((200, 1), number, dtype=torch.float64), scores)
            assert possible.gather(1, tokens).all()
        assert (draw(torch.zeros(200, 1, dtype=torch.float64), scores) == possible.int().argmax(1, keepdim=True)).all()

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_scores_that_are_no_numbers_are_refused(self, wrong):
        with pytest.raises(ValueError, match=r"scores of the next token contain NaN or infinity\. Check its weights"):
            draw(torch.rand(2, 1), torch.tensor([[0.0, 1.0, 2.0], [0.0, wrong, 1.0]]))


class TestWhere:
    @pytest.mark.parametrize(
        ("options", "vocab_size", "device", "replaced"),
        [
            ({}, 2000, "cpu", True),
            ({"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 1.0}, 2000, "cpu", True),
            ({}, 1000, "cpu", False),  # TRL's draws
            ({}, 2000, "cuda", False),
            ({"do_sample": False}, 2000, "cpu", False),
            ({"num_beams": 2}, 2000, "cpu", False),
            ({"do_sample": False, "num_beams": 2}, 2000, "cpu", False),
            ({"prompt_lookup_num_tokens": 2}, 2000, "cpu", False),
            ({"typical_p": 0.9}, 2000, "cpu", False),
            ({"epsilon_cutoff": 0.01}, 2000, "cpu", False),
            ({"watermarking_config": {}}, 2000, "cpu", False),
        ],
    )
    def test_multinomial_is_replaced(self, options, vocab_size, device, replaced):
        text = SimpleNamespace(vocab_size=vocab_size)
        config = SimpleNamespace(get_text_config=lambda: text)
        model = SimpleNamespace(device=torch.device(device), config=config)
        sampling = GenerationConfig(**{"do_sample": True, "max_new_tokens": 4, **options})
        state = torch.random.get_rng_state()
        given = fast_draws(model, sampling, 3)
        assert torch.equal(state, torch.random.get_rng_state()) is not replaced
        if replaced:
            assert given.draws.shape == (3, 4) and 0 <= given.draws.min() and given.draws.max() < 1
        else:
            assert given is None


class TestTraining:
    def test_a_team_draws_the_tokens_of_its_trainer(self, tiny_model, tmp_path, always, monkeypatch):
        trainer = teams.make(tiny_model, tmp_path, MultiAgentTrainer, temperature=0.9, top_k=50)
        monkeypatch.setattr(torch, "multinomial", None)
        rows = [Row(i, Slot("solver"), 0, "", ids) for i, ids in enumerate([[5, 6, 7], [8], [9, 10]])]
        config, replies = trainer.generation_config, []
        for generate in (lambda: trainer.team.generate(rows)[0], lambda: trainer.team._generate(rows)):
            torch.manual_seed(0)
            replies.append(generate())
        assert replies[0] == replies[1] != trainer.team.generate(rows)[0]
        assert trainer.generation_config is trainer.team.generation_config is config and config.do_sample
        assert config.watermarking_config is None

    def test_a_resumed_run_draws_on(self, tiny_model, tmp_path, always):
        def run(**resume):
            seen = []

            def reward(completions, **kwargs):
                seen.append(completions)
                return teams.letters(completions)

            trainer = teams.make(
                tiny_model, tmp_path, MultiAgentGRPOTrainer, reward, max_steps=4, save_strategy="steps", save_steps=2,
                workflow=teams.Pair(), learning_rate=1e-2,
            )  # fmt: skip
            trainer.train(**resume)
            return seen, teams.trainable(trainer)

        (whole, expected), (again, _) = run(), run()
        assert again == whole and len({repr(texts) for texts in whole}) == 4
        resumed, weights = run(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed == whole[2:]
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
