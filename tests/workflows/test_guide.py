"""The code in the guide of `marcog_trl/workflows`."""

import pytest
from chat_server import completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture
from guides import code_of
from teams import dataset, make, script

from marcog_trl import MultiAgentGRPOTrainer


@pytest.fixture(scope="module")
def names():
    names = {}
    exec(code_of("marcog_trl/workflows/README.md"), names)
    return names


@pytest.mark.parametrize("name", ["Review", "Retry"])
def test_workflows_train(names, name, tiny_model, tmp_path):
    data = dataset(4, test=[["assert f(1) == 2"]] * 4, test_format=["asserts"] * 4, entry_point=["f"] * 4)
    trainer = make(tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=names[name](), data=data, max_steps=1)
    script(trainer)
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_agent_behind_an_endpoint_advises(names, tiny_model, tmp_path, endpoint):
    endpoint.answer = lambda text, attempt: (200, completion(f"Plan for: {text}"), {})
    there = {"planner": {"model": "big", "base_url": endpoint.url}}  # nobody answers where the guide asks
    trainer = make(tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=names["Advised"](), endpoints=there)
    calls = script(trainer)
    trainer.train()
    [(prompts, _)] = calls
    assert all("Plan for: Write a plan in a few" in trainer._tokenizer.decode(ids) for ids in prompts)


def test_feedback_is_what_agents_are_told(names):
    workflow = names["workflow"]
    assert workflow.num_turns == 2
    assert workflow.feedback({}, "main", "x = 1", "Tests: 0 of 1 passed").startswith("Your answer has 5 characters")


def test_the_program_trains_as_it_is(names, tiny_model, tmp_path):
    workflow = names["Program"](names["solve"], agents=["planner", "coder"], max_calls=1)
    trainer = make(tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow=workflow)
    script(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["program/failed"] == 0
