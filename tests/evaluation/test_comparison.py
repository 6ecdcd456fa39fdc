"""Paired differences of teams, and `marcog-trl compare`."""

import json

import numpy as np
import pytest
import teams

from marcog_trl import MultiAgentGRPOTrainer, load_problems
from marcog_trl.cli.main import main
from marcog_trl.evaluation.comparison import bootstrap_interval, compare, select_samples
from marcog_trl.report.plots import draw_differences


def episode(passed, tokens=10, path=10, failed=(), text="", messages=1):
    return {
        "status": "passed" if passed else "failed",
        "failed_tests": list(failed),
        "solution": text,
        "tokens": tokens,
        "prompt_tokens": 5,
        "critical_path": path,
        "evaluations": 0,
        "messages": [{}] * messages,
    }


def record(task, solved, **options):
    samples = [episode(passed, **options) for passed in solved]
    return {"task_id": task, "greedy": episode(solved[0], **options), "samples": samples, "seconds": 3.0}


def test_the_interval_covers_the_true_difference():
    rng = np.random.default_rng(0)
    covered, problems, samples = 0, 64, 4
    for trial in range(500):
        difficulty = rng.beta(1, 1, problems)  # the same for both, so that pairs are correlated
        ours = rng.binomial(samples, np.clip(difficulty * 0.8 + 0.1, 0, 1)) / samples
        theirs = rng.binomial(samples, difficulty * 0.8) / samples
        low, high = bootstrap_interval(ours - theirs, seed=trial)
        covered += low <= 0.1 <= high
    assert 0.93 <= covered / 500 <= 0.97


def test_differences_are_paired_and_the_verdict_names_budgets():
    a = [record(i, [i < 30, True], tokens=20, path=5) for i in range(40)]
    b = [record(i, [i < 20, i < 20], tokens=20, path=10) for i in range(50)]  # ten of them only b has played
    found = compare("a", "b", {"a": a, "b": b})
    assert found.problems == 40
    assert found.solved == pytest.approx((30 + 40 - 20 - 20) / 80)
    assert found.solved_greedy == pytest.approx(10 / 40)
    low, high = found.solved_interval
    assert low > 0 and found.verdict == (
        f"a solves 37.5 points more than b ({100 * low:.1f} to {100 * high:.1f}), with 0.50 × its critical path"
    )
    turned = compare("b", "a", {"a": a, "b": b})
    assert turned.verdict.startswith(f"b solves 37.5 points fewer than a ({100 * low:.1f} to {100 * high:.1f})")
    assert turned.verdict.endswith("with 2.00 × its critical path")
    even = compare("a", "c", {"a": a, "c": a})
    assert even.verdict == "no difference between a and c (0.0 to 0.0 points), with equal budgets"
    with pytest.raises(ValueError, match="have no common problem"):
        compare("a", "b", {"a": a, "b": [record("other", [True])]})


def test_visible_tests_choose_among_samples():
    right = episode(True, tokens=3, path=3, text="right")
    wrong = episode(False, tokens=8, path=8, failed=[0, 2], text="wrong")
    half = episode(False, tokens=4, path=4, failed=[2], text="half")
    given = {"task_id": 0, "seconds": 1.0, "greedy": right, "samples": [wrong, right, half, wrong, half, wrong, right]}
    found = select_samples(given, 2, visible_tests=1)["samples"]
    assert [each["solution"] for each in found] == ["right", "half", "half"]  # the seventh has no partner
    assert [each["tokens"] for each in found] == [11, 12, 12]
    assert [each["critical_path"] for each in found] == [8, 8, 8]
    assert {each["evaluations"] for each in found} == {2}
    [all_seven] = select_samples(given, 7, visible_tests=3)["samples"]
    assert all_seven["status"] == "passed"
    with pytest.raises(ValueError, match="--samples 8 needs as many samples of each problem, but task_id 0 has 7"):
        select_samples(given, 8, visible_tests=1)


def test_the_command(tiny_model, tmp_path, capsys):
    data = load_problems("builtin", "train[:2]")
    for name, options in {"team": {"workflow": "coverage", "num_agents": 2}, "agent": {"workflow": "single"}}.items():
        reward = "coverage_reward" if name == "team" else "execution_reward"
        options = {"per_device_train_batch_size": 4, "data": data, "reward": reward, **options}
        teams.make(tiny_model, tmp_path / name, MultiAgentGRPOTrainer, **options).save_model()
    output = tmp_path / "found" / "comparison.json"
    names = [str(tmp_path / "team"), str(tmp_path / "agent"), f"model:{tiny_model}"]
    flags = [
        *("--dataset_test_split", "test[:3]", "--num_samples", "2", "--samples", "2", "--output", str(output)),
        *("--override", "max_completion_length=6"),
    ]
    assert main(["compare", *names, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no difference between") == 2
    found = json.loads(output.read_text())
    assert [each["b"] for each in found["differences"]] == names[1:]
    assert {own["evaluations"] for own in found["teams"].values()} == {2.0}
    assert found["teams"][names[0]]["tokens"] > found["teams"][names[0]]["critical_path"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["one"], "needs at least two different teams"),
        (["one", "one"], "needs at least two different teams"),
        (["a", "b", "--samples", "0"], "samples=0 must be at least 1"),
        (["nowhere/a", "nowhere/b"], "nowhere/a"),
        (["a.json", "b.json"], "'a.json' is not a finished evaluation"),
    ],
)
def test_mistakes_end_with_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["compare", *argv])
    assert error.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_the_picture_draws_every_difference():
    a = [record(i, [i < 30, True]) for i in range(40)]
    b = [record(i, [i < 20, i < 20]) for i in range(40)]
    found = [compare("a $team$", name, {"a $team$": a, name: b}) for name in ("b", "a very long name " * 4)]
    assert draw_differences(found).startswith(b"\x89PNG")
