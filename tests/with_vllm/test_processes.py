"""Two processes, launched as a user would, in which other numbers of agents speak at the same moment."""

import json
from pathlib import Path

import pytest
from launched import launched
from transformers import AutoModelForCausalLM


SCRIPT = Path(__file__).with_name("train_team.py")


def launch(model, path, mode):
    launched("ddp", SCRIPT, model, path, mode, timeout=600)
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_samples_from_the_agents_of_now(tiny_model, tmp_path):
    one, two = launch(tiny_model, tmp_path, "colocate")
    assert one["rows"] != two["rows"]
    assert len(one["difference"]) == 3 and max(one["difference"]) < 1e-3  # over both
    assert one["policy"] == pytest.approx(two["policy"], abs=1e-9)


def test_a_server_s_replies_go_to_the_rows_that_asked(tiny_model, tmp_path):
    one, two = launch(tiny_model, tmp_path, "server")
    assert one["rows"] != two["rows"]
    assert [result["right"] for result in (one, two)] == [result["rows"] for result in (one, two)]
    # Before every step the main process sends the language model, and nothing of the team's own
    names = list(dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()))
    assert [list(weights) for weights in one["weights"]] == [names] * 3 and two["weights"] == []
    assert one["weights"][0] != one["weights"][1] != one["weights"][2]
