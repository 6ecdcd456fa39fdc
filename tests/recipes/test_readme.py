"""The Python code in the top-level README and in the guide of `marcog_trl/trainers`, on a tiny model and for one step."""

import re
from pathlib import Path

import pytest
import teams

from marcog_trl import SHPPOTrainer
from marcog_trl.rollout.engine import replay


ROOT = Path(__file__).parents[2]


def run(guide, tiny_model, folder, monkeypatch):
    """The names that the code of a guide defines."""
    monkeypatch.chdir(folder)
    trainers = []

    def train_briefly(trainer):
        trainer.args.max_steps = trainer.args.logging_steps = 1
        teams.script(trainer)
        trainers.append(trainer)

    names = {"train_briefly": train_briefly}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / guide).read_text(), re.DOTALL | re.MULTILINE):
        block = re.sub(r"Qwen/Qwen2.5-Coder-[\d.]+B-Instruct", tiny_model, block)
        exec(block.replace("trainer.train()", "train_briefly(trainer)\ntrainer.train()"), names)
    assert trainers and all(trainer.state.global_step == 1 for trainer in trainers)
    return names


def test_readme(tiny_model, tmp_path, monkeypatch):
    options = {"workflow": "collaboration", "isolation": "best_effort", "num_workers": 1}
    data = teams.dataset(4, entry_point=["f"] * 4)
    teams.make(tiny_model, tmp_path / "outputs" / "quickstart", SHPPOTrainer, data=data, **options).save_model()
    names = run("README.md", tiny_model, tmp_path, monkeypatch)
    assert (tmp_path / "outputs" / "python" / "team.json").exists()
    assert names["answer"].verdict.total == 1
    (rewards,) = names["brief_reward"](['"""Adds."""'], [{"writer": "a" * 100}])
    assert rewards == pytest.approx({"writer": 0.9})
    chat = [[{"role": "assistant", "content": '"""Adds."""'}]]
    assert names["brief_reward"](chat, [{"writer": "a" * 100}]) == [rewards]
    first, second = replay(names["Review"](), {"prompt": "Write f."}, [{"writer": "draft"}])
    assert "Write f." in first["writer"][0]["content"] and "draft" in second["reviewer"][0]["content"]


def test_guide_of_trainers(tiny_model, tmp_path, monkeypatch):
    run("marcog_trl/trainers/README.md", tiny_model, tmp_path, monkeypatch)
