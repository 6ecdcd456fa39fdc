"""A model with learned positions reads a padded prompt as it reads the prompt alone."""

import teams
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from marcog_trl.agents import Slot
from marcog_trl.rollout.records import Row


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]


def make(tiny_model, path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=len(tokenizer), initializer_range=0.3, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return teams.make(
        AutoModelForCausalLM.from_config(config),
        path,
        processing_class=tokenizer,
        workflow=teams.Pair(("a", "longer name")),
    )


def rows_of(*prompts):
    return [Row(i, Slot("a"), 0, "", list(ids)) for i, ids in enumerate(prompts)]


def test_states_of_prompts_do_not_depend_on_others(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    generate = trainer.team.engine_functions(prompt_states=True)["generate"]
    together, alone = rows_of(*PROMPTS), rows_of(PROMPTS[0])
    generate(together)
    generate(alone)
    torch.testing.assert_close(together[0].prompt_state, alone[0].prompt_state, rtol=1e-4, atol=1e-5)


def test_values_of_generation_are_those_of_a_forward_pass(tiny_model, tmp_path):
    """So is the policy that an update begins with the one that was sampled."""
    old = []
    for known in (True, False):
        trainer = make(tiny_model, tmp_path)
        teams.randomize(trainer.modules)
        begin = trainer.algorithm.begin_rollout
        trainer.algorithm.begin_rollout = lambda *args, begin=begin, known=known: (
            begin(*args) | {"token_states": known}
        )
        torch.manual_seed(3)
        batch = teams.generation_batch(trainer)
        old.append(batch["old_values"][batch["completion_mask"].bool()])
    assert len(set(batch["prompt_mask"].sum(1).tolist())) > 1 and old[1].std() > 1e-3
    torch.testing.assert_close(*old, rtol=0, atol=2e-5)
