"""What a training prints at its end: commands that work as they are."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from marcog_trl import load_problems
from marcog_trl.cli import next_steps as steps
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.evaluate import EvaluationArguments
from marcog_trl.cli.export import ExportArguments
from marcog_trl.cli.next_steps import SavedTeam, next_steps, write_problem
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.solve import read_problem


ROOT = Path(__file__).parents[2]
PLAIN = {"task_id": "t/0", "prompt": "def f(x):\n    '''Twice x.'''\n", "entry_point": "f", "setup": "",
         "test": ["assert f(1) == 2", "assert f(2) == 4"], "test_format": "asserts"}  # fmt: skip


def team(folder, isolation="strict", rewards=("execution_reward",), source_file=None):
    return SavedTeam(str(folder), SimpleNamespace(rewards=list(rewards), source_file=source_file), isolation)


def commands(*args):
    return {what: shlex.split(command) for what, command in next_steps(*args).items()}


class TestCommands:
    @pytest.fixture(autouse=True)
    def program(self, monkeypatch):
        monkeypatch.setattr(steps, "_program", lambda: ["marcog-trl"])

    def test_they_say_where_the_team_and_its_problems_are(self, tmp_path):
        folder = tmp_path / "my team"
        folder.mkdir()
        columns = ["prompt=question", "test=asserts"]
        splits = {"dataset_train_split": "train[:9]", "dataset_test_split": "test[:5]"}
        script = TeamArguments("some/set", dataset_columns=columns, **splits)
        of = team(folder, "best_effort", ["execution_reward", "model"], source_file="my_team.py")
        found = commands(of, script, [PLAIN])
        assert list(found) == ["Solve a held-out problem", "Evaluate", "Export the agents"]
        assert [command[:4] for command in found.values()] == [
            ["marcog-trl", name, "--team", str(folder)] for name in ("solve", "evaluate", "export")
        ]
        evaluated = Parser(EvaluationArguments).parse(found["Evaluate"][2:])[0]
        assert (evaluated.adapter, evaluated.isolation, evaluated.trust_remote_code) == (
            str(folder),
            "best_effort",
            True,
        )
        assert (evaluated.dataset_name, evaluated.dataset_test_split) == ("some/set", "test[:5]")
        assert evaluated.dataset_columns == columns and evaluated.reward == ["execution_reward"]
        exported = Parser(ExportArguments).parse(found["Export the agents"][2:])[0]
        assert (exported.adapter, exported.isolation, exported.trust_remote_code) == (str(folder), "best_effort", True)
        assert (exported.dataset_name, exported.dataset_split) == ("some/set", "train[:9]")
        assert exported.dataset_columns == columns and exported.output_dir == f"{folder}-agents"
        assert found["Solve a held-out problem"][4:] == [
            "--problem", str(folder / "problem.py"), "--trust_remote_code", "--isolation", "best_effort"
        ]  # fmt: skip

    def test_defaults_are_left_out(self, tmp_path):
        found = next_steps(team(tmp_path), TeamArguments(), [PLAIN])
        assert found["Evaluate"] == f"marcog-trl evaluate --team {tmp_path}"

    def test_a_problem_that_is_no_function_is_not_offered(self, tmp_path):
        prose = PLAIN | {"prompt": "Write a function f that doubles a number."}
        assert list(commands(team(tmp_path), TeamArguments(), [prose])) == ["Evaluate", "Export the agents"]
        assert list(tmp_path.iterdir()) == []


class TestProgram:
    """The shell in which a user pastes a command may have another environment on its path, or none."""

    @pytest.fixture
    def python(self, tmp_path, monkeypatch):
        folder = tmp_path / ".venv" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        monkeypatch.chdir(ROOT)
        return folder / "python"

    def test_an_installed_script_goes_before_the_interpreter(self, python, tmp_path, monkeypatch):
        assert steps._program() == [str(python), "-m", "marcog_trl"]
        python.with_name("marcog-trl").touch()
        assert steps._program() == [str(python.with_name("marcog-trl"))]
        python.with_name("marcog-trl").chmod(0o755)
        with monkeypatch.context() as shell:
            shell.setenv("PATH", str(python.parent))
            assert steps._program() == ["marcog-trl"]
        monkeypatch.chdir(tmp_path)  # a program in this folder is named from it
        assert steps._program() == [".venv/bin/marcog-trl"]


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
