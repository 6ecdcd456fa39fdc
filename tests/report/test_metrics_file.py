"""All metrics of a run in a file: one line per log, also after a resume."""

import json
import math

import pandas as pd
import teams

from marcog_trl.report.metrics_file import MetricsFile


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def make(model, path, **options):
    trainer = teams.make(model, path, workflow=teams.Pair(), **options)
    trainer.add_callback(MetricsFile())
    teams.script(trainer)
    return trainer


def test_holds_every_log(tiny_model, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of an earlier run\n")
    trainer = make(
        tiny_model, tmp_path, max_steps=2, eval_dataset=teams.dataset(2), eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert lines(tmp_path) == trainer.state.log_history and len(lines(tmp_path)) == 5
    table = pd.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert table["tokens_per_second"].dropna().gt(0).tolist() == [True, True]
    assert table["eval_reward"].count() == 2
    trainer.log({"loss": math.nan, "norm": math.inf})  # which JSON does not have
    assert lines(tmp_path)[-1]["loss"] is None and lines(tmp_path)[-1]["norm"] is None


def test_a_resumed_run_goes_on_from_its_checkpoint(tiny_model, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    make(tiny_model, tmp_path, **options).train()
    make(tiny_model, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["step"] for log in lines(tmp_path)] == [1, 2, 3, 3]  # the last is the summary


def test_a_full_disk_does_not_end_the_run(tiny_model, tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    trainer = make(tiny_model, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2 and "No space left on device" in caplog.text
