"""Which candidates are paired, on numbers worked out by hand."""

import pytest

from marcog_trl.agents import Slot
from marcog_trl.preferences.pairs import (
    Candidate,
    candidates_of,
    choose_pairs,
)
from marcog_trl.rollout.records import Episode, Row, Turn


def candidates(*scores, replies=None):
    replies = replies or range(len(scores))
    return [
        Candidate([{"agent": "a", "turn": 0, "act": 0, "completion_ids": [reply]}], score)
        for score, reply in zip(scores, replies, strict=True)
    ]


class TestChoosePairs:
    def test_equal_gaps_use_every_candidate(self):
        assert choose_pairs(candidates(1, 1, 0, 0), "gap", 2) == [(0, 2), (1, 3)]
        assert choose_pairs(candidates(1, 1, 0, 0), "gap", 9) == [(0, 2), (1, 3), (0, 3), (1, 2)]

    def test_sums_that_differ_by_rounding_are_equal_gaps(self):
        assert choose_pairs(candidates(0.1 + 0.2, 0.3, 0.0, 0.0), "gap", 2) == [(0, 2), (1, 3)]
        assert choose_pairs(candidates(0.1 + 0.2, 0.3), "all") == []

    def test_all_leaves_ties_and_masked_out(self):
        assert choose_pairs(candidates(1, 0.25, 1, None), "all", 1) == [(0, 1), (2, 1)]

    def test_best_worst_takes_the_lowest_indices(self):
        assert choose_pairs(candidates(0.5, 1, 0, 1, 0), "best_worst", 4) == [(1, 2)]

    def test_random_depends_on_the_seed_alone(self):
        many = candidates(*range(9))
        one, again, other = (choose_pairs(many, "random", 4, seed=seed) for seed in ((0, 1), (0, 1), (0, 2)))
        assert one == again != other
        assert len(one) == 4 and all(i > j for i, j in one)

    @pytest.mark.parametrize("pairing", ["gap", "best_worst", "random", "all"])
    def test_small_gaps_and_equal_scores_give_no_pair(self, pairing):
        assert choose_pairs(candidates(1, 1, 1), pairing) == []
        assert choose_pairs(candidates(1, 0.75, 0.5), pairing, 9, min_gap=0.25) == [(0, 2)]


def row(agent, turn, token, node=0):
    return Row(0, Slot(agent, turn), 0, "", [node], [token])


def turn(**rewards):
    return Turn({}, "", [], rewards=rewards)


def test_lines_have_discounted_returns_of_each_agent():
    rows = [row("a", 0, 5), row("b", 0, 6), row("a", 1, 7), row("b", 1, 8)]
    played = Episode({}, rows, [turn(a=1.0, b=0.0), turn(a=0.5, b=1.0)])
    masked = Episode({}, rows[:2], [turn(a=1.0, b=0.0)], masked=True)
    [(_, (first, second))] = candidates_of([[played, masked]] * 2, ["a", "b"], [2, 1], 0.5, by_turn=False)
    assert first.agent_scores == (1.25, 0.5) and first.score == 0.875
    assert [pair_row["completion_ids"] for pair_row in first.rows] == [[5], [6], [7], [8]]
    assert first.rows[3] == {
        "agent": "b", "turn": 1, "act": 0, "prompt_ids": [0], "completion_ids": [8], "latent": [],
    }  # fmt: skip
    assert second.score is None


def tree():
    """Node rewards .2 -> {1, 0} and .6 -> {.5, .1}."""
    firsts = [(row("a", 0, 10), 0.2), (row("a", 0, 11), 0.6)]
    lasts = [(0, 20, 1.0), (0, 21, 0.0), (1, 22, 0.5), (1, 23, 0.1)]
    above = [Episode({}, [first], [turn(a=reward)]) for first, reward in firsts]
    below = [
        Episode({}, [firsts[p][0], row("a", 1, token)], [turn(a=firsts[p][1]), turn(a=reward)])
        for p, token, reward in lasts
    ]
    return [above, below]


class TestTrees:
    def test_siblings_are_compared_by_tree_returns(self):
        nodes = candidates_of(tree(), ["a"], [2, 2], 1.0, by_turn=True)
        assert [problem for problem, _ in nodes] == [0, 0, 0]
        assert [[c.score for c in siblings] for _, siblings in nodes] == [
            pytest.approx([0.7, 0.9]), [1.0, 0.0], pytest.approx([0.5, 0.1]),
        ]  # fmt: skip
        assert choose_pairs(nodes[0][1]) == [(1, 0)]
        # Whole leaves prefer the first child's first move: 1.2 is the best return
        [(_, leaves)] = candidates_of([tree()[1]] * 2, ["a"], [4, 1], 1.0, by_turn=False)
        assert choose_pairs(leaves, "best_worst") == [(0, 1)]
        assert leaves[0].rows[0]["completion_ids"] == [10]

    def test_a_pair_has_the_rows_of_its_turn_and_their_history(self):
        _, siblings = candidates_of(tree(), ["a"], [2, 2], 1.0, by_turn=True)[2]
        assert [[r["completion_ids"] for r in c.rows] for c in siblings] == [[[22]], [[23]]]
        assert [[r["completion_ids"] for r in c.history] for c in siblings] == [[[11]], [[11]]]

    def test_masked_children_do_not_count(self):
        levels = tree()
        levels[1][0].masked = True
        (_, root), (_, left), _ = candidates_of(levels, ["a"], [2, 2], 1.0, by_turn=True)
        assert [c.score for c in root] == pytest.approx([0.2, 0.9])  # without the masked child's 1
        assert [c.score for c in left] == [None, 0.0]
        assert choose_pairs(left) == []

    def test_nodes_that_ended_have_no_pairs(self):
        levels = tree()
        for episode in levels[1][:2]:
            del episode.turns[1], episode.rows[1]
        nodes = candidates_of(levels, ["a"], [2, 2], 1.0, by_turn=True)
        assert [[c.score for c in siblings] for _, siblings in nodes] == [
            pytest.approx([0.2, 0.9]), pytest.approx([0.5, 0.1]),
        ]  # fmt: skip
