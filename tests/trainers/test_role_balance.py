"""An agent that writes ten times more than another neither drowns it nor is drowned."""

import pytest
import teams
import torch
from few_words import PROBLEMS, WORDS, base_model
from few_words import tokenizer as tokenizer  # a fixture

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer
from marcog_trl.agents import Agent, Workflow


LENGTHS = {"long": 10, "short": 1}
GENERATIONS = 32
TRAINERS = {MultiAgentPPOTrainer: {}, MultiAgentGRPOTrainer: {"scale_rewards": "agent"}}


class Unequal(Workflow):
    agents = (Agent("long", "w3"), Agent("short", "w6"))

    def play(self, problem):
        yield {agent.name: f"{problem['prompt']} {agent.role}" for agent in self.agents}

    def solution(self, problem, replies):
        return f"{replies['long']} {replies['short']}"


def learn(trainer_class, tokenizer, path, max_steps, **options):
    """
    Each agent earns the share of its words that are the one wanted from it, the third likeliest of the base model; `LENGTHS`
    says how many it writes.
    """
    model, [opening] = base_model(), Unequal().play(PROBLEMS[0])
    with torch.no_grad():
        logits = {
            agent: model(**tokenizer(text, return_tensors="pt")).logits[0, -1] for agent, text in opening.items()
        }
    wanted = {agent: WORDS[2 + of_words[2:].argsort(descending=True)[2]] for agent, of_words in logits.items()}

    def reward(replies, **kwargs):
        return [
            {agent: reply[agent].split().count(word) / LENGTHS[agent] for agent, word in wanted.items()}
            for reply in replies
        ]

    trainer = teams.make(
        model,
        path,
        trainer_class,
        reward=reward,
        data=PROBLEMS,
        workflow=Unequal(),
        processing_class=tokenizer,
        lora={"init_lora_weights": True, "r": 8, "lora_alpha": 16},
        num_generations=GENERATIONS,
        per_device_train_batch_size=2 * GENERATIONS,
        max_completion_length=LENGTHS["long"],
        generation_kwargs={"suppress_tokens": tokenizer.all_special_ids},
        max_steps=max_steps,
        learning_rate=2e-3,
        max_grad_norm=1.0,
        **TRAINERS[trainer_class],
        **options,
    )
    generate = trainer._generate_single_turn
    [short] = tokenizer("w6")["input_ids"]

    def of_unequal_length(prompt_ids, *rest):
        completion_ids, logprobs = generate(prompt_ids, *rest)
        pairs = zip(prompt_ids, completion_ids, strict=True)
        return [ids[: LENGTHS["short" if prompt[-1] == short else "long"]] for prompt, ids in pairs], logprobs

    trainer._generate_single_turn = of_unequal_length
    trainer.train()
    assert [teams.logged(trainer, f"agents/{agent}/completion_length")[0] for agent in LENGTHS] == [10, 1]
    return trainer


def shares(trainer):
    """Mean share of the gradient of the agent that writes little, over the first steps."""
    own = [teams.logged(trainer, f"agents/{agent}/gradient_share") for agent in LENGTHS]
    assert [sum(pair) for pair in zip(*own, strict=True)] == pytest.approx([1.0] * len(own[0]))
    return sum(own[1][:3]) / 3


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_both_learn_though_one_writes_ten_times_more(trainer_class, tokenizer, tmp_path):
    trainer = learn(trainer_class, tokenizer, tmp_path, max_steps=60)
    for agent in LENGTHS:
        rewards = teams.logged(trainer, f"agents/{agent}/reward")
        assert rewards[0] < 0.3
        assert sum(rewards[-5:]) / 5 > 0.8, agent


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_by_agents_the_gradient_is_that_of_both(trainer_class, tokenizer, tmp_path):
    assert 0.3 < shares(learn(trainer_class, tokenizer, tmp_path, max_steps=3)) < 0.7


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_by_tokens_the_gradient_is_that_of_who_writes_most(trainer_class, tokenizer, tmp_path):
    trainer = learn(trainer_class, tokenizer, tmp_path, max_steps=3, agent_loss_weighting="token")
    assert shares(trainer) < 0.2


def test_shares_do_not_depend_on_how_rows_are_split(tiny_model, tmp_path):
    """One batch of eight rows, or eight of one."""

    def run(batch_size):
        trainer = teams.make(
            tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=teams.Pair(), max_steps=2,
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size,
            steps_per_generation=8 // batch_size,
        )  # fmt: skip
        teams.script(trainer)
        trainer.train()
        return teams.logged(trainer, "agents/a/gradient_share")

    assert run(8) == pytest.approx(run(1), rel=1e-4)
