"""The programs in `recipes/examples/programs`: each trains as the same team does that is written as a workflow."""

import json
import shutil
from pathlib import Path

import pytest
from programs import EXAMPLES, same_training
from test_examples import FLAGS

from marcog_trl import Agent, Program, Workflow
from marcog_trl.cli.main import main
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.train import train
from marcog_trl.embedded import ROLES
from marcog_trl.workflows.from_file import load_function


NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def asked(text):
    return [{"role": "user", "content": text}]


class Both(Workflow):
    agents = (Agent("helper", "helper"), Agent("main", "main"))

    def play(self, problem):
        replies = yield {agent: asked(f"{role}\n\n{problem['prompt']}") for agent, role in ROLES.items()}
        return "\n\n".join(replies.values())


class Planned(Workflow):
    agents = (Agent("planner", "planner"), Agent("coder", "coder"))

    def play(self, problem):
        plan = yield {"planner": asked(f"{problem['prompt']}\n\nWrite a plan in a few short steps. No code.")}
        task = f"{problem['prompt']}\n\nA plan:\n{plan['planner']}\n\nWrite the function. Code only."
        return (yield {"coder": asked(task)})["coder"]


class Reviewed(Workflow):
    agents = (Agent("coder", "coder"), Agent("reviewer", "reviewer"))

    def play(self, problem):
        draft = yield {"coder": asked(f"{problem['prompt']}\n\nWrite the function. Code only.")}
        task = f"{problem['prompt']}\n\nThis may have a mistake:\n{draft['coder']}\n\nWrite the correct function. Code only."
        return (yield {"reviewer": asked(task)})["reviewer"].strip()


@pytest.mark.parametrize(
    ("workflow", "example"),
    [
        (Both(), "openai_async.py:solve"),
        (Planned(), "openai_sync.py:solve"),
        pytest.param(Reviewed(), "fetch.mjs", marks=NEEDS_NODE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trains_as_the_same_workflow(tiny_model, tmp_path, workflow, example):
    name = str(EXAMPLES / example)
    program = load_function(name) if ".py" in name else f"node {name}"
    agents = [agent.name for agent in workflow.agents]
    same_training(tiny_model, tmp_path, workflow, Program(program, agents, max_calls=1, stage_timeout=60))


@NEEDS_NODE
def test_a_command_from_training_to_solving(tiny_model, tmp_path, monkeypatch, capfd):
    """As a user does it: each command line takes the command, or trusts the one that is saved with the team."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "fetch.mjs", "my_agent.mjs")
    flags = [*FLAGS, "--model_name_or_path", tiny_model, "--output_dir", "team", "--workflow", "node my_agent.mjs"]
    train(RECIPES["magrpo"], [*flags, "--agents", "coder", "reviewer", "--max_calls", "1"])
    Path("my_agent.mjs").unlink()
    few = ["--dataset_test_split", "test[:1]", "--num_samples", "1", "--isolation", "best_effort"]
    with pytest.raises(SystemExit, match=r"^error: 'team' has its workflow in my_agent\.mjs"):
        main(["evaluate", "--team", "team", *few])
    assert main(["evaluate", "--team", "team", "--trust_remote_code", "--output", "e.json", *few]) == 0
    assert json.loads(Path("e.json").read_text())["settings"]["workflow"] == "Program"

    Path("problem.py").write_text("def f(x):\n    '''Double x.'''\n\n\nassert f(1) == 2\n")
    solve = ["solve", "--problem", "problem.py", "--isolation", "best_effort", "--trust_remote_code"]
    export = ["export", "--team", "team", "--output_dir", "exported", "--isolation", "best_effort"]
    assert main([*export, "--trust_remote_code"]) == 0
    assert main([*solve, "--team", "exported", "--messages"]) == 1  # random weights
    printed = capfd.readouterr().err
    assert all(f"--- {agent}, turn " in printed for agent in ("coder", "reviewer"))
