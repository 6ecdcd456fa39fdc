"""The studies `recipes/benchmarks/zero_shot.py` and `capacity.py`: their problems, workflows, rewards, a unit of each kind, their reports."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from marcog_trl.rollout.engine import replay


BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
TINY = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}


@pytest.fixture(scope="module")
def studies():
    """The modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # as if they were started
        yield {name: importlib.import_module(name) for name in ("role_task", "zero_shot", "capacity", "common")}


@pytest.fixture(scope="module")
def task(studies):
    return studies["role_task"]


@pytest.fixture(scope="module")
def model(task, tmp_path_factory):
    """The model of the studies, much smaller and hardly trained."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
    return task.chain_model(tmp_path_factory.mktemp("models"), steps=2, clean_steps=1, batch_size=4, **sizes)


def test_splits_share_no_sequence(task):
    found = {split: {tuple(row["steps"]) for row in task.make_problems(split, 2, 60)} for split in set(task.SPLITS)}
    assert not found["train"] & (found["test"] | found["validation"]) and not found["test"] & found["validation"]


def test_prompts(task):
    [problem] = task.make_problems("test", 3, 1)
    assert len(problem["prompt"].splitlines()) == len(problem["wanted"]) == 3
    [asked] = replay(task.Chain(3), problem, [])
    assert [messages[0]["content"].partition(".")[0] for messages in asked.values()] == [
        f"You write step {j}" for j in (1, 2, 3)
    ]
    [asked] = replay(task.SamePrompts(3), problem, [])
    assert len({messages[0]["content"] for messages in asked.values()}) == 1


def test_copies_write_further_steps(task):
    [problem] = task.make_problems("test", 3, 1)
    workflow = task.Chain(2, num_steps=3)
    first, second = replay(workflow, problem, [{"agent1": "", "agent2": ""}])
    assert [slot.agent for slot in (*first, *second)] == ["agent1", "agent2", "agent1"]
    assert "You write step 3." in second[workflow.slots[2]][0]["content"]


def test_reward_is_of_the_own_function(task):
    [problem] = task.make_problems("train", 2, 1)
    first, second = problem["wanted"]
    replies = [{"agent1": first, "agent2": second}, {"agent1": second, "agent2": first}]
    assert task.own_step(replies, [problem["wanted"]] * 2) == [{"agent1": 1, "agent2": 1}, {"agent1": 0, "agent2": 0}]


def test_meanings(task):
    agreed, own = (task.draw_meanings(kind, 8, seed=0) for kind in ("agree", "conflict"))
    for name in task.CHAIN_STEPS:
        assert len({agreed[j, name] for j in range(1, 9)}) == 1
    assert {len({own[j, name] for j in range(1, 9)}) for name in task.CHAIN_STEPS} == {2, 3}
    [problem] = task.make_problems("train", 2, 1, meanings=own)
    for j, name in enumerate(problem["steps"], 1):
        assert problem["wanted"][j - 1] == task.variants(problem, j)[own[j, name]]


def test_zero_shot(studies, model, tmp_path, monkeypatch):
    study = studies["zero_shot"]
    monkeypatch.setattr(study, "TEAM_SIZES", (2, 3))
    for name in ("untrained_roles", "latent_observation", "separate_same"):
        plan = study.CONDITIONS[name]
        plan = replace(plan, settings=plan.settings | TINY)
        result = study.run_unit(plan, 2, 0, model, 10, num_problems=2, num_samples=1, split="test", sizes=(2, 3))
        assert len(result["final"]) == 2 * 2 * 3 and {len(values) for values in result["final"].values()} == {2}
        assert len(result["rewards"]) == plan.trained
        path = studies["common"].result_path(tmp_path, f"2/{name}/0")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"unit": f"2/{name}/0", **result}))
    study.report(tmp_path)
    assert "| 2 | LoRA per agent, same prompt | 1 | 0.000" in (tmp_path / "report.md").read_text()
    chosen = {"seeds": [0, 1], "only": ["untrained_same", "shared_roles"]}
    asked = study.units(SimpleNamespace(**chosen, sizes=[2, 3, 6]))
    assert asked[:3] == ["2/untrained_same/0", "2/shared_roles/0", "3/shared_roles/0"] and len(asked) == 7
    assert study.units(SimpleNamespace(**chosen, sizes=[6])) == ["6/shared_roles/0", "6/shared_roles/1"]


def test_capacity(studies, model, tmp_path, monkeypatch):
    study = studies["capacity"]
    monkeypatch.setattr(studies["zero_shot"], "BATCH", TINY)
    for method in study.METHODS:
        result = study.run_unit("conflict", 2, 1, method, 0, model, 10, 2, 1, "test")
        path = studies["common"].result_path(tmp_path, f"conflict/2/1/{method}/0")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"unit": f"conflict/2/1/{method}/0", **result}))
    study.report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| conflict | 2 | 1 | 1 | 0.000 ± 0.000 |" in text and text.count("+0.000 ± 0.000") == 2
    assert (tmp_path / "capacity.png").stat().st_size > 10_000
