"""Of the model's own `generation_config`, only the ids of tokens count: the loss knows of nothing else."""

import pytest
import teams
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from marcog_trl import Team
from marcog_trl.trainers import MultiAgentGRPOTrainer


OWN = {
    "num_beams": 2, "do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "typical_p": 0.2,
    "repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "suppress_tokens": list(range(20, 300)), "begin_suppress_tokens": [5],
    "forced_bos_token_id": 7, "forced_eos_token_id": 1, "min_new_tokens": 3, "epsilon_cutoff": 0.3, "penalty_alpha": 0.6,
    "bad_words_ids": [[6]], "sequence_bias": {(8,): 9.0}, "num_return_sequences": 2, "top_h": 0.5, "guidance_scale": 3.0,
}  # fmt: skip


WORDS = [320, 2000]  # with more than 1,024 words, replies are drawn in another way


def load(path, words, folder):
    """A model of so many words, which is saved in a folder, and its tokenizer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model.resize_token_embeddings(words)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


def replies(trainer, **options):
    torch.manual_seed(0)
    with trainer.team.evaluating():
        rows = [row for episode in trainer.team.play([{"prompt": "def f(x):"}] * 6, **options) for row in episode.rows]
    return [row.completion_ids for row in rows]


@pytest.mark.parametrize(
    ("words", "name"), [*((320, name) for name in OWN), (320, "all"), (2000, "num_beams"), (2000, "all")]
)
def test_nothing_else_changes_replies(tiny_model, tmp_path, words, name):
    model, tokenizer = load(tiny_model, words, tmp_path / "base")
    trainer = teams.make(model, tmp_path, MultiAgentGRPOTrainer, processing_class=tokenizer)
    expected = replies(trainer)
    own = OWN if name == "all" else {name: OWN[name], "do_sample": True}
    model.generation_config.update(**own)
    assert replies(trainer) == expected and len({repr(reply) for reply in expected}) > 1
    with trainer.team.greedy():
        assert len({repr(reply) for reply in replies(trainer)}) == 1
    assert all(getattr(model.generation_config, key) == value for key, value in own.items())


@pytest.mark.parametrize("words", WORDS)
def test_a_training_and_a_saved_team(tiny_model, tmp_path, words):
    base = tmp_path / "base"
    model, _ = load(tiny_model, words, base)
    model.generation_config.update(num_beams=2, suppress_tokens=[5, 6], eos_token_id=[1, 9])
    model.generation_config.save_pretrained(base)
    trainer = teams.make(str(base), tmp_path / "run", MultiAgentGRPOTrainer, max_steps=2)
    trainer.train()
    trainer.save_model()
    team = Team.from_pretrained(tmp_path / "run")
    assert team.eos_token_ids == [1, 9]
    seen = []
    generate = team.model.get_base_model().generate
    team.model.get_base_model().generate = lambda **options: (
        seen.append(team.model.get_base_model().generation_config.to_diff_dict()) or generate(**options)
    )
    team.solve("def f(x):\n", greedy=False)
    assert seen and not {"num_beams", "suppress_tokens"} & seen[0].keys() and seen[0]["eos_token_id"] == [1, 9]
