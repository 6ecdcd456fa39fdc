"""The Python code in the guide of `marcog_trl/team`, from top to bottom, against a local Hub."""

import re
from pathlib import Path

import teams
from local_hub import use_hub

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer


ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "marcog_trl" / "team" / "README.md"


def test_every_block_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = teams.dataset(4, entry_point=["f"] * 4)
    options = {"workflow": "collaboration", "isolation": "best_effort", "num_workers": 1}
    trainer = teams.make(tiny_model, tmp_path / "outputs" / "quickstart", SHPPOTrainer, data=data, **options)
    trainer.save_model()
    Path("recipes").symlink_to(ROOT / "recipes")
    options = {"data": data, "workflow": "recipes/examples/debate.py:Debate", "per_device_train_batch_size": 10}
    teams.make(tiny_model, tmp_path / "outputs" / "debate", **options).save_model()
    whole = {"full_finetuning": True, "peft_config": None, "workflow": "collaboration", "data": data}
    teams.make(tiny_model, tmp_path / "outputs" / "full", MultiAgentPPOTrainer, **whole).save_model()
    hub, names = use_hub(monkeypatch, tmp_path / "cache"), {"trainer": trainer}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(block.replace("path/to/base", tiny_model), names)
    assert "agents/main/adapter_model.safetensors" in hub.repos["user/team"]
    trainer.executor.close()
    assert names["team"].agents == ["helper", "main"]
    assert set(names["model"].peft_config) == {"helper", "main"}
