"""An expert between turns, in training: asked over HTTP, and missed without stopping the run."""

import warnings

import pytest
import teams
from chat_server import completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture

from marcog_trl import MultiAgentGRPOTrainer


@pytest.mark.parametrize("turn_tree", [False, True])
def test_a_server_that_dies_costs_its_feedback_only(tiny_model, tmp_path, endpoint, turn_tree):
    def four_times(text, attempt):
        dead = len(endpoint.seen) > 4
        return (503, "", {"retry-after-ms": "1"}) if dead else (200, completion("Name it."), {})

    # One problem, two episodes, two agents: four questions a step, whether nodes branch afterwards or not
    endpoint.answer = four_times
    columns = {"test": [["assert f(1)"]] * 2, "test_format": ["asserts"] * 2, "entry_point": ["f"] * 2}
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow="collaboration", num_turns=2, feedback="expert_edits",
        expert={"model": "any", "base_url": endpoint.url}, data=teams.dataset(2, **columns), max_steps=3,
        per_device_train_batch_size=12 if turn_tree else 8, isolation="best_effort", num_workers=1, turn_tree=turn_tree,
    )  # fmt: skip
    calls = teams.script(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    trainer.executor.close()
    assert teams.logged(trainer, "feedback/failed") == [0.0, 1.0, 1.0]
    told = [[trainer._tokenizer.decode(prompt) for prompt in prompts] for prompts, _ in calls]
    assert len(told) == 6
    assert all("Name it.\nRevise your answer." in prompt for prompt in told[1])
    for later in (*told[3], *told[5]):
        assert "Revise your answer." in later and "Name it." not in later
    assert len([w for w in caught if endpoint.url in str(w.message)]) == 1
