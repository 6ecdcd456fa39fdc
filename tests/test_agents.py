"""Workflows are declared rightly, or refused."""

import pytest

from marcog_trl.agents import Agent, Slot, Workflow


class Duet(Workflow):
    agents = (Agent("a", "Write."), Agent("b", "Write."))

    def play(self, problem):
        yield {agent.name: problem["prompt"] for agent in self.agents}

    def solution(self, problem, replies):
        return replies["b"]


def pick(self, problem):
    replies = yield {agent.name: problem["prompt"] for agent in self.agents}
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
        ({"agents": (Agent("a", ""), Agent("a", ""))}, r"2 agents named 'a'.*'a1', 'a2'"),
        ({"num_turns": 0}, "num_turns=0 must be at least 1"),
        ({"slots": ()}, r"slots=\(\) lets no agent speak"),
        ({"slots": (Slot("a"), Slot("a"))}, r"slots .* 2 times"),
        ({"slots": (Slot("c"),)}, r"agent='c', which is not in \['a', 'b'\]"),
        ({"slots": (Slot("a", turn=1),)}, "turn=1 of agent 'a', but num_turns=1 has the turns 0 to 0"),
    ],
)
def test_wrong_declarations_are_refused(attributes, message):
    workflow = Duet()
    for name, value in attributes.items():
        setattr(workflow, name, value)
    with pytest.raises(ValueError, match=message) as error:
        workflow.validate()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["2", 2.0, None, True])
def test_a_number_of_turns_that_is_no_whole_number_is_refused(value):
    workflow = Duet()
    workflow.num_turns = value
    with pytest.raises(ValueError, match=f"num_turns={value!r} must be a whole number"):
        workflow.validate()


def half(**methods):
    return type("Half", (Workflow,), {"agents": Duet.agents, **methods})()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"solution": Duet.solution}, "Half has no method 'play'. Write one that"),
        ({"play": Duet.play}, r"Half.play returns no solution, and Half has no method 'solution'. Return the"),
        ({"play": pick, "num_turns": 2}, "Half has no method 'solution', which num_turns=2 needs: play returns"),
    ],
)
def test_a_workflow_without_a_method_is_refused(methods, message):
    with pytest.raises(TypeError, match=message):
        half(**methods).validate()


def test_play_may_return_the_solution():
    half(play=pick).validate()
    half(play=pick, solution=Duet.solution, num_turns=2).validate()


class TestAsk:
    PROBLEM = {"prompt": "Write f.\n"}

    def test_puts_role_problem_and_texts_together(self):
        assert Duet().ask("a", self.PROBLEM) == [{"role": "user", "content": "Write.\n\nWrite f.\n"}]
        [message] = Duet().ask("a", self.PROBLEM, "It failed:", "x is 3")
        assert message["content"] == "Write.\n\nWrite f.\n\nIt failed:\n\nx is 3"

    def test_texts_follow_the_problem_in_its_place(self):
        class Placed(Duet):
            agents = (Agent("a", "Read:\n{problem}\n\nWrite it."), Agent("b", "{problem}"))

        [message] = Placed().ask("a", self.PROBLEM, "It failed:", "x is 3")
        assert message["content"] == "Read:\nWrite f.\n\nIt failed:\n\nx is 3\n\nWrite it."

    def test_keeps_the_messages_before(self):
        system = {"role": "system", "content": "Be brief."}
        asked = Duet().ask("b", {"prompt": [system, {"role": "user", "content": "Write f."}]}, "Now.")
        assert asked == [system, {"role": "user", "content": "Write.\n\nWrite f.\n\nNow."}]

    def test_names_an_agent_that_does_not_exist(self):
        with pytest.raises(ValueError, match=r"Duet has no agent 'c'\. Use one of \['a', 'b'\]"):
            Duet().ask("c", self.PROBLEM)
