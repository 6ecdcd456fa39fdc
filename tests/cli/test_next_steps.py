"""What a training prints at its end: commands that work as they are."""

import shlex
import sys
from pathlib import Path

import pytest

from marcog_trl import load_problems
from marcog_trl.cli import next_steps as steps
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.evaluate import EvaluationArguments
from marcog_trl.cli.export import ExportArguments
from marcog_trl.cli.next_steps import next_steps, write_problem
from marcog_trl.cli.parsing import read_arguments
from marcog_trl.cli.solve import read_problem


ROOT = Path(__file__).parents[2]
PLAIN = {"task_id": "t/0", "prompt": "def f(x):\n    '''Twice x.'''\n", "entry_point": "f", "setup": "",
         "test": ["assert f(1) == 2", "assert f(2) == 4"], "test_format": "asserts"}  # fmt: skip


def commands(*args):
    return {what: shlex.split(command) for what, command in (line.split(": ", 1) for line in next_steps(*args))}


class TestCommands:
    def test_they_say_where_the_team_and_its_problems_are(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes" / "train_shppo.py")])
        folder = tmp_path / "my team"
        folder.mkdir()
        script = TeamArguments(
            "some/set",
            dataset_train_split="train[:9]",
            dataset_test_split="test[:5]",
            dataset_columns=["prompt=question", "test=asserts"],
        )
        found = commands(script, folder, "best_effort", [PLAIN])
        assert list(found) == ["Solve a held-out problem", "Evaluate", "Export the agents"]
        evaluated = read_arguments(EvaluationArguments, found["Evaluate"][2:])
        assert (evaluated.adapter, evaluated.isolation) == (str(folder), "best_effort")
        assert (evaluated.dataset_name, evaluated.dataset_test_split) == ("some/set", "test[:5]")
        assert evaluated.dataset_columns == script.dataset_columns
        exported = read_arguments(ExportArguments, found["Export the agents"][2:])
        assert (exported.dataset_name, exported.dataset_split, exported.adapter) == (
            "some/set",
            "train[:9]",
            str(folder),
        )
        assert exported.dataset_columns == script.dataset_columns
        assert exported.output_dir == f"{folder}-agents"
        for command in (found["Evaluate"], found["Export the agents"]):
            assert command[0] == "python" and Path(command[1]).is_file()

    def test_defaults_are_left_out(self, tmp_path):
        (line,) = (line for line in next_steps(TeamArguments(), tmp_path, "strict", [PLAIN]) if "valuate" in line)
        assert line.endswith(f"--adapter {tmp_path}")

    def test_a_problem_that_is_no_function_is_not_offered(self, tmp_path):
        prose = PLAIN | {"prompt": "Write a function f that doubles a number."}
        assert list(commands(TeamArguments(), tmp_path, "strict", [prose])) == ["Evaluate", "Export the agents"]
        assert list(tmp_path.iterdir()) == []


class TestProblem:
    @pytest.mark.parametrize(
        ("name", "split", "least"),
        [
            ("builtin", "test[:20]", 20),
            (str(ROOT / "tests/data/humaneval.jsonl.gz"), "train[:20]", 20),
            (str(ROOT / "tests/data/mbpp_sanitized_60.jsonl"), "train[:20]", 20),
            (str(ROOT / "tests/data/classeval_20.json"), "train", 15),
        ],
    )
    def test_the_file_holds_the_problem(self, tmp_path, name, split, least):
        written = 0
        for problem in load_problems(name, split):
            flags = write_problem(tmp_path, [problem])
            if not flags:
                continue
            written += 1
            files = dict(zip(flags[::2], flags[1::2], strict=True))
            tests = Path(files["--tests"]).read_text() if "--tests" in files else None
            found = read_problem(Path(files["--problem"]).read_text(), tests)
            assert all(steps._plain(found[key]) == steps._plain(problem[key]) for key in steps._READ)
        assert written >= least

    @pytest.mark.parametrize(
        "change",
        [
            {"prompt": [{"role": "user", "content": PLAIN["prompt"]}]},
            {"test": None},
            {"test": [["1", "2"]], "test_format": "stdio"},
            {"setup": "import math"},  # which the tests need, and the file would not have
            {"entry_point": "g"},
        ],
        ids=str,
    )
    def test_the_first_that_fits_is_taken(self, tmp_path, change):
        assert write_problem(tmp_path, [PLAIN | change]) == []
        assert write_problem(tmp_path, [PLAIN | change, PLAIN]) == ["--problem", str(tmp_path / "problem.py")]
        assert (tmp_path / "problem.py").read_text().startswith(PLAIN["prompt"])
