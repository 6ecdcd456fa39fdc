"""Trees of stages: who branches, what is shared, and how rows lie."""

import itertools

import pytest

from marcog_trl.agents import Agent, Slot, Workflow
from marcog_trl.rollout.engine import play, play_tree
from marcog_trl.rollout.prompts import stages_of
from marcog_trl.rollout.tree import Tree
from marcog_trl.workflows import make_workflow


class Chain(Workflow):
    """Each agent reads what was said before it, for two turns; b is skipped where the problem says so."""

    agents = (Agent("a", "Be a."), Agent("b", "Be b."))
    num_turns = 2

    def play(self, problem):
        said = ""
        for turn in range(2):
            for agent in self.agents:
                if agent.name == "b" and problem.get("short"):
                    continue
                reply = yield {Slot(agent.name, turn): f"{problem['prompt']}{said}>{agent.name}"}
                said += f" {reply[agent.name]}"

    def solution(self, problem, replies):
        return "+".join(replies.values())


PROBLEM = {"prompt": "p", "entry_point": "f", "test": ["assert f()"], "test_format": "asserts"}
STAGES = [(Slot("a"),), (Slot("b"),), (Slot("a", 1),), (Slot("b", 1),)]


def numbered(workflow, problems, tree=None):
    """Plays with replies 0, 1, 2, ...; returns the episodes and the prompts of each stage."""
    numbers, prompts = itertools.count(), []

    def generate(rows):
        prompts.append([row.prompt for row in rows])
        return [[next(numbers)] for _ in rows], None

    functions = generate, lambda prompts: [[0]] * len(prompts), lambda ids: [str(i) for [i] in ids]
    if tree is None:
        return play(workflow, problems, *functions), prompts
    return play_tree(workflow, problems, *functions, tree), prompts


class TestStages:
    def test_who_speaks_when(self):
        assert stages_of(Chain(), [PROBLEM]) == STAGES
        assert stages_of(make_workflow("single"), [PROBLEM]) == [(Slot("solver"),)]
        both = [tuple(Slot(agent, 0, act) for agent in ("solver", "solver2")) for act in (0, 1)]
        assert stages_of(make_workflow("discussion"), [PROBLEM]) == both
        names = ("planner", "coder", "debugger")
        assert stages_of(make_workflow("pipeline"), [PROBLEM]) == [(Slot(name),) for name in names]

    def test_a_slot_that_no_problem_uses_is_a_stage_of_its_own(self):
        assert stages_of(Chain(), [PROBLEM | {"short": True}]) == STAGES

    def test_another_order_than_that_of_the_slots_is_refused(self):
        class Backwards(Chain):
            slots = tuple(Slot(name, turn) for turn in (0, 1) for name in ("b", "a"))

        with pytest.raises(ValueError, match="needs slots in the order in which agents speak, but"):
            stages_of(Backwards(), [PROBLEM])


class TestTree:
    def test_every_stage_branches_and_reads_what_its_own_episode_said(self):
        tree = Tree.of_stages(STAGES, [2, 2, 1, 2])
        turns, prompts = numbered(Chain(), [PROBLEM], tree)
        assert [len(asked) for asked in prompts] == [2, 4, 4, 8]
        assert prompts[1] == [f"p {a}>b" for a in (0, 0, 1, 1)]
        assert prompts[2] == [f"p {b // 2} {2 + b}>a" for b in range(4)]
        assert [len(episodes) for episodes in turns] == [4, 8]
        assert [[int(row.text) for row in episode.rows] for episode in turns[1]] == [
            [e // 4, 2 + e // 2, 6 + e // 2, 10 + e] for e in range(8)
        ]
        assert turns[1][0].rows[0] is turns[1][3].rows[0] is turns[0][1].rows[0]
        assert turns[1][2].turns[0] is turns[1][3].turns[0] is not turns[1][4].turns[0]

    def test_a_forked_episode_asks_the_same_prompts_as_one_that_is_played_afresh(self):
        turns, _ = numbered(Chain(), [PROBLEM], Tree.of_stages(STAGES, [2, 2, 2, 2]))
        for episode in turns[-1]:
            texts = iter([row.text for row in episode.rows])
            [fresh] = play(
                Chain(), [PROBLEM], lambda rows: ([[0]] * len(rows), None), lambda prompts: [[0]] * len(prompts),
                lambda ids, texts=texts: [next(texts) for _ in ids],
            )  # fmt: skip
            assert [row.prompt for row in episode.rows] == [row.prompt for row in fresh.rows]
            assert [turn.solution for turn in episode.turns] == [turn.solution for turn in fresh.turns]

    def test_agents_that_skip_do_not_stop_the_branches(self):
        tree = Tree.of_stages(STAGES, [2, 2, 2, 1])
        turns, prompts = numbered(Chain(), [PROBLEM | {"short": True}, PROBLEM], tree)
        assert [len(asked) for asked in prompts] == [4, 4, 16, 8]
        skipped = turns[1][:8]
        assert [[row.slot.agent for row in episode.rows] for episode in skipped] == [["a", "a"]] * 8
        assert [int(episode.rows[0].text) for episode in skipped] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert len({episode.rows[1].text for episode in skipped}) == 8

    def test_another_order_than_that_of_the_first_problems_is_refused(self):
        class Moody(Chain):
            num_turns = 1

            def play(self, problem):
                yield {"a": "first", "b": "first"} if problem.get("together") else {"b": "first"}
                if not problem.get("together"):
                    yield {"a": "second"}

        for problem, tree in (({"together": True}, STAGES[:2]), ({}, STAGES[:2])):
            with pytest.raises(ValueError, match="in the same order in every episode, but Moody asks"):
                numbered(Moody(), [PROBLEM | problem], Tree.of_stages(tree, [2, 2]))
