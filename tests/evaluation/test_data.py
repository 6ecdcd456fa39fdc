"""Whatever way problems come to an evaluation, each of them is played as often as it should be."""

from collections import Counter

import pytest
import teams
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer


def rows():
    yield from teams.dataset(3)


def stream():
    return IterableDataset.from_generator(rows)


def make(model, path, trainer_class=MultiAgentPPOTrainer, **options):
    played = Counter()

    def reward(prompts, **kwargs):
        played.update(prompts)
        return [1.0] * len(prompts)

    trainer = teams.make(
        model, path, trainer_class, reward=reward, workflow=teams.Pair(), num_generations_eval=2,
        per_device_eval_batch_size=8, **options,
    )  # fmt: skip
    teams.script(trainer)
    return trainer, played


EVERY = {f"def f{i}(x):": 2 for i in range(3)}
WAYS = {
    "predict": ({}, lambda trainer: trainer.predict(teams.dataset(3))),
    "predict a stream": ({}, lambda trainer: trainer.predict(stream())),
    "evaluate": ({"eval_dataset": teams.dataset(3)}, lambda trainer: trainer.evaluate()),
    "evaluate a stream": ({"eval_dataset": stream()}, lambda trainer: trainer.evaluate()),
    "evaluate another": ({"eval_dataset": teams.dataset(1)}, lambda trainer: trainer.evaluate(teams.dataset(3))),
    "evaluate another stream": ({"eval_dataset": teams.dataset(1)}, lambda trainer: trainer.evaluate(stream())),
    "evaluate several": (
        {"eval_dataset": {"one": teams.dataset(3), "other": stream()}}, lambda trainer: trainer.evaluate()
    ),
    "evaluate other ones": ({}, lambda trainer: trainer.evaluate({"one": teams.dataset(3), "other": stream()})),
}  # fmt: skip


@pytest.mark.parametrize("trainer_class", [MultiAgentPPOTrainer, MultiAgentGRPOTrainer])
@pytest.mark.parametrize("way", WAYS)
def test_every_problem_is_played(tiny_model, tmp_path, way, trainer_class):
    options, evaluate = WAYS[way]
    tree = {"joint_mode": "cross", "per_device_train_batch_size": 4} if trainer_class is MultiAgentGRPOTrainer else {}
    trainer, played = make(tiny_model, tmp_path, trainer_class, **options, **tree)
    evaluate(trainer)
    times = 2 if way in ("evaluate several", "evaluate other ones") else 1
    assert played == {prompt: times * count for prompt, count in EVERY.items()}
    assert (trainer.num_generations, trainer.num_generations_eval) == (2, 2)


def test_a_prediction_says_what_was_earned(tiny_model, tmp_path):
    """And an evaluation after it, nothing of it."""
    trainer, _ = make(tiny_model, tmp_path, eval_dataset=teams.dataset(1))
    predicted = trainer.predict(teams.dataset(3)).metrics
    assert predicted["test_reward"] == 1.0 and predicted["test_agents/a/reward"] == 1.0
    assert not trainer._metrics["eval"] and not trainer._window_means.take("eval")
    assert predicted["test_entropy"] > 0
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_reward"] == 1.0


@pytest.mark.parametrize("way", ["evaluate", "predict"])
def test_columns_that_tests_tell_are_read_from_them(tiny_model, tmp_path, way):
    data = Dataset.from_dict({"prompt": ["def f(x):\n"] * 4, "test": [["assert f(1) == 1"]] * 4})
    with pytest.warns(UserWarning, match="train_dataset has no column"):
        trainer = teams.make(tiny_model, tmp_path, data=data, reward="execution_reward", isolation="best_effort")
    with pytest.warns(UserWarning, match="has no column 'test_format'"):
        getattr(trainer, way)(data)


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda trainer: trainer.predict(Dataset.from_dict({"question": ["?"]})), "test_dataset has no column 'prompt'"),
        (lambda trainer: trainer.evaluate(Dataset.from_dict({"question": ["?"]})), "eval_dataset has no column 'prompt'"),
        (lambda trainer: trainer.evaluate(teams.dataset(3).select([])), "eval_dataset is empty"),
    ],
)  # fmt: skip
def test_a_dataset_that_is_given_later_is_checked_too(tiny_model, tmp_path, evaluate, message):
    trainer, played = make(tiny_model, tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate(trainer)
    assert not played


def test_rows_that_were_not_repeated_are_no_evaluation(tiny_model, tmp_path):
    """As from a dataloader of a user's own, of which every other problem would be left out."""
    trainer, _ = make(tiny_model, tmp_path)
    batch = next(iter(DataLoader(list(rows()), batch_size=8, collate_fn=list)))
    trainer.model.eval()
    with pytest.raises(ValueError, match="rows 0 and 1 of a batch have different problems"):
        trainer._generate_and_score_completions(batch)
