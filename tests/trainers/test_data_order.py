"""Problems come stage by stage, also after a resume."""

import json
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import teams

from marcog_trl import MultiAgentGRPOTrainer
from marcog_trl.rewards.requirements import needs_tests
from marcog_trl.trainers import metrics
from marcog_trl.trainers.data import Curriculum


VALUES = ["easy"] * 4 + ["hard"] * 4 + ["medium"] * 2


class TestDraw:
    def test_a_value_may_have_a_plus(self):
        assert Curriculum(["A", "A+"], ["A", "A+"], 1, starts=[0, 1]).problems == [[0], [1]]

    def test_a_stage_shows_each_of_its_problems_before_any_comes_again(self):
        curriculum = Curriculum(VALUES, ["easy", "easy+hard"], 2, starts=[0, 3])
        drawn = [curriculum.draw(batch) for batch in range(7)]
        assert sorted(drawn[0] + drawn[1]) == [0, 1, 2, 3]
        assert set(drawn[2]) < {0, 1, 2, 3}
        assert sorted(chain.from_iterable(drawn[3:7])) == list(range(8))
        assert drawn == [curriculum.draw(batch) for batch in range(7)]
        rounds = [tuple(chain.from_iterable(curriculum.draw(3 + 4 * r + i) for i in range(4))) for r in range(4)]
        assert len(set(rounds)) == 4

    def test_a_pass_rate_reached_ends_the_stage(self):
        curriculum = Curriculum(VALUES, ["easy", "medium", "hard"], 2, pass_rate=0.5, window=2)
        for rate in (0.2, 0.6, 0.6):
            curriculum.note(rate)
            curriculum.on_step_end(None, None, None)
        # Decided after the third batch; the fourth may have been drawn already
        assert curriculum.starts == [0, 4]
        curriculum.note(0.9)  # a batch of the first stage still
        for rate in (0.9, None, 0.9):
            assert len(curriculum.starts) == 2
            curriculum.note(rate)
            curriculum.on_step_end(None, None, None)
        assert curriculum.starts == [0, 4, 8]
        assert [curriculum.stage_of(batch) for batch in (0, 3, 4, 7, 8, 99)] == [0, 0, 1, 1, 2, 2]


def run(model, path, max_steps, by, resume=None):
    """Trains and gives the prompts of every step."""
    seen = []

    def rate(completions, **kwargs):
        return [0.5] * len(completions)

    def reward(prompts, completions, **kwargs):
        seen.append(sorted(set(prompts)))
        return teams.letters(completions)

    columns = {
        "level": VALUES,
        "test": [["assert f(1) == 1"]] * 10,
        "test_format": ["asserts"] * 10,
        "entry_point": ["f"] * 10,
    }
    trainer = teams.make(
        model, path, MultiAgentGRPOTrainer, reward=needs_tests(reward), data=teams.dataset(10, **columns),
        workflow=teams.Pair(), max_steps=max_steps, per_device_train_batch_size=8, isolation="best_effort", num_workers=1, shuffle_dataset=True,
        save_strategy="steps", save_steps=2,
        curriculum={"column": "level", "stages": ["easy", "medium", "hard"], **by},
    )  # fmt: skip
    teams.script(trainer)
    # What the solutions pass is set by the test: the first two steps half of their tests, and all from then on
    rates = iter([0.5, 0.5] + [1.0] * 20)
    skip = 0 if resume is None else int(Path(resume).name.split("-")[1])
    for _ in range(skip):
        next(rates)
    with patch.object(metrics, "pass_rate", lambda *_: next(rates)):
        trainer.train(resume_from_checkpoint=resume)
    trainer.executor.close()
    return seen, teams.logged(trainer, "curriculum/stage")


def levels(prompts):
    return {VALUES[int(prompt[5:-4])] for prompt in prompts}


@pytest.mark.parametrize("by", [{"steps": [2, 5]}, {"pass_rate": 0.9, "window": 2}])
def test_a_resumed_run_sees_the_problems_of_the_uninterrupted_one(tiny_model, tmp_path, by):
    seen, stages = run(tiny_model, tmp_path, 9, by)
    expected = [1, 1, 2, 2, 2, 3, 3, 3, 3] if "steps" in by else [1, 1, 1, 1, 1, 2, 2, 2, 3]
    assert stages == expected
    names = {1: {"easy"}, 2: {"medium"}, 3: {"hard"}}
    assert [levels(prompts) for prompts in seen] == [names[stage] for stage in stages]
    for step in (4, 6):
        again, stages = run(tiny_model, tmp_path, 9, by, str(tmp_path / f"checkpoint-{step}"))
        assert again == seen[step:]
        assert stages == expected


def test_may_be_added_to_a_run_that_had_none(tiny_model, tmp_path):
    options = {
        "data": teams.dataset(10, level=VALUES), "workflow": teams.Pair(), "per_device_train_batch_size": 8,
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, max_steps=2, **options).train()
    options["curriculum"] = {"column": "level", "stages": ["easy", "medium"], "steps": [1]}
    with pytest.raises(ValueError, match="row 9 of the column has None"):
        lacking = {**options, "data": teams.dataset(10, level=[*VALUES[:9], None])}
        teams.make(tiny_model, tmp_path / "lacking", MultiAgentGRPOTrainer, max_steps=4, **lacking)
    trainer = teams.make(tiny_model, tmp_path, MultiAgentGRPOTrainer, max_steps=4, **options)
    trainer.train(resume_from_checkpoint=True)
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Curriculum"]["attributes"]["batches"] == 2
