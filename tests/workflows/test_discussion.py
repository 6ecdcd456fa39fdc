"""Agents propose, read each other, and revise."""

import pytest
from players import last, play

from marcog_trl.agents import Slot
from marcog_trl.workflows import Discussion


PROBLEM = {"prompt": "def total(xs):\n    '''Add up.'''\n", "entry_point": "total", "test": ["assert total([]) == 0"]}
ONE, SAME, OTHER = (
    "def total(xs):\n    return sum(xs)",
    "def total(xs):  # adds\n\n    return sum(xs)",
    "def total(xs):\n    return 0",
)
LONG = (
    "def total(xs):\n    if not xs:\n        return 0\n"
    + "    elif xs[0] == 1:\n        return 2\n" * 600
    + "    return 3"
)


def test_everybody_revises_after_reading_the_others_but_not_itself():
    replies = {"solver": [ONE, ONE], "solver2": [OTHER, OTHER], "solver3": [SAME, SAME]}
    first, second = play(Discussion(3), replies, problem=PROBLEM)
    assert set(first) == set(second) == {"solver", "solver2", "solver3"}
    told = last(second["solver2"])
    assert ONE in told and SAME in told and OTHER not in told
    assert second["solver2"][-2] == {"role": "assistant", "content": OTHER}
    assert told.endswith("Revise your answer. Answer with one Python code block.")


def test_slots_are_two_replies_of_each_agent_and_turn():
    slots = Discussion(2, num_turns=2).slots
    assert slots[:4] == (Slot("solver"), Slot("solver2"), Slot("solver", 0, 1), Slot("solver2", 0, 1))
    assert [slot.turn for slot in slots] == [0] * 4 + [1] * 4


def test_the_next_turn_follows_the_revision():
    replies = {"solver": [ONE, OTHER] * 2, "solver2": [OTHER, OTHER] * 2}
    stages = play(Discussion(2, num_turns=2, feedback="plain"), replies, problem=PROBLEM)
    assert len(stages) == 4
    assert [message["content"] for message in stages[2]["solver"] if message["role"] == "assistant"] == [ONE, OTHER]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([OTHER, ONE, SAME], ONE),  # two of three wrote the same program
        ([OTHER, ONE], OTHER),  # a tie: the first
        (["No idea.", ONE], ONE),
        (["No idea.", "Me neither."], ""),
        ([OTHER, LONG, f"# The same.\n{LONG}"], LONG),  # deeper than ast.dump could follow
        (["total = {**a, b: c}", "total = {b: a, **c}", "total = {b:a, **c}"], "total = {b: a, **c}"),
        (
            ["def total():\n    global a", "def total():\n    global b", "def total(): global b"],
            "def total():\n    global b",
        ),
    ],
)
def test_the_solution_is_what_most_agents_end_with(replies, expected):
    workflow = Discussion(len(replies))
    named = dict(zip((agent.name for agent in workflow.agents), replies, strict=True))
    assert workflow.solution(PROBLEM, named) == expected


def test_the_last_block_is_what_an_agent_ends_with_where_no_function_is_named():
    right, wrong = "print(2 * int(input()))", "n = int(input())\nprint(n + 1)"
    replies = {"solver": f"```\n{wrong}\n```\nNo:\n```\n{right}\n```", "solver2": right}
    assert Discussion().solution({"prompt": "Double.", "entry_point": ""}, replies) == right


def test_one_agent_has_nobody_to_discuss_with():
    with pytest.raises(ValueError, match=r"num_agents=1 must be at least 2\. Set num_agents=2"):
        Discussion(1)
