"""The code in the guide of `marcog_trl/report`."""

import re
from pathlib import Path

import pandas
from teams import dataset, make, script

from marcog_trl import execution_reward
from marcog_trl.report.diagnosis import CRITIC_LOGS, LOGS
from marcog_trl.report.metrics_file import MetricsFile
from marcog_trl.report.plots import PANELS


GUIDE = Path(__file__).parents[2] / "marcog_trl" / "report" / "README.md"


def test_shows_a_run_reads_its_metrics_and_draws_its_pictures(tiny_model, tmp_path, monkeypatch, capsys):
    options = {"max_steps": 2, "workflow": "collaboration", "max_logged_episodes": 8}
    tests = {"task_id": list("wxyz"), "test": [["assert f0(1)"]] * 4, "test_format": ["asserts"] * 4}
    options |= {"data": dataset(4, entry_point=["f0"] * 4, **tests), "reward": execution_reward}
    trainer = make(tiny_model, tmp_path / "outputs" / "quickstart", **options)
    trainer.add_callback(MetricsFile())
    script(trainer)
    monkeypatch.chdir(tmp_path)
    of_console, of_metrics, of_episodes, of_pictures = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(of_console, {"trainer": trainer})
    trainer.train()
    assert "step 1 of 2  reward" in capsys.readouterr().out
    exec(of_metrics, {})
    assert "tokens_per_second" in capsys.readouterr().out
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    exec(of_episodes, {"pd": pandas})
    shown = capsys.readouterr().out
    assert "assert f0(1)" in shown and "helper" in shown and "---" in shown
    exec(of_pictures, {})
    assert {"Reward.png", "Reward per agent.png"} <= {path.name for path in tmp_path.glob("*.png")}
    assert "Name: reward" in capsys.readouterr().out


def test_names_every_picture():
    text = GUIDE.read_text()
    assert all(f"| {panel.title} |" in text for panel in PANELS)


def test_says_after_how_many_logs_a_run_is_warned_of():
    rows = re.findall(r"\| (\d+) logs \|", GUIDE.read_text())
    assert rows == [str(LOGS)] * 3 + [str(CRITIC_LOGS), str(LOGS)]
