"""The learning study of `recipes/benchmarks/learning.py`: its family, its intervals, a unit of each kind, its report."""

import functools
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock

from marcog_trl import load_problems
from marcog_trl.execution import CodeExecutor
from marcog_trl.problems import solution_job


BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # as if it was started
        yield importlib.import_module("learning")


@pytest.fixture(scope="module")
def reporting(study):
    return sys.modules["learning_report"]


@pytest.fixture(scope="module")
def problems():
    return load_problems("builtin", "test").select(range(3))


def options(**changes):
    return SimpleNamespace(
        **{
            "seeds": [0, 1],
            "only": None,
            "ablations": False,
            "tokens": 1,
            "output_dir": Path("study"),
            "comlrl_python": None,
            "comlrl_learning_rate": None,
            "problems": 8,
            "replies": 4,
            "default_model": False,
            "decay": False,
        }
        | changes
    )


class TestSameQuestion:
    def test_agents_are_asked_the_same_and_role_texts_are_not_in_it(self, study, problems):
        workflow = study.SameQuestion()
        asked = next(workflow.play(problems[0]))
        helper, main = asked.values()
        assert helper == main
        assert not any(agent.role in message["content"] for agent in workflow.agents for message in helper)
        assert len({agent.role for agent in workflow.agents}) == 2

    def test_either_may_write_either(self, study, problems):
        workflow, row = study.SameQuestion(), problems[0]
        with CodeExecutor(isolation="best_effort", num_workers=1) as executor:
            for replies in ({"helper": row["aux"], "main": row["main"]}, {"helper": row["main"], "main": row["aux"]}):
                assert study.complementary(row, list(replies.values()))
                [verdict] = executor.run([solution_job(row, workflow.solution(row, replies))])
                assert verdict.status == "passed"

    def test_both_the_same_or_one_that_wrote_both_is_refused(self, study, problems):
        workflow, row = study.SameQuestion(), problems[0]
        both = row["canonical_solution"]
        for first, second in (
            (row["aux"], row["aux"]), (row["main"], row["main"]), (both, row["aux"]), (row["main"], both), (both, ""),
            (row["main"], "no code"),
        ):  # fmt: skip
            assert not study.complementary(row, [first, second])
            assert workflow.solution(row, {"helper": first, "main": second}) == ""


class TestIntervals:
    def test_of_one_seed_is_over_problems(self, reporting):
        values = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]])
        mean, half = reporting.interval(values)
        assert mean == pytest.approx(0.6)
        assert half == pytest.approx(2.776445 * math.sqrt(0.3 / 5), rel=1e-4)  # t with 4 degrees of freedom

    def test_of_seeds_and_problems_by_hand(self, reporting):
        values = np.array([[0.0, 1.0], [1.0, 1.0], [0.5, 1.0]])
        # means of the problems 0.5 and 1, of the seeds 0.5, 1 and 0.75
        by_problem, by_seed = 0.125 / 2, 0.0625 / 3
        freedom = (by_problem + by_seed) ** 2 / (by_problem**2 / 1 + by_seed**2 / 2)
        mean, half = reporting.interval(values)
        assert mean == pytest.approx(0.75)
        assert half == pytest.approx(reporting.student_t(freedom) * math.sqrt(by_problem + by_seed))

    @pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (10, 2.22814), (1000, 1.96234)])
    def test_quantiles_are_those_of_the_tables(self, reporting, freedom, expected):
        assert reporting.student_t(freedom) == pytest.approx(expected, rel=1e-3)

    def test_covers_the_mean_of_crossed_effects(self, reporting):
        rng = np.random.default_rng(0)
        hits = 0
        for _ in range(200):
            values = rng.normal(size=(3, 1)) * 0.1 + rng.normal(size=(1, 40)) * 0.5 + rng.normal(size=(3, 40)) * 0.3
            mean, half = reporting.interval(values)
            hits += abs(mean) <= half
        assert 0.92 < hits / 200 < 1


def test_area_by_hand(reporting):
    tokens, figures = np.array([0, 50, 100]), np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert reporting.area(tokens, figures, 75) == pytest.approx([50 / 75, 68.75 / 75])


