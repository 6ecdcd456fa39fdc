"""The workflows in `recipes/examples`: what they ask, which solution they choose, and whole runs on every command line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import teams
from guides import code_of
from players import written
from tool_model import call, recite_texts

from marcog_trl import MultiAgentGRPOTrainer, load_problems, make_workflow
from marcog_trl.cli.main import main
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.train import train
from marcog_trl.embedded import BuildSettings, draw_habits
from marcog_trl.problems.builtin import generate
from marcog_trl.problems.tests import read_problem
from marcog_trl.rollout.engine import play


FOLDER = Path(__file__).parents[2] / "recipes"
EXAMPLES = FOLDER / "examples"
PROBLEM = {
    "prompt": 'def f(x):\n    """Double x."""\n',
    "entry_point": "f",
    "test": ["assert f(1) == 2", "assert f(3) == 6"],
    "test_format": "asserts",
}
WRONG, HALF, RIGHT = "def f(x): return x", "def f(x): return 2", "def f(x): return 2 * x"


def played(name, replies, executor, **options):
    """The episode of an example on given replies of each agent, and its solution."""
    remaining = {agent: iter(texts) for agent, texts in replies.items()}
    model = written(lambda rows: [next(remaining[row.slot.agent]) for row in rows])
    [episode] = play(make_workflow(f"{EXAMPLES}/{name}", **options), [PROBLEM], *model, executor=lambda: executor)
    return episode, episode.turns[0].solution


class TestBestOfN:
    @pytest.mark.parametrize(
        ("visible_tests", "replies", "best"),
        [
            (1, (WRONG, HALF, RIGHT), HALF),  # it passes all that may be seen
            (None, (WRONG, HALF, RIGHT), RIGHT),
            (1, (WRONG, "no code", WRONG), WRONG),
        ],
    )
    def test_visible_tests_choose(self, executor, visible_tests, replies, best):
        names = ("solver1", "solver2", "solver3")
        given = {name: [reply] for name, reply in zip(names, replies, strict=True)}
        episode, solution = played("best_of_n.py:BestOfN", given, executor, visible_tests=visible_tests)
        assert solution == best and {row.stage for row in episode.rows} == {0}


class TestDebate:
    @pytest.mark.parametrize(
        ("ruling", "winner"), [("A", WRONG), ("B", RIGHT), ("A is wrong, so B.", RIGHT), ("Both.", WRONG), ("", WRONG)]
    )
    def test_the_judge_picks(self, ruling, winner):
        replies = {"first": ["draft one", WRONG], "second": ["draft two", RIGHT], "judge": [ruling]}
        episode, solution = played("debate.py:Debate", replies, None)
        assert solution == winner and [row.stage for row in episode.rows] == [0, 0, 1, 1, 2]
        *_, first, second, judge = [row.prompt[-1]["content"] for row in episode.rows]
        assert first.endswith("You wrote:\ndraft one\n\nThe other wrote:\ndraft two\n\nRevise.")
        assert second.endswith("You wrote:\ndraft two\n\nThe other wrote:\ndraft one\n\nRevise.")
        assert judge.endswith(f"A:\n{WRONG}\n\nB:\n{RIGHT}")


class TestTester:
    def test_asserts_that_do_not_parse_come_back_as_verdicts(self, executor):
        tests = "Tests:\nassert f(1) == 2\n  assert f(2) == 5\nassert f(== 3\nassert g(1)\n"
        episode, solution = played(
            "tester.py:TestAndFix", {"tester": [tests], "coder": [RIGHT], "fixer": ["fixed"]}, executor
        )
        assert solution == "fixed" and [row.stage for row in episode.rows] == [0, 0, 1]
        assert [verdict.status for _, verdict in episode.turns[0].verdicts] == ["passed", "failed", "error", "failed"]
        code, results = episode.rows[-1].prompt[-1]["content"].split("\n\n")[-2:]
        assert code == f"Code:\n{RIGHT}"
        _, passed, failed, broken, unknown = results.splitlines()
        assert passed == "assert f(1) == 2: passed" and failed == "assert f(2) == 5: f(2) returned 4, expected 5"
        assert "does not parse" in broken and "g" in unknown

    @pytest.mark.parametrize("tests", ["", "I have none.", "x = 1"])
    def test_without_tests_the_fixer_is_asked_too(self, tests):
        replies = {"tester": [tests], "coder": [RIGHT], "fixer": ["fixed"]}
        episode, solution = played("tester.py:TestAndFix", replies, None)
        assert solution == "fixed"
        assert episode.rows[-1].prompt[-1]["content"].endswith("Test results:\nThere are no tests.")


class TestFixer:
    def test_the_fixer_reads_code_and_error_before_it_is_told_how_to_begin(self, executor):
        episode, solution = played("fixer.py:CodeAndFix", {"coder": [WRONG], "fixer": [RIGHT]}, executor)
        assert [turn.solution for turn in episode.turns] == [WRONG, RIGHT] and solution == WRONG
        code, error, request = episode.rows[-1].prompt[-1]["content"].split("\n\n")[-3:]
        assert code == f"This code is wrong:\n```python\n{WRONG}\n```" and error == "f(1) returned 1, expected 2"
        assert request.endswith("begins with this line:\n```python\ndef f(x):\n```")

    def test_code_that_passes_the_example_is_kept(self, executor):
        episode, solution = played("fixer.py:CodeAndFix", {"coder": [HALF]}, executor)
        assert solution == HALF and [row.slot.agent for row in episode.rows] == ["coder"]


class TestChecked:
    def test_main_runs_code_before_it_answers(self, tool_model, tmp_path):
        trainer = teams.make(
            tool_model,
            tmp_path,
            MultiAgentGRPOTrainer,
            "execution_reward",
            load_problems("builtin", "train").select(range(2)),
            workflow=make_workflow(f"{EXAMPLES}/checked.py:CheckedCollaboration"),
            per_device_train_batch_size=4,
            max_completion_length=300,
            isolation="best_effort",
        )
        trial = call("python_tool", code="print(sorted([3, 1, 2]))")
        helper, other = "def aux(x): return x<|im_end|>", "I do not know.<|im_end|>"
        asked = recite_texts(trainer, [helper, trial, helper, other], ["def f(x): ...<|im_end|>"])
        teams.generation_batch(trainer)
        assert ["python_tool" in prompt for prompt in asked[0]] == [False, True] * 2
        [prompt] = asked[1]
        assert "<tool_response>\n[1, 2, 3]\n</tool_response>" in prompt


FLAGS = [
    "--isolation", "best_effort", "--report_to", "none", "--dataset_train_split", "train[:2]", "--dataset_test_split", "test[:1]",
    "--num_test_samples", "0", "--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length", "6",
    "--max_steps", "1", "--bf16", "false", "--use_cpu", "--write_report", "false",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "debate.py:Debate",
        "fixer.py:CodeAndFix",
        "checked.py:CheckedCollaboration",
        pytest.param("fetch.mjs", marks=pytest.mark.skipif(shutil.which("node") is None, reason="needs node")),
    ],
)
def test_from_training_to_solving(name, request, tmp_path, monkeypatch, capfd):
    """As a user does it: each command line takes the file, or trusts the one that is saved with the team."""
    model = request.getfixturevalue("tool_model" if name.startswith("checked") else "tiny_model")
    monkeypatch.chdir(tmp_path)
    file, _, class_name = name.partition(":")
    original, copy = EXAMPLES / (file if class_name else f"programs/{file}"), f"my_team{Path(file).suffix}"
    shutil.copy(original, copy)
    workflow = f"{copy}:{class_name}" if class_name else f"node {copy}"
    program = [] if class_name else ["--agents", "coder", "reviewer", "--max_calls", "1"]
    model = ["--model_name_or_path", model, "--output_dir", "team", "--workflow", workflow]
    train(RECIPES["magrpo"], [*FLAGS, *model, *program])
    assert Path("team", copy).read_text() == original.read_text()

    Path("problem.py").write_text(f"{PROBLEM['prompt']}\n\nassert f(1) == 2\n")
    solve = ["solve", "--problem", "problem.py", "--isolation", "best_effort"]
    few = ["--dataset_test_split", "test[:1]", "--num_samples", "1", "--isolation", "best_effort"]
    with pytest.raises(SystemExit):
        main([*solve, "--team", "team"])
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: 'team' has its workflow in {copy}")
    with pytest.raises(SystemExit, match=f"^error: 'team' has its workflow in {re.escape(copy)}"):
        main(["evaluate", "--team", "team", *few])

    assert main([*solve, "--team", "team", "--workflow", workflow]) == 1  # random weights
    Path(copy).unlink()
    assert main(["evaluate", "--team", "team", "--trust_remote_code", "--output", "e.json", *few]) == 0
    assert json.loads(Path("e.json").read_text())["settings"]["workflow"] == (class_name or "Program")
    for baseline in ("--untrained", "--single_agent"):
        assert main(["evaluate", "--team", "team", "--trust_remote_code", baseline, *few]) == 0
    export = ["export", "--team", "team", "--output_dir", "exported", "--isolation", "best_effort"]
    assert main([*export, "--trust_remote_code"]) == 0
    assert main([*solve, "--team", "exported", "--trust_remote_code", "--messages"]) == 1
    agents = json.loads(Path("team/team.json").read_text())["agents"]
    printed = capfd.readouterr().err
    assert all(f"--- {agent['name']}, turn " in printed for agent in agents)


def test_a_model_may_be_measured_with_one(tiny_model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    what = ["--model_name_or_path", tiny_model, "--workflow", f"{EXAMPLES}/best_of_n.py:BestOfN", "--num_agents", "2"]
    few = ["--dataset_test_split", "test[:1]", "--num_samples", "1", "--override", "max_completion_length=6"]
    assert main(["evaluate", *what, *few, "--isolation", "best_effort"]) == 0
    assert "untrained model: 1 problems of builtin" in " ".join(capfd.readouterr().out.split())


def test_the_problem():
    """One that the embedded default model solves from the start: neither agent has a habit that spoils its step."""
    problem = read_problem((EXAMPLES / "problem.py").read_text())
    [row] = [row for row in generate("test") if row["prompt"] == problem["prompt"]]
    assert row["entry_point"] == problem["entry_point"]
    assert [test.strip() for test in problem["test"]] == row["test"][:2]
    habits = draw_habits(BuildSettings())
    assert row["first"] not in habits["helper"] and row["second"] not in habits["main"]
    assert row["prompt"] in code_of("marcog_trl/team/README.md")
    assert load_problems("builtin", "test")[58]["prompt"] == row["prompt"]  # the docstring of Team
