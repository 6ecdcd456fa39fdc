"""Programs written with frameworks for agents, trained as they are."""

import pytest
import teams
from programs import EXAMPLES, same_training
from tool_model import CHATS, call, recite_texts

from marcog_trl import Agent, MultiAgentGRPOTrainer, Program, Slot, Workflow
from marcog_trl.workflows.from_file import load_function


class Graph(Workflow):
    """What the graph of the example does."""

    agents = (Agent("planner", "planner"), Agent("coder", "coder"), Agent("tester", "tester"))
    slots = tuple(Slot(name, act=act) for name in ("planner", "coder", "tester") for act in range(2))
    tasks = {
        "planner": "Write a plan in a few short steps. No code.",
        "coder": "Write the function. Code only.",
        "tester": "Is the code right? Answer YES, or say what is wrong.",
    }

    def play(self, problem):
        state = {}
        for agent in ("planner", "coder", "tester", "coder", "tester"):
            said = [f"{name}:\n{state[name]}" for name in self.tasks if name in state]
            content = "\n\n".join([problem["prompt"], *said, self.tasks[agent]])
            state |= yield {agent: [{"role": "user", "content": content}]}
            if agent == "tester" and "YES" in state["tester"]:
                break
        return state["coder"]


def test_a_graph_with_a_loop_trains_as_the_same_workflow(tiny_model, tmp_path):
    solve = load_function(f"{EXAMPLES}/langgraph_loop.py:solve")
    program = Program(solve, ["planner", "coder", "tester"], max_calls=2, stage_timeout=60)
    same_training(tiny_model, tmp_path, Graph(), program, per_device_train_batch_size=12)


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_handoff_is_a_call_of_a_tool(tool_model, tmp_path, hands_over):
    solve = load_function(f"{EXAMPLES}/agents_sdk.py:solve")
    trainer = teams.make(
        tool_model, tmp_path, MultiAgentGRPOTrainer, workflow=Program(solve, ["planner", "coder"], max_calls=1),
        data=CHATS.map(lambda row: {"prompt": row["prompt"][0]["content"]}), max_completion_length=200,
        per_device_train_batch_size=4, reward=lambda completions, **kwargs: [float(len(text)) for text in completions],
    )  # fmt: skip
    hand_over, answer = call(name="transfer_to_coder"), "def f(): pass<|im_end|>"
    calls = [[hand_over, hand_over], [answer, "pass<|im_end|>"]] if hands_over else [[answer, "pass<|im_end|>"]]
    asked = recite_texts(trainer, *calls)
    batch = teams.generation_batch(trainer)
    assert "transfer_to_coder" in asked[0][0] and "Hand the problem over" in asked[0][0]
    assert len(asked) == len(calls) and batch["advantages"].abs().sum() > 0
    if hands_over:
        assert "Write the function. Code only." in asked[1][0] and "<tool_response>" in asked[1][0]
