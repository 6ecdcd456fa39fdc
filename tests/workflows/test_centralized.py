"""One agent writes the parts of a team."""

import pytest
from players import AUX, MAIN, PROBLEM, Executor, last, play, written

from marcog_trl.agents import Agent, Slot, Workflow, without_place
from marcog_trl.parsing.prompts import fill
from marcog_trl.rewards import collaboration_reward
from marcog_trl.rollout.engine import play as play_batch
from marcog_trl.workflows import Centralized, Collaboration, Pipeline


REPLY = f"Sure:\n<helper>\n{AUX}\n</helper>\n<main>\n{MAIN}\n</main>\nDone."


def test_asks_once_with_all_roles_and_the_problem_once():
    workflow = Centralized(Collaboration())
    assert workflow.agents[0].name == "team" and workflow.slots == (Slot("team"),)
    [stage] = play(workflow, {"team": [REPLY]})
    text = last(stage["team"])
    assert text.count(PROBLEM["prompt"].strip()) == 1 and text.rstrip().endswith(PROBLEM["prompt"].strip())
    for agent in Collaboration().agents:
        assert f"{agent.name}: {fill(without_place(agent.role), PROBLEM).splitlines()[0]}" in text
    assert "<helper>\n...\n</helper>\n<main>\n...\n</main>" in text


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (REPLY, {"helper": AUX, "main": MAIN}),
        (f"<main>{MAIN}</main>", {"helper": "", "main": MAIN}),
        (f"<helper>{AUX}</helper><main>{MAIN}", {"helper": AUX, "main": ""}),  # cut before the end
        (MAIN, {"helper": "", "main": ""}),
    ],
)
def test_parts_without_both_tags_are_empty(reply, expected):
    assert Centralized(Collaboration()).parts(PROBLEM, {"team": reply}) == expected


def test_the_parts_make_the_solution_and_are_what_rewards_see():
    workflow = Centralized(Collaboration())
    [episode] = play_batch(workflow, [PROBLEM], *written(lambda rows: [REPLY]))
    [turn] = episode.turns
    assert turn.replies == {"helper": AUX, "main": MAIN}
    assert turn.solution == Collaboration().solution(PROBLEM, turn.replies)
    columns = {name: [value] for name, value in PROBLEM.items() if name != "prompt"}
    [reward] = collaboration_reward(
        [PROBLEM["prompt"]], [turn.solution], replies=[turn.replies], executor=Executor("passed", "passed"), **columns
    )
    assert reward == pytest.approx(4.0)


class Longer(Workflow):
    agents = (Agent("a", "Write."), Agent("b", "Write."))
    replayable, may_fail = False, True

    def play(self, problem):
        replies = yield {name: self.ask(name, problem) for name in ("a", "b")}
        return max(replies.values(), key=len)


def test_a_workflow_may_return_the_solution():
    workflow = Centralized(Longer())
    [episode] = play_batch(workflow, [PROBLEM], *written(lambda rows: ["<a>x</a><b>long</b>"]))
    assert episode.turns[0].solution == "long" and (workflow.replayable, workflow.may_fail) == (False, True)


def test_feedback_reaches_the_team_by_agent():
    workflow = Centralized(Collaboration(num_turns=2))
    first, second = play(workflow, {"team": [REPLY, REPLY]}, Executor("passed", "passed"))
    chat = second["team"]
    assert chat[: len(first["team"])] == first["team"]
    assert chat[-2] == {"role": "assistant", "content": REPLY}
    assert "helper: Definition of aux: found" in last(chat) and "main: Definition of total: found" in last(chat)
    assert PROBLEM["prompt"].strip() not in last(chat)


def test_agents_that_speak_one_after_the_other_are_refused():
    with pytest.raises(ValueError, match=r"Pipeline asks \['planner'\]\. Use workflow='collaboration'"):
        play(Centralized(Pipeline()), {"team": [REPLY]})


def test_conversations_keep_what_came_before():
    problem = PROBLEM | {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEM["prompt"]}]
    }
    [stage] = play(Centralized(Collaboration()), {"team": [REPLY]}, problem=problem)
    assert [message["role"] for message in stage["team"]] == ["system", "user"]
    assert isinstance(Centralized(Collaboration()).agents[0], Agent)