def test_areas_are_compared_with_the_best_of_comlrl(study, reporting):
    """Seed by seed, with the seeds that both have."""

    def runs(name, *heights):
        return [
            {
                "unit": f"builtin/{name}/{seed}",
                "final": {"solved": [height, height]},
                "curve": [{"tokens": 30_000, "solved": [height, height]}],
                "ledger": {"tokens": 60_000},
            }
            for seed, height in enumerate(heights)
        ]

    conditions = {
        "untrained": runs("untrained", 0.0),
        "magrpo": runs("magrpo", 0.4, 0.8, 0.9),
        "comlrl_magrpo": runs("comlrl_magrpo", 0.4, 0.6),
        "comlrl_maac": runs("comlrl_maac", 0.1),
    }
    [text] = reporting.areas(study.FAMILIES["builtin"], conditions)
    rows = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [[*row[:3], row[3][:5], row[4].split()[0]] for row in rows] == [
        ["| 60,000", "MAGRPO (shared)", "3", "0.525", "0.075"],
        ["| 60,000", "CoMLRL, MAGRPO", "2", "0.375", "|"],
        ["| 60,000", "CoMLRL, MAAC", "1", "0.075", "-0.225"],
    ]


def test_units_are_those_asked_for(study):
    every = study.units(options())
    assert {"builtin/shppo/0", "builtin/shppo/1", "symmetry/separate/1", "builtin/untrained/0"} <= set(every)
    assert "builtin/untrained/1" not in every  # nothing depends on its seed
    assert not any("no_distance" in name for name in every)
    assert "symmetry/shppo_no_distance/1" in study.units(options(ablations=True))
    assert study.units(options(only=["symmetry/shppo"], seeds=[2])) == ["symmetry/shppo/2"]
    assert "builtin/comlrl_maac/0" not in every  # needs --comlrl-python
    assert "builtin/comlrl_maac/0" in study.units(options(comlrl_python="python"))


def test_the_default_model_trains_teams_of_builtin_alone(study):
    asked = study.units(options(default_model=True))
    assert "builtin/shppo/0" in asked and not any("single" in name or "symmetry" in name for name in asked)
    with pytest.raises(SystemExit, match="knows only the teams of builtin"):
        study.units(options(default_model=True, only=["symmetry"]))
    with pytest.raises(SystemExit, match="does not know symmetry/shppo"):
        study.units(options(default_model=True, only=["builtin/shppo", "symmetry/shppo"]))
    assert study.folder_name(options(default_model=True, points=5, split="test")).endswith("test-default-model")


def test_batches_are_those_of_the_command_line(study):
    def unit_of(name, **changes):
        chosen = options(problems=3, replies=2, **changes)
        return study.unit_of(name, study.FAMILIES["builtin"][name], chosen)

    for name, rows in (("shared_ppo", 12), ("single_ppo", 6)):
        [condition] = unit_of(name).args
        sizes = {"per_device_train_batch_size": rows, "num_generations": 2}
        assert condition.settings.items() >= {**study.FAMILIES["builtin"][name].settings, **sizes}.items()
    assert unit_of("madpo").keywords == {}
    assert unit_of("shared_ppo", decay=True).keywords == {"decay": True}
    given = {"batch": 3, "num_generations": 2, "python": "python", "learning_rate": 0.1}
    assert unit_of("comlrl_maac", comlrl_python="python", comlrl_learning_rate=0.1).keywords == given


def test_units_run_and_are_reported(study, reporting, tiny_model, problems, tmp_path):
    """A unit of every kind on a random model; what it leaves is what the report reads."""
    names = ("untrained", "shared_ppo", "magrpo", "shppo", "shppo_no_value", "separate")
    train = load_problems("builtin", "train").select(range(16))
    for name in names:
        plan = study.FAMILIES["symmetry"][name]
        small = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
        plan = study.Condition(**{**vars(plan), "settings": plan.settings | small})
        result = study.run_unit(plan, 0, tiny_model, 40, train, problems, points=2, num_samples=1)
        assert [len(values) for values in result["final"].values()] == [len(problems)] * 4
        assert (result["ledger"]["tokens"] >= 40) == plan.trained
        assert len(result["curve"]) == plan.trained
        assert set(result["dissected"]) == (
            {"cores_zero", "latents_swapped", "latents_equal"} if name == "shppo" else set()
        )
        study.result_path(tmp_path, "x").parent.mkdir(exist_ok=True)
        path = study.result_path(tmp_path, f"symmetry/{name}/0")
        path.write_text(json.dumps({"unit": f"symmetry/{name}/0", "tokens": 40, **result}))
    assert result["ledger"]["evaluator_calls"] > 0 and result["ledger"]["sandbox_seconds"] > 0
    reporting.report(tmp_path, study.FAMILIES)
    text = (tmp_path / "report.md").read_text()
    assert all(f"| {study.FAMILIES['symmetry'][name].label} | 1 |" in text for name in names)
    assert "points above the shared policy" in text and "C = 0" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"symmetry-curves.png"}


