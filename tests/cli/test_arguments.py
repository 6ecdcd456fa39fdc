"""The arguments of the training recipes: problem sets and their splits."""

import pytest

from marcog_trl import load_problems
from marcog_trl.cli.arguments import TeamArguments


class TestSplits:
    def test_training_problems_are_not_held_out(self):
        arguments = TeamArguments("builtin", dataset_train_split="train[:20]", dataset_test_split="train[18:30]")
        with pytest.raises(
            ValueError, match=r"share 2 problems, such as 'builtin/train/.* or set --allow_overlap true\."
        ):
            arguments.load_splits()
        arguments.allow_overlap = True
        assert [len(split) for split in arguments.load_splits()] == [20, 12]
        arguments = TeamArguments("builtin", dataset_train_split="train[:20]", dataset_test_split="test[:5]")
        assert [len(split) for split in arguments.load_splits()] == [20, 5]

    def test_evaluations_during_training_may_take_fewer_problems(self):
        test = load_problems("builtin", "test[:5]")
        assert len(TeamArguments().eval_split(test)) == 5
        assert TeamArguments(eval_problems=2).eval_split(test)["task_id"] == test["task_id"][:2]
        assert len(TeamArguments(eval_problems=9).eval_split(test)) == 5
