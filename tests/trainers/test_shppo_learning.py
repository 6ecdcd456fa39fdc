"""
Agents separate when, and only when, the reward asks for it.

Both agents are asked the same, and answer with one word. Their role texts, which only LatentNet sees, are all that
tells them apart. A model with a vocabulary of 32 words learns it in seconds.
"""

import pytest
import teams
import torch
from few_words import PROBLEMS, WORDS, base_model
from few_words import tokenizer as tokenizer  # a fixture

from marcog_trl import SHPPOTrainer
from marcog_trl.agents import Agent, Workflow


GENERATIONS = 32


class SameQuestion(Workflow):
    agents = (Agent("a", "w3 w4 w5"), Agent("b", "w6 w7 w8"))

    def play(self, problem):
        yield {"a": problem["prompt"], "b": problem["prompt"]}

    def solution(self, problem, replies):
        return f"{replies['a']} {replies['b']}"


def learn(tokenizer, path, apart=True, seed=0, max_steps=50, **options):
    """Two likely words of the base model, one of them wanted from each agent, or the same one from both."""
    model = base_model(path / "base")
    with torch.no_grad():
        logits = model(**tokenizer(PROBLEMS["prompt"][:1], return_tensors="pt")).logits[0, -1]
    likely = [WORDS[i] for i in logits.argsort(descending=True).tolist() if i > 1]
    wanted = {"a": likely[2], "b": likely[3] if apart else likely[2]}

    def reward(replies, **kwargs):
        return [{agent: float(reply[agent] == word) for agent, word in wanted.items()} for reply in replies]

    trainer = teams.make(
        model,
        path,
        SHPPOTrainer,
        reward=reward,
        data=PROBLEMS,
        workflow=SameQuestion(),
        processing_class=tokenizer,
        lora={"init_lora_weights": True, "r": 8, "lora_alpha": 16},
        num_generations=GENERATIONS,
        num_generations_eval=GENERATIONS,
        per_device_train_batch_size=2 * GENERATIONS,
        max_completion_length=1,
        max_steps=max_steps,
        learning_rate=5e-3,
        entropy_coef=0.3,
        max_grad_norm=1.0,
        seed=seed,
        **options,
    )
    trainer.train()
    return trainer


def success(trainer):
    """Share of right words per agent, over the last ten steps."""
    return [sum(teams.logged(trainer, f"agents/{agent}/reward")[-10:]) / 10 for agent in "ab"]


def evaluated(trainer):
    metrics = trainer.evaluate(PROBLEMS)
    return [metrics[f"eval_agents/{agent}/reward"] for agent in "ab"]


def give_roles(trainer, role_ids):
    trainer.team._contexts._role_ids = role_ids
    for name in ("_role_embeddings", "role_observations"):
        vars(trainer.team._contexts).pop(name, None)  # what was seen of the roles of before


SCOPES = {"observation": {}, "agent": {"latent_scope": "agent"}}


class TestSeparation:
    @pytest.fixture(scope="class", params=SCOPES)
    def apart(self, request, tokenizer, tmp_path_factory):
        return learn(tokenizer, tmp_path_factory.mktemp("apart"), **SCOPES[request.param])

    def test_agents_with_latents_learn_what_each_is_asked_for(self, apart):
        assert min(success(apart)) > 0.85
        assert min(evaluated(apart)) > 0.85  # with the mean latents
        assert teams.logged(apart, "latent/behaviour_distance")[-1] > 0.9

    def test_the_latents_make_the_difference(self, apart):
        """On the trained team: with roles exchanged every agent does the other's work; without cores both do the same."""
        roles, decoder = apart.team._contexts._role_ids, apart.modules.core_decoder
        give_roles(apart, roles[::-1])
        assert max(evaluated(apart)) < 0.15
        give_roles(apart, roles)
        trained = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
        for parameter in decoder.parameters():
            torch.nn.init.zeros_(parameter)
        assert sum(evaluated(apart)) < 1.2
        decoder.load_state_dict(trained)
        assert min(evaluated(apart)) > 0.85

    def test_one_policy_for_all_cannot(self, tokenizer, tmp_path):
        trainer = learn(tokenizer, tmp_path, parameter_sharing="shared")
        # It answers both alike: the shares of the two words add up to 1 at most
        assert sum(success(trainer)) < 1.15

    def test_agents_that_are_asked_for_the_same_stay_together(self, tokenizer, tmp_path):
        trainer = learn(tokenizer, tmp_path, apart=False)
        assert min(success(trainer)) > 0.85
        assert teams.logged(trainer, "latent/behaviour_distance")[-1] < 0.1
        assert teams.logged(trainer, "latent/distance")[-1] > 0.3  # although their latents differ
