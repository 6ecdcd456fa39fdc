"""What a training prints at its end: commands that work as they are."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from marcog_trl import load_problems
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.evaluate import EvaluationArguments
from marcog_trl.cli.export import ExportArguments
from marcog_trl.cli.next_steps import next_steps
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.solve import SolveArguments
from marcog_trl.problems.tests import read_problem


CLASSES = {"solve": SolveArguments, "evaluate": EvaluationArguments, "export": ExportArguments}
PLAIN = {"prompt": "def f(x):\n    '''Twice x.'''\n", "entry_point": "f", "setup": "",
         "test": ["assert f(1) == 2", "assert f(2) == 4"], "test_format": "asserts"}  # fmt: skip


def steps(folder, problems, script=None, isolation="strict", rewards=("execution_reward",), source_file=None):
    """The commands, and what their flags set."""
    team = SimpleNamespace(rewards=list(rewards), source_file=source_file, reward_files=())
    commands = next_steps(str(folder), team, script or TeamArguments(), isolation, problems)
    words = list(map(shlex.split, commands.values()))
    return commands, {name: Parser(CLASSES[name]).parse(flags)[0] for _, name, *flags in words}


def test_they_say_where_the_team_and_its_problems_are(tmp_path):
    folder = tmp_path / "my team"
    folder.mkdir()
    columns = ["prompt=question", "test=asserts"]
    splits = {"dataset_train_split": "train[:9]", "dataset_test_split": "test[:5]"}
    script = TeamArguments("some/set", dataset_columns=columns, **splits)
    commands, read = steps(folder, [PLAIN], script, "best_effort", ["execution_reward", "model"], "my_team.py")
    assert list(commands) == ["Solve a held-out problem", "Evaluate", "Export the agents"]
    for flags in read.values():
        assert (flags.adapter, flags.isolation, flags.trust_remote_code) == (str(folder), "best_effort", True)
    solve, evaluate, export = read.values()
    assert solve.problem == str(folder / "problem.py") and evaluate.reward == ["execution_reward"]
    assert (evaluate.dataset_name, evaluate.dataset_test_split) == ("some/set", "test[:5]")
    assert (export.dataset_name, export.dataset_split, export.output_dir) == (
        "some/set",
        "train[:9]",
        f"{folder}-agents",
    )
    assert evaluate.dataset_columns == export.dataset_columns == columns


def test_defaults_are_left_out(tmp_path):
    assert steps(tmp_path, [PLAIN])[0]["Evaluate"] == f"marcog-trl evaluate --team {tmp_path}"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [{"role": "user", "content": PLAIN["prompt"]}]},
        {"prompt": "Write a function f that doubles a number."},
        {"test": [["1", "2"]], "test_format": "stdio"},
        {"setup": "import math"},  # which the tests need, and the file would not have
        {"entry_point": "g"},
    ],
    ids=str,
)
def test_the_first_problem_that_fits_into_a_file_is_taken(tmp_path, change):
    assert "solve" not in steps(tmp_path, [PLAIN | change])[1] and list(tmp_path.iterdir()) == []
    assert "solve" in steps(tmp_path, [PLAIN | change, PLAIN])[1]
    assert (tmp_path / "problem.py").read_text().startswith(PLAIN["prompt"])


def test_the_file_holds_the_problem(tmp_path):
    for problem in load_problems("builtin", "test[:20]"):
        read = read_problem(Path(steps(tmp_path, [problem])[1]["solve"].problem).read_text())
        assert [read[key] for key in ("prompt", "entry_point")] == [problem["prompt"], problem["entry_point"]]
        assert [test.strip() for test in read["test"]] == [test.strip() for test in problem["test"]]
