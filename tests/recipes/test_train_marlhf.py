"""Short runs of recipes/train_marlhf.py."""

import importlib
import json
import warnings
from pathlib import Path

import pytest

from marcog_trl import save_untrained_team
from marcog_trl.cli import marlhf
from marcog_trl.cli.endings import interrupts
from marcog_trl.cli.train import train as train_recipe
from marcog_trl.team.settings import TeamSettings


RECIPES = Path(__file__).parents[2] / "recipes"
FLAGS = [
    "--workflow", "collaboration", "--isolation", "best_effort", "--num_workers", "1", "--report_to", "none",
    "--dataset_train_split", "train[:4]", "--dataset_test_split", "test[:2]", "--num_test_samples", "1",
    "--per_device_train_batch_size", "8", "--num_generations", "2", "--max_completion_length", "8", "--max_steps", "3",
    "--logging_steps", "1", "--bf16", "false", "--learning_rate", "1e-2", "--reward_learning_rate", "1e-2",
    "--num_candidates", "4", "--min_pairs", "2", "--held_out_problems", "0.25", "--reward_num_train_epochs", "2",
]  # fmt: skip


def lengths(completions, replies, **kwargs):
    """A reward by which replies of a model that solves nothing can be told apart."""
    return [sum(map(len, texts.values())) / 100 for texts in replies]


@pytest.fixture
def train(tiny_model, tmp_path, monkeypatch, capfd):
    """`train(*flags)`: a short run in this process; returns what it printed."""
    monkeypatch.syspath_prepend(RECIPES)
    recipe = importlib.import_module("train_marlhf").RECIPE
    monkeypatch.setattr("marcog_trl.rewards._REWARDS", {"lengths": lengths})
    flags = [
        *FLAGS,
        "--reward",
        "lengths",
        "--model_name_or_path",
        tiny_model,
        "--use_cpu",
        "--output_dir",
        str(tmp_path / "out"),
    ]

    def run(*argv):
        capfd.readouterr()
        with interrupts() as kept, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            marlhf.train(recipe, [*flags, *argv], kept)
        return capfd.readouterr().out

    return run


def test_rounds_with_the_true_reward_beside_the_model(train, tmp_path, monkeypatch):
    played = []
    trainer_class = marlhf.MultiAgentGRPOTrainer

    class Noted(trainer_class):
        def train(self, **kwargs):
            super().train(**kwargs)
            played.append(self)

    monkeypatch.setattr(marlhf, "MultiAgentGRPOTrainer", Noted)
    printed = train("--num_rounds", "2")
    assert "Reward model of round 2" in printed and "round 2" in printed
    folder = tmp_path / "out"
    for number in (1, 2):
        report = json.loads((folder / f"round_{number:02}" / "reward_model" / "report.json").read_text())
        assert report["pairs"] > 0 and report["problems"] == 1
    first, _ = played
    assert first.reward_weights.tolist() == [1, 0] and first.beta == 0.02
    for trainer in played:
        logs = [log for log in trainer.state.log_history if "rewards/reward_model/mean" in log]
        assert len(logs) == 3 and all("rewards/lengths/mean" in log for log in logs)
        page = (Path(trainer.args.output_dir).with_suffix("") / "report.html").read_text()
        assert 'alt="Reward functions"' in page and 'alt="KL to the reference"' in page
    # KL is measured from the first team: in the second round it begins above 0
    begins = [trainer.state.log_history[0]["kl"] for trainer in played]
    assert begins[0] == pytest.approx(0, abs=1e-6) and begins[1] > 1e-4
    with pytest.raises(SystemExit, match="holds rounds of another run: reward_batch_size is 8, but 4 in this run"):
        train("--num_rounds", "2", "--reward_batch_size", "4", "--resume_from_checkpoint", "true")
    before = (folder / "adapter_model.safetensors").read_bytes()
    train("--num_rounds", "2", "--resume_from_checkpoint", "true")
    assert len(played) == 2 and (folder / "adapter_model.safetensors").read_bytes() == before


def test_a_reward_model_that_is_given(train, tmp_path, tiny_model):
    few = ("--num_test_samples", "0", "--write_report", "false")
    train(*few)
    given = tmp_path / "out" / "round_01" / "reward_model"
    other = tmp_path / "other"
    train(*few, "--reward_model", str(given), "--output_dir", str(other))
    assert not (other / "round_01" / "reward_model").exists() and (other / "adapter_model.safetensors").is_file()
    with pytest.raises(SystemExit, match=r"is no reward model of a team: it has no reward_model\.json"):
        train("--reward_model", tiny_model, "--output_dir", str(tmp_path / "third"))
    assert not (tmp_path / "third" / "round_00").exists()


def test_another_recipe_trains_on_a_saved_reward_model(train, tmp_path, tiny_model):
    train("--num_test_samples", "0", "--max_steps", "1", "--write_report", "false")
    folder = tmp_path / "maac"
    flags = [
        *FLAGS[: FLAGS.index("--reward_learning_rate")], "--num_test_samples", "0", "--max_steps", "1", "--eval_strategy", "no",
        "--model_name_or_path", tiny_model, "--use_cpu", "--output_dir", str(folder),
    ]  # fmt: skip
    recipe = importlib.import_module("train_maac").RECIPE
    with interrupts() as kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_recipe(recipe, [*flags, "--reward", str(tmp_path / "out" / "round_01" / "reward_model")], kept)
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["rewards/reward_model/mean"] == pytest.approx(logged["reward"]) and logged["reward"] != 0


def test_a_team_of_another_workflow(train, tmp_path, tiny_model):
    start = tmp_path / "start"
    save_untrained_team(start, tiny_model, TeamSettings(workflow="collaboration", num_turns=2))
    with pytest.raises(
        SystemExit, match=r"workflow=Collaboration, num_turns=2 .*, but this run has Collaboration, 1 and"
    ):
        train("--start_team", str(start))
    assert not (tmp_path / "out" / "round_00").exists()


def test_too_few_pairs(train):
    with pytest.raises(SystemExit, match=r"pairs, fewer than min_pairs=1000\."):
        train("--min_pairs", "1000", "--num_test_samples", "0")


def test_a_team_that_does_not_share_one_adapter(train, tmp_path, tiny_model):
    start = tmp_path / "start"
    settings = TeamSettings(workflow="collaboration", parameter_sharing="latent")
    save_untrained_team(start, tiny_model, settings)
    with pytest.raises(
        SystemExit, match=r"has parameter_sharing='latent', but MARLHF trains one adapter that all agents share"
    ):
        train("--start_team", str(start))
    assert not (tmp_path / "out" / "round_00").exists()