def test_learning_rates_decay_with_the_tokens(study, tiny_model, problems):
    plan = study.FAMILIES["builtin"]["magrpo"]
    settings = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8, "logging_steps": 1}
    train = load_problems("builtin", "train").select(range(16))

    def rates(**decay):
        condition = study.replace(plan, settings=plan.settings | settings)
        result = study.run_unit(condition, 0, tiny_model, 100, train, problems, points=1, num_samples=1, **decay)
        return [entry["learning_rate"] for entry in result["history"] if "learning_rate" in entry]

    assert set(rates()) == {1e-3}
    first, *_, last = decayed = rates(decay=True)
    assert decayed == sorted(decayed, reverse=True) and len(set(decayed)) == len(decayed) > 2
    assert first == 1e-3 and 0 < last < 0.5e-3


def test_what_is_there_or_in_work_is_not_run_again(study, tmp_path, monkeypatch):
    ran = []

    def run(command, **kwargs):
        unit = command[command.index("--unit") + 1]
        ran.append(unit)
        if unit.endswith("/1"):
            return SimpleNamespace(returncode=1)
        study.result_path(tmp_path, unit).write_text("{}")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--tokens", "1"])
    asked = "learning.py", study.units(options(only=["symmetry/shppo", "symmetry/separate"])), tmp_path
    run_missing = sys.modules["common"].run_missing
    busy = study.result_path(tmp_path, "symmetry/separate/0").with_suffix(".lock")
    busy.parent.mkdir()
    with FileLock(busy):
        assert run_missing(*asked) == ["symmetry/shppo/1", "symmetry/separate/1"]
    assert ran == ["symmetry/shppo/0", "symmetry/shppo/1", "symmetry/separate/1"]
    ran.clear()
    run_missing(*asked)  # one crashed and is run again; one was being run elsewhere
    assert ran == ["symmetry/separate/0", "symmetry/shppo/1", "symmetry/separate/1"]


def test_no_results(study, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learning.py", "--report", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no results yet\. Run learning\.py without --report"):
        study.main()


class TestPeers:
    def test_rounds_of_madpo(self, study, tiny_model, problems, monkeypatch):
        from marcog_trl import preferences

        def length(replies, **columns):  # what a random model writes is no solution
            return [float(sum(map(len, texts.values()))) for texts in replies]

        collect = functools.partial(preferences.collect_preferences, reward_funcs=length)
        monkeypatch.setattr(preferences, "collect_preferences", collect)
        train = load_problems("builtin", "train")
        tiny = {"max_completion_length": 4, "num_candidates": 2, "max_steps": 1}
        result = study.run_peer(study.madpo, 0, tiny_model, 200, train, problems, points=2, num_samples=1, **tiny)
        [point] = result["curve"]
        assert 100 <= point["tokens"] < 200 <= result["ledger"]["tokens"] and result["ledger"]["optimizer_steps"] == 2
        assert [len(result["final"][name]) for name in ("solved", "greedy")] == [len(problems)] * 2

    def test_two_models_are_measured_as_a_team_is(self, study, tiny_model, problems, tmp_path):
        """The replies of a model as both agents are graded alike; here, they are wrong."""
        for agent in ("agent_0", "agent_1"):
            (tmp_path / agent).symlink_to(tiny_model)
        models = study.TwoModels(tmp_path, new_tokens=4)
        assert study.measure(models, problems, 2) == {"solved": [0.0] * 3, "greedy": [0.0] * 3}

        class Reads:
            """A model that gives the replies it was given."""

            def generate(self, input_ids, attention_mask, **kwargs):
                import torch

                return torch.cat([input_ids, self.replies], 1)

        for agent, column in (("helper", "aux"), ("main", "main")):
            models.models[agent] = model = Reads()
            texts = [row[column] for row in problems]
            model.replies = models.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")[
                "input_ids"
            ]
        assert study.measure(models, problems, 1) == {"solved": [1.0] * 3, "greedy": [1.0] * 3}

    def test_judge(self):
        script = BENCHMARKS / "comlrl_learning.py"
        problem = load_problems("builtin", "train")[0]
        right, wrong = [problem["aux"], problem["main"]], ["", ""]
        questions = [json.dumps({"index": 0, "replies": replies}) for replies in ([wrong], [right, wrong])]
        answered = subprocess.run(
            [sys.executable, str(script), "--task", json.dumps(["judge", {}])],
            input="\n".join(questions),
            capture_output=True,
            text=True,
        )
        assert answered.returncode == 0 and answered.stdout == "[0.0]\n[1.0, 0.0]\n", answered.stderr[-2000:]
