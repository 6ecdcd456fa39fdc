"""Agents with one prompt, and the visible tests that choose."""

import itertools

import pytest
import teams
from players import PROBLEM, play

from marcog_trl import (
    MultiAgentGRPOTrainer,
    MultiAgentPPOTrainer,
    SHPPOTrainer,
    Team,
    TeamSettings,
    evaluate_team,
    load_problems,
)
from marcog_trl.execution import TestResult, Verdict
from marcog_trl.workflows import Coverage, Single, make_workflow


def verdict(*passed):
    results = tuple(TestResult("passed" if each else "failed") for each in passed)
    return Verdict("passed" if all(passed) else "failed", sum(passed), len(passed), results)


def test_all_agents_read_the_prompt_of_one_agent():
    class Never:
        def run(self, jobs):
            return [verdict(True, False) for _ in jobs]

    replies = {name: ["x"] for name in ("solver", "solver2", "solver3")}
    [stage] = play(Coverage(3), replies, Never())
    [[prompt]] = [stage.values() for stage in play(Single(), {"solver": ["x"]})]
    assert list(stage.values()) == [prompt] * 3
    chat = {**PROBLEM, "prompt": [{"role": "user", "content": "Write total."}]}
    [stage] = play(Coverage(2), replies, Never(), chat)
    assert list(stage.values()) == [chat["prompt"]] * 2


def test_the_visible_tests_choose_and_no_agent_comes_first():
    workflow, verdicts = (
        Coverage(2, visible_tests=2),
        {"solver": verdict(True, False, True), "solver2": verdict(True, True, False)},
    )
    assert workflow.chosen({"solver": "a", "solver2": "b"}, verdicts) == "solver2"
    even = {"solver": verdict(True, True, False), "solver2": verdict(True, True, True)}
    texts = [chr(ord("a") + i) for i in range(20)]
    first = [workflow.chosen({"solver": one, "solver2": other}, even) for one, other in itertools.pairwise(texts)]
    turned = [workflow.chosen({"solver": other, "solver2": one}, even) for one, other in itertools.pairwise(texts)]
    assert {*first} == {"solver", "solver2"}
    assert all(one != other for one, other in zip(first, turned, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_agents": 1}, "num_agents=1 must be at least 2"),
        ({"visible_tests": 0}, "visible_tests=0 must be at least 1"),
        ({"visible_tests": None}, "visible_tests=None"),
        ({"num_turns": 2}, "num_turns=2 is not an option of workflow='coverage'"),
    ],
)
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make_workflow("coverage", **options)
    if "num_agents" not in options:
        with pytest.raises(ValueError, match=message):
            TeamSettings(workflow="coverage", **options).make_workflow()


def make(model, path, trainer=MultiAgentGRPOTrainer, data=None, reward="coverage_reward", **options):
    data = load_problems("builtin", "train[:4]") if data is None else data
    defaults = {"workflow": "coverage", "num_agents": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
    return teams.make(model, path, trainer, reward=reward, data=data, **{**defaults, **options})


def test_problems_without_hidden_tests_are_refused_before_training(tiny_model, tmp_path):
    data = load_problems("builtin", "train[:4]")
    data = data.map(lambda row: {"test": row["test"][:2]})
    with pytest.raises(ValueError, match="visible_tests=2 shows all of its 2 tests"):
        make(tiny_model, tmp_path, data=data, visible_tests=2)
    with pytest.raises(ValueError, match="has no column 'test'"):
        make(tiny_model, tmp_path, data=teams.dataset())
    with pytest.raises(ValueError, match="Set workflow='coverage'"):
        make(tiny_model, tmp_path, workflow="collaboration", num_agents=None)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiAgentGRPOTrainer, {"joint_mode": "cross", "advantage": "none"}),
        (MultiAgentGRPOTrainer, {"credit": "counterfactual"}),
        (MultiAgentPPOTrainer, {}),
        (SHPPOTrainer, {"parameter_sharing": "separate"}),
        (SHPPOTrainer, {"latent_scope": "agent"}),
    ],
    ids=str,
)
def test_it_trains_with_every_credit_and_is_saved(tiny_model, tmp_path, trainer, options):
    trained = make(tiny_model, tmp_path, trainer, visible_tests=2, **options)
    trained.train()
    assert teams.logged(trained, "coverage_reward/alike")
    trained.save_model()
    team = Team.from_pretrained(tmp_path)
    assert isinstance(team.workflow, Coverage) and team.workflow.visible_tests == 2
    problem = load_problems("builtin", "test[:1]")[0]
    assert team.solve(problem["prompt"] + "\n" + problem["test"][0]).verdict.total == 1
    found = evaluate_team(team, load_problems("builtin", "test[:2]"), num_samples=2)
    assert {"coverage_reward/any", "coverage_reward/selected"} <= {name.removeprefix("logged/") for name in found}


def test_agents_with_one_role_text_have_latents_of_their_own(tiny_model, tmp_path):
    trained = make(tiny_model, tmp_path, SHPPOTrainer, latent_scope="agent")
    one, other = trained.team.role_observations
    assert (one - other).abs().max() > 0.1
