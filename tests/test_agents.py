"""Workflows are declared rightly, or refused."""

import pytest

from marcog_trl.agents import Agent, Slot, Workflow


class Duet(Workflow):
    agents = (Agent("a", "Write."), Agent("b", "Write."))

    def play(self, problem):
        yield {agent.name: problem["prompt"] for agent in self.agents}

    def solution(self, problem, replies):
        return replies["b"]


def test_slots_default_to_every_agent_once_per_turn():
    workflow = Duet()
    workflow.num_turns = 2
    assert workflow.slots == (Slot("a", 0), Slot("b", 0), Slot("a", 1), Slot("b", 1))
    workflow.validate()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"agents": ()}, r"agents=\(\) has no agent"),
        ({"agents": (Agent("a", ""), Agent("a", ""))}, r"2 agents named 'a'.*'a1', 'a2'.* works"),
        ({"num_turns": 0}, "num_turns=0 has no turn; 1 works"),
        ({"slots": ()}, r"slots=\(\) lets no agent speak"),
        ({"slots": (Slot("c"),)}, r"agent='c', which is not in \['a', 'b'\]; 'a' works"),
        ({"slots": (Slot("a", turn=1),)}, "turn=1 of agent 'a', but num_turns=1; turn=0 works"),
    ],
)
def test_wrong_declarations_are_refused(attributes, message):
    workflow = Duet()
    for name, value in attributes.items():
        setattr(workflow, name, value)
    with pytest.raises(ValueError, match=message) as error:
        workflow.validate()
    assert "\n" not in str(error.value)
