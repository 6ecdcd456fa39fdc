"""Rows that cannot be used are named before a run begins; in a stream they are left out."""

import pytest
import teams
from datasets import IterableDataset

from marcog_trl import Team
from marcog_trl.agents import Workflow
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.problems import solution_job


BAD = {3: "assert f(1) = 1", 5: "break", 60: "assert f("}


def rows(count=64):
    return [
        {
            "task_id": f"x/{i}",
            "prompt": f"def f{i}(x):",
            "entry_point": f"f{i}",
            "test": [BAD.get(i, f"assert f{i}(1) == 1")],
            "test_format": "asserts",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_all_bad_rows_are_named_before_the_model_is_loaded(tmp_path, where):
    bad, good = (teams.Dataset.from_list([row for row in rows() if keep(row)]) for keep in (bool, is_good))
    options = {"data": bad} if where == "train_dataset" else {"data": good, "eval_dataset": bad}
    with pytest.raises(ValueError, match=f"{where}: 3 problems cannot be used: ") as error:
        teams.make("nobody/no-such-model", tmp_path, reward="execution_reward", **options)
    for i, test in BAD.items():
        assert f"task_id 'x/{i}': tests[0]={test!r} does not parse: " in str(error.value)


def is_good(row):
    return int(row["task_id"][2:]) not in BAD


class Picky(Workflow):
    """Cannot play some problems, which shows in its first request."""

    agents = (teams.Agent("a", "You are a."),)

    def play(self, problem):
        if not problem["prompt"].endswith("0(x):"):
            raise ValueError(f"{problem['prompt']!r} is not for me")
        yield {"a": problem["prompt"]}

    def solution(self, problem, replies):
        return replies["a"]


def test_rows_that_the_workflow_cannot_play_are_named_too(tmp_path):
    data = teams.Dataset.from_list(rows(12))
    with pytest.raises(ValueError, match=r"10 problems .* task_id 'x/1': 'def f1\(x\):' is not for me;"):
        teams.make("nobody/no-such-model", tmp_path, data=data, workflow=Picky())


def test_what_is_wrong_with_every_row_is_said_once(tmp_path):
    data = teams.Dataset.from_list([row | {"test_format": "doctest"} for row in rows(12)])
    with pytest.raises(ValueError, match="train_dataset: no problem can be used") as error:
        teams.make("nobody/no-such-model", tmp_path, data=data, reward="execution_reward")
    assert str(error.value).count("doctest") == 1


def test_a_stream_goes_on_without_its_bad_rows(tiny_model, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(rows(12)))
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "isolation": "best_effort"}
    trainer = teams.make(tiny_model, tmp_path, data=stream, reward="execution_reward", **options)
    played = []
    play = trainer.team.play_tree

    def watched(problems, *args, **options):
        played.extend(problem["task_id"] for problem in problems)
        return play(problems, *args, **options)

    trainer.team.play_tree = watched
    with pytest.warns(UserWarning) as caught:
        trainer.train()
    trainer.executor.close()
    said = [str(warning.message) for warning in caught if "is skipped" in str(warning.message)]
    assert any("task_id 'x/3': tests[0]='assert f(1) = 1' does not parse" in message for message in said)
    assert "x/3" not in played and {"x/0", "x/1", "x/2", "x/4"} == set(played)


def test_a_stream_for_evaluation_goes_on_without_its_bad_rows(tiny_model, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(rows(12)))
    options = {"per_device_eval_batch_size": 1, "isolation": "best_effort"}
    given = {"one": stream, "other": stream}
    data = teams.Dataset.from_list([row for row in rows(12) if row["task_id"] == "x/0"] * 12)
    trainer = teams.make(tiny_model, tmp_path, data=data, eval_dataset=given, reward="execution_reward", **options)
    assert trainer.eval_dataset == given
    for chosen in ("one", stream):
        with pytest.warns(UserWarning, match="eval_dataset has an invalid problem, which is skipped: task_id 'x/3'"):
            played = [row["task_id"] for batch in trainer.get_eval_dataloader(chosen) for row in batch]
        assert sorted(set(played)) == sorted(row["task_id"] for row in rows(12) if is_good(row))


def test_what_prompts_and_tests_tell_may_be_missing(tiny_model, tmp_path):
    """In training and in an evaluation, which says once what was guessed."""
    data = teams.Dataset.from_list(
        [{"prompt": f"def f{i}(x):\n    ...", "test": f"assert f{i}(1) == 1"} for i in range(4)]
    )
    options = {"workflow": "collaboration", "isolation": "best_effort", "num_workers": 1}
    with pytest.warns(
        UserWarning, match="prompts and tests: the first problem has test_format='asserts' and entry_point='f0'"
    ):
        trainer = teams.make(tiny_model, tmp_path, reward="execution_reward", data=data, **options)
    assert trainer.train_dataset["entry_point"] == [f"f{i}" for i in range(4)]
    with pytest.warns(UserWarning, match="problems has no column 'test_format' and 'entry_point'"):
        assert evaluate_team(trainer.team, data, num_samples=1)["problems"] == 4


IMPORTING = [
    {"prompt": "def f(x):\n    ...\n", "entry_point": "f", "test_format": "unittest"}
    | {"test": "import pytest\n\ndef test_f():\n    assert f(1) == pytest.approx(2)\n"}
] * 8


def test_packages_that_tests_import_have_to_be_named(tiny_model, tmp_path):
    """Before the model is loaded. They are part of the team, and allowed in training, for one problem, and in evaluations."""
    data = teams.Dataset.from_list(IMPORTING)
    message = r"no problem can be used.*the tests import 'pytest', which needs packages=\['pytest'\]"
    for options in ({"data": data}, {"data": teams.Dataset.from_list(rows(2)), "eval_dataset": data}):
        with pytest.raises(ValueError, match=message):
            teams.make("nobody/no-such-model", tmp_path, reward="execution_reward", **options)
    with pytest.raises(ValueError, match=r"packages=\['pandaz'\]: 'pandaz' is not installed"):
        teams.make("nobody/no-such-model", tmp_path, reward="execution_reward", data=data, packages=["pandaz"])
    options = {"isolation": "best_effort", "num_workers": 1, "packages": ["pytest"], "execution_timeout": 60.0}
    trainer = teams.make(tiny_model, tmp_path, reward="execution_reward", data=data, **options)
    right = "def f(x):\n    return 2 * x"
    [verdict] = trainer.executor.run([solution_job(data[0], right)])
    assert verdict.status == "passed", verdict
    trainer.save_model(tmp_path / "saved")
    trainer.executor.close()
    options = {"isolation": "best_effort", "num_workers": 1}
    team = Team.from_pretrained(tmp_path / "saved", **options)
    assert list(team.settings.packages) == ["pytest"] and not team.solve(IMPORTING[0]).verdict.unusable
    team.close()
    team = Team.from_pretrained(tmp_path / "saved", packages=[], **options)
    for use in (lambda: team.solve(IMPORTING[0]), lambda: evaluate_team(team, data, num_samples=1)):
        with pytest.raises(ValueError, match=r"packages=\['pytest'\]"):
            use()
    team.close()
