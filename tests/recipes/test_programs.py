"""The programs in `recipes/examples/programs`: each trains as the same team does that is written as a workflow."""

import shutil

import pytest
from programs import EXAMPLES, same_training

from marcog_trl import Agent, Program, Workflow
from marcog_trl.embedded import ROLES
from marcog_trl.workflows.from_file import load_function


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
        pytest.param(
            Reviewed(), "fetch.mjs", marks=pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trains_as_the_same_workflow(tiny_model, tmp_path, workflow, example):
    name = str(EXAMPLES / example)
    program = load_function(name) if ".py" in name else f"node {name}"
    agents = [agent.name for agent in workflow.agents]
    same_training(tiny_model, tmp_path, workflow, Program(program, agents, max_calls=1, stage_timeout=60))
