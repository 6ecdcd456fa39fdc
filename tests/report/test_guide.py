"""The code in the guide of `marcog_trl/report`."""

import re
from pathlib import Path

from teams import dataset, make, script

from marcog_trl import SHPPOTrainer
from marcog_trl.report.diagnosis import CRITIC_LOGS, LOGS
from marcog_trl.report.metrics_file import MetricsFile
from marcog_trl.report.pictures import PICTURES, Picture


GUIDE = Path(__file__).parents[2] / "marcog_trl" / "report" / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_reads_the_metrics_and_draws_the_pictures_of_a_checkpoint(tiny_model, tmp_path, monkeypatch, capsys):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "write_report": True}
    options |= {"workflow": "collaboration", "data": dataset(4, entry_point=["f"] * 4)}
    trainer = make(tiny_model, tmp_path / "outputs" / "team", SHPPOTrainer, **options)
    trainer.add_callback(MetricsFile(trainer.args.output_dir))
    script(trainer)
    trainer.train()
    monkeypatch.chdir(tmp_path)
    exec(blocks()[0], {})
    assert "tokens_per_second" in capsys.readouterr().out
    exec(blocks()[1], {})
    assert {"reward.png", "latents.png"} <= {path.name for path in tmp_path.glob("*.png")}
    assert "Name: reward" in capsys.readouterr().out


def test_adds_a_picture():
    names = {}
    exec(blocks()[2], names)
    assert names["Picture"] is Picture and len(blocks()) == 3


def test_names_every_picture():
    text = GUIDE.read_text()
    assert all(f"| {picture.title} |" in text for picture in PICTURES)


def test_says_after_how_many_logs_a_run_is_warned_of():
    rows = re.findall(r"\| (\d+) logs \|", GUIDE.read_text())
    assert rows == [str(LOGS)] * 3 + [str(CRITIC_LOGS), str(LOGS)]
