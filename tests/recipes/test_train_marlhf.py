"""Short runs of recipes/train_marlhf.py."""

import functools
import json
from pathlib import Path

import pytest

from marcog_trl import save_untrained_team
from marcog_trl.team.settings import TeamSettings


FOLDER = Path(__file__).parents[2] / "recipes"
FLAGS = [
    "--workflow", "collaboration", "--isolation", "best_effort", "--num_workers", "1", "--report_to", "none",
    "--dataset_train_split", "train[:4]", "--dataset_test_split", "test[:2]", "--num_test_samples", "1",
    "--per_device_train_batch_size", "8", "--num_generations", "2", "--max_completion_length", "8", "--max_steps", "3",
    "--logging_steps", "1", "--bf16", "false", "--learning_rate", "1e-2", "--reward_learning_rate", "1e-2",
    "--num_candidates", "4", "--min_pairs", "2", "--held_out_problems", "0.25", "--reward_num_train_epochs", "2",
]  # fmt: skip


@pytest.fixture
def train(run_recipe):
    return functools.partial(
        run_recipe, "marlhf", *FLAGS, "--reward", f"{FOLDER.parent}/tests/helpers/lengths.py:lengths"
    )


def test_rounds_with_the_true_reward_beside_the_model(train, tmp_path):
    printed = train("--num_rounds", "2")
    assert "reward model of round 2 metrics" in printed and "2 held-out problems, 1 samples each" in printed
    folder, begins = tmp_path / "out", []
    for number in (1, 2):
        of_round = folder / f"round_{number:02}"
        assert 0 <= json.loads((of_round / "reward_model" / "eval_results.json").read_text())["eval_accuracy"] <= 1
        logs = [json.loads(line) for line in (of_round / "policy" / "metrics.jsonl").read_text().splitlines()]
        logs = [log for log in logs if "rewards/reward_model/mean" in log]
        assert len(logs) == 3
        for log in logs:  # the true reward has weight 0
            assert (
                log["reward"] == pytest.approx(log["rewards/reward_model/mean"], abs=1e-5)
                and log["rewards/lengths/mean"] > 0
            )
        begins.append(logs[0]["kl"])
        page = (of_round / "policy" / "report.html").read_text()
        assert 'alt="Reward functions"' in page and 'alt="KL to the reference"' in page
    # KL is measured from the first team: in the second round it begins above 0
    assert begins[0] == pytest.approx(0, abs=1e-6) and begins[1] > 1e-4
    with pytest.raises(SystemExit, match="holds rounds of another run: reward_batch_size is 8, but 4 in this run"):
        train("--num_rounds", "2", "--reward_batch_size", "4", "--resume_from_checkpoint", "true")
    policy = folder / "round_02" / "policy" / "adapter_model.safetensors"
    before = policy.stat()
    train("--num_rounds", "2", "--resume_from_checkpoint", "true")
    assert policy.stat() == before and policy.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def test_a_reward_model_that_is_given(train, tmp_path, tiny_model):
    few = ("--num_test_samples", "0", "--write_report", "false")
    train(*few)
    given = tmp_path / "out" / "round_01" / "reward_model"
    other = tmp_path / "other"
    train(*few, "--reward_model", str(given), "--output_dir", str(other))
    assert not (other / "round_01" / "reward_model").exists() and (other / "adapter_model.safetensors").is_file()
    with pytest.raises(SystemExit, match=r"is not the reward model of a team: it has no reward_model\.json"):
        train("--reward_model", tiny_model, "--output_dir", str(tmp_path / "third"))
    assert not (tmp_path / "third" / "round_00").exists()


def test_another_recipe_trains_on_a_saved_reward_model(train, run_recipe, tmp_path):
    train("--num_test_samples", "0", "--max_steps", "1", "--write_report", "false")
    folder = tmp_path / "maac"
    flags = [
        *FLAGS[: FLAGS.index("--reward_learning_rate")], "--num_test_samples", "0", "--max_steps", "1", "--eval_strategy", "no",
        "--output_dir", str(folder), "--reward", str(tmp_path / "out" / "round_01" / "reward_model"),
    ]  # fmt: skip
    run_recipe("maac", *flags)
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


def test_a_team_that_does_not_share_one_adapter(train, tmp_path, tiny_model):
    start = tmp_path / "start"
    settings = TeamSettings(workflow="collaboration", parameter_sharing="latent")
    save_untrained_team(start, tiny_model, settings)
    with pytest.raises(
        SystemExit, match=r"has parameter_sharing='latent', but MARLHF trains one adapter that all agents share"
    ):
        train("--start_team", str(start))
    assert not (tmp_path / "out" / "round_00").exists()
