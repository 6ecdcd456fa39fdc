"""Agents behind endpoints in training: they speak, they cost, they fail, and nothing is learned from their tokens."""

import json
import warnings

import pytest
import teams
import torch
from chat_server import KEY, completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture

from marcog_trl import Agent, Endpoint, MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.endpoints import EndpointError


class Advised(teams.Pair):
    """Agent a writes, b, which may be behind an endpoint, answers, and a writes again where the prompt asks for it."""

    def __init__(self, url=None, **options):
        outside = None if url is None else Endpoint("big", url, timeout=5.0, **options)
        self.agents = (Agent("a", "You are a."), Agent("b", "You are b.", outside))
        self.num_turns = 2

    def play(self, problem):
        replies = yield {"b": f"{problem['prompt']} b0"}
        yield {"a": f"{problem['prompt']} a {replies['b']}"}
        yield {"a": f"{problem['prompt']} a1", "b": f"{problem['prompt']} b1"}

    def solution(self, problem, replies):
        return replies["a"]


def told(text, attempt):
    return 200, completion(f"advice on {text}", prompt_tokens=10, completion_tokens=4), {}


def make(model, path, endpoint, trainer=MultiAgentGRPOTrainer, workflow=None, **options):
    endpoint.answer = options.pop("answer", told)
    watch = teams.Watch()
    workflow = workflow or Advised(endpoint.url)
    trainer = teams.make(model, path, trainer, workflow=workflow, callbacks=[watch], **options)
    return trainer, watch, teams.script(trainer)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiAgentGRPOTrainer, {}),
        (MultiAgentGRPOTrainer, {"turn_tree": True, "per_device_train_batch_size": 12}),
        (MultiAgentPPOTrainer, {}),
        (SHPPOTrainer, {"policy_gradient_to_latent": True}),
        (SHPPOTrainer, {"latent_scope": "agent"}),
        (SHPPOTrainer, {"parameter_sharing": "separate"}),
    ],
    ids=str,
)
def test_an_agent_behind_an_endpoint_speaks_and_is_not_trained(tiny_model, tmp_path, endpoint, trainer, options):
    trainer, watch, calls = make(tiny_model, tmp_path, endpoint, trainer, **options)
    trainer.train()
    told_to_model = {trainer._tokenizer.decode(ids) for prompts, _ in calls for ids in prompts}
    assert told_to_model == {"def f0(x): a advice on def f0(x): b0", "def f0(x): a1"}
    assert {body["model"] for _, _, body in endpoint.requests} == {"big"}
    [gradients] = watch.gradients
    assert sum(gradient.abs().sum() for gradient in gradients.values()) > 0
    assert trainer.trained_agents == ["a"]
    assert teams.logged(trainer, "agents/b/reward") and teams.logged(trainer, "agents/b/prompt_tokens") == [10]


def test_the_gradient_is_that_of_a_team_in_which_it_is_silent(tiny_model, tmp_path, endpoint):
    class Silent(Advised):
        def play(self, problem):
            yield {"a": f"{problem['prompt']} a advice on {problem['prompt']} b0"}
            yield {"a": f"{problem['prompt']} a1"}

    gradients = []
    for name, workflow in (("outside", Advised(endpoint.url)), ("silent", Silent())):
        trainer, watch, _ = make(
            tiny_model, tmp_path / name, endpoint, workflow=workflow, scale_rewards="batch", beta=0.1
        )
        trainer.train()
        gradients += watch.gradients
    ours, theirs = gradients
    assert sum(gradient.abs().sum() for gradient in theirs.values()) > 0
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6)


def test_cost_is_logged_and_replies_are_recorded(tiny_model, tmp_path, endpoint):
    trainer, _, _ = make(
        tiny_model, tmp_path, endpoint, answer=lambda text, attempt: (
            200, completion(text, "length" if "f0" in text else "stop", prompt_tokens=len(text), completion_tokens=7), {}
        ),
    )  # fmt: skip
    episodes = []
    teams.change_credit(trainer, lambda batch, credit: episodes.extend(batch.episodes))
    trainer.train()
    # One problem with two episodes and two turns: equal questions are sent once at temperature 0
    assert sorted(endpoint.seen) == ["def f0(x): b0", "def f0(x): b1"]
    assert teams.logged(trainer, "agents/b/requests") == [2]
    assert teams.logged(trainer, "agents/b/prompt_tokens") == [13]
    assert teams.logged(trainer, "agents/b/completion_length") == [7]
    assert teams.logged(trainer, "agents/b/clipped_ratio") == [1]
    assert teams.logged(trainer, "agents/b/failed") == [0]
    assert teams.logged(trainer, "agents/b/seconds")[0] > 0
    assert [episode.responses[0] for episode in episodes] == [{"b": "def f0(x): b0"}] * 2
    shown = dict(zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True))
    assert shown["def f0(x): b1"] == "def f0(x): b1"


def test_siblings_have_replies_of_their_own_if_it_samples(tiny_model, tmp_path, endpoint):
    workflow = Advised(endpoint.url, temperature=0.7)
    trainer, _, _ = make(tiny_model, tmp_path, endpoint, workflow=workflow)
    trainer.train()
    assert sorted(endpoint.seen) == ["def f0(x): b0"] * 2 + ["def f0(x): b1"] * 2
    assert {body["temperature"] for _, _, body in endpoint.requests} == {0.7}


# Failures


def refuse_second_problem(text, attempt):
    return (401, json.dumps({"error": f"no access with {KEY}"}), {}) if "f1" in text else told(text, attempt)


def test_a_failure_is_an_error(tiny_model, tmp_path, endpoint):
    trainer, _, _ = make(tiny_model, tmp_path, endpoint, answer=refuse_second_problem, per_device_train_batch_size=16)
    with pytest.raises(
        EndpointError, match=r"The endpoint of agent 'b' \(model='big', base_url='http.*did not answer 2 of 4"
    ) as caught:
        trainer.train()
    assert "on_reward_error='mask'" in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize("trainer", [MultiAgentGRPOTrainer, SHPPOTrainer])
def test_a_failure_masks_its_episodes(tiny_model, tmp_path, endpoint, trainer):
    trainer, _, _ = make(
        tiny_model, tmp_path, endpoint, trainer, answer=refuse_second_problem, on_reward_error="mask",
        per_device_train_batch_size=16, max_steps=2,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = teams.generation_batch(trainer)
        trainer.train()
    live = batch["tool_mask"].any(1)
    assert live.sum() == 4  # of two problems, one is masked
    said = [str(w.message) for w in caught if "endpoint of agent 'b'" in str(w.message)]
    assert len(said) == 1 and "agents/b/failed" in said[0] and KEY not in said[0]
    assert teams.logged(trainer, "agents/b/failed") == [0.5, 0.0]
    assert teams.logged(trainer, "episodes/masked") == [0.5, 0.0]


def test_a_process_whose_episodes_have_no_reply_of_the_model(tiny_model, tmp_path, endpoint):
    class Outside(Advised):
        def play(self, problem):
            replies = yield {"b": problem["prompt"]}
            if "f1" in problem["prompt"]:
                yield {"a": f"{problem['prompt']} a1"}
            return replies["b"]

    for name, trainer_class in (("shppo", SHPPOTrainer), ("ppo", MultiAgentPPOTrainer)):
        trainer, _, calls = make(
            tiny_model, tmp_path / name, endpoint, trainer_class, workflow=Outside(endpoint.url), max_steps=2
        )
        trainer.train()
        assert len(calls) == 1  # the first batch has nothing for the model to write


# Before training
