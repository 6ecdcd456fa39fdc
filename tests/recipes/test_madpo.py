"""The MADPO recipe as it is run: rounds on a tiny model, which are continued, and what is refused before any work."""

import functools
import json
from pathlib import Path

import pytest

from marcog_trl import Team


FOLDER = Path(__file__).parents[2] / "recipes"
FLAGS = [
    "--isolation", "best_effort", "--report_to", "none", "--dataset_train_split", "train[:3]", "--dataset_test_split",
    "test[:2]", "--num_test_samples", "1", "--per_device_train_batch_size", "2", "--max_completion_length", "6", "--max_steps", "2",
    "--num_candidates", "3", "--min_pairs", "1", "--bf16", "false", "--parameter_sharing", "latent",
    "--reward", f"{FOLDER.parent}/tests/helpers/lengths.py:lengths",
]  # fmt: skip


@pytest.fixture
def train(run_recipe):
    return functools.partial(run_recipe, "madpo", *FLAGS)


def test_rounds_end_with_a_team_and_can_be_continued(train, tmp_path):
    printed = train("--num_rounds", "1")
    assert "round 1" in printed and "2 held-out problems, 1 samples each" in printed
    assert "step 2 of 2  trained in" in printed and "{'loss'" not in printed
    assert all(
        f"marcog_trl {name} --team" in printed.replace("marcog-trl", "marcog_trl") for name in ("solve", "evaluate")
    )
    out = tmp_path / "out"
    assert (out / "round_01" / "policy" / "metrics.jsonl").is_file()
    assert json.loads((out / "results.json").read_text())["rounds"].keys() == {"untrained", "round 1"}
    first = (out / "adapter_model.safetensors").read_bytes()
    assert first == (out / "round_01" / "policy" / "adapter_model.safetensors").read_bytes()
    assert Team.from_pretrained(out, isolation="best_effort").settings.parameter_sharing == "latent"

    with pytest.raises(
        SystemExit, match=r"^error: output_dir='.*out' holds rounds of an earlier run\. Set --resume_from"
    ):
        train("--num_rounds", "2")
    with pytest.raises(SystemExit, match=r"holds rounds of another run: beta is 0\.1, but 0\.5 in this run"):
        train("--num_rounds", "2", "--resume_from_checkpoint", "true", "--beta", "0.5")
    train("--num_rounds", "2", "--resume_from_checkpoint", "true")
    assert (out / "adapter_model.safetensors").read_bytes() != first
    (out / "round_notes.txt").write_text("mine")
    train("--num_rounds", "1", "--overwrite_output_dir", "true", "--reference", "round")
    assert not (out / "round_02").exists() and (out / "round_notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min_pairs", "999"), r"error: Round 1 has \d+ pairs, fewer than min_pairs=999"),
        (("--eval_strategy", "steps", "--eval_steps", "1"), "the team is evaluated after every round"),
        (("--loss_type", "aot"), "loss_type='aot' is unknown"),
        (("--start_team", "nowhere"), "'nowhere' is not a folder"),
    ],
)
def test_bad_input_is_one_line(train, flags, message):
    with pytest.raises(SystemExit, match=message) as ended:
        train("--num_test_samples", "0", *flags)
    assert "\n" not in str(ended.value)
