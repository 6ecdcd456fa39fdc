"""The report of a run: what is in it, who writes it, that it is whole after a resume, and that it ends no run."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from teams import Pair, dataset, generation_batch, letters, make, script

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOConfig, MultiAgentPPOTrainer, ReportCallback, SHPPOTrainer
from marcog_trl.report import callback, drawing
from marcog_trl.report.figures import LATENTS


ROOT = Path(__file__).parents[2]
RESULTS = {
    name: {"solved": share, "solved_interval": [share - 0.05, share + 0.04], "solved_greedy": share, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0}
    for name, share in (("untrained", 0.25), ("trained", 0.75))
}  # fmt: skip


class Page(HTMLParser):
    """Headings, text and images of a page; fails on tags that are not closed in order."""

    def __init__(self, path):
        super().__init__()
        self.open, self.headings, self.texts, self.images = [], [], [], []
        self.source = Path(path).read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(base64.b64decode(dict(attrs)["src"].removeprefix("data:image/png;base64,")))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def run(model, path, trainer, **options):
    """A reported run of two steps with replies from a script."""
    options = {"workflow": Pair(), "write_report": True, "max_steps": 2, **options}
    made = make(model, path, trainer, **options)
    script(made)
    made.train()
    return made


def latents_of(trainer):
    return [(log["step"], log[LATENTS]) for log in trainer.state.log_history if LATENTS in log]


class TestReport:
    @pytest.mark.parametrize(
        ("trainer", "options", "shown", "absent"),
        [
            (SHPPOTrainer, {"beta": 0.1}, {"Critic", "Latents of the agents", "Diversity", "Role balance"}, set()),
            (
                MultiAgentPPOTrainer,
                {"critic": "none"},
                {"Reward and solved share"},
                {"Critic", "Latents of the agents", "Diversity"},
            ),
            (
                MultiAgentGRPOTrainer,
                {},
                {"Reward and solved share"},
                {"Critic", "Latents of the agents", "Diversity"},
            ),
        ],
    )
    def test_shows_what_the_trainer_logs(self, tiny_model, tmp_path, trainer, options, shown, absent):
        made = run(tiny_model, tmp_path, trainer, **options)
        page = Page(tmp_path / "report.html")
        always = {"The run", "Agents", "Rewards of the agents", "KL and entropy", "Replies of the agents", "Metrics"}
        assert (shown | always) <= set(page.headings) and not absent & set(page.headings)
        files = {path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
        assert set(page.images) == files and all(image.startswith(b"\x89PNG") for image in files)
        text = " ".join(page.texts)
        for words in (made._name, "You are a.", tiny_model, "Pair, 2 agents, 1 turn", "letters", "Step 2 of 2"):
            assert words in text

    def test_needs_no_other_file(self, tiny_model, tmp_path):
        run(tiny_model, tmp_path, MultiAgentPPOTrainer)
        source = Page(tmp_path / "report.html").source
        assert not re.search(r"https?://|<link|<script|url\(|@import", source)
        assert all(target.startswith("data:image/png;base64,") for target in re.findall(r'src="([^"]*)"', source))

    def test_takes_texts_literally(self, tiny_model, tmp_path):
        workflow = Pair(("<b>a</b>", "b&c"))
        run(tiny_model, tmp_path, MultiAgentPPOTrainer, workflow=workflow)
        page = Page(tmp_path / "report.html")
        assert "<b>" not in page.source and "You are <b>a</b>." in page.texts and "b&c" in page.texts

    def test_shows_the_results_that_it_is_given(self, tiny_model, tmp_path):
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer)
        trainer.report.write({**RESULTS, "seconds": 3.0})
        page = Page(tmp_path / "report.html")
        assert "Held-out problems" in page.headings and {
            "0.250 (0.200 to 0.290)",
            "0.750 (0.700 to 0.790)",
            "+0.500",
        } <= set(page.texts)

    def test_shows_replies_before_and_after_training(self, tiny_model, tmp_path):
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer)
        before = {"replies": {"a": "x < y"}, "passed": False, "verdict": "failed: 0 of 2 tests passed."}
        after = {"replies": {"a": "x & y"}, "passed": True, "verdict": "passed: 2 of 2 tests passed."}
        trainer.report.write(RESULTS, [{"prompt": "Write <f>.", "untrained": before, "trained": after}])
        trainer.report.write()  # later reports have them, too
        page = Page(tmp_path / "report.html")
        assert "Before and after training" in page.headings
        assert {"Write <f>.", "x < y", "x & y", before["verdict"], after["verdict"]} <= set(page.texts)
        assert page.source.count('class="verdict passed"') == 1

    def test_states_the_cost_of_held_out_problems(self, tiny_model, tmp_path):
        options = {"eval_dataset": dataset(3), "eval_strategy": "steps", "eval_steps": 1}
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer, **options)
        history = trainer.state.log_history
        for log in history:
            log |= {"eval_runtime": 2.0} if "eval_runtime" in log else {"step_time": 6.0}
        trainer.report.write()
        text = " ".join(Page(tmp_path / "report.html").texts)
        assert "On held-out problems: 3 problems, 1 episode of each, every step." in text
        assert "That took 4 seconds in all, 25% of the time of the training." in text

    def test_names_what_is_left_out_and_what_went_wrong(self, tiny_model, tmp_path):
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer)
        trainer.diagnosis.found["reward"] = "The reward was 0."
        trainer.report.write()
        page = Page(tmp_path / "report.html")
        assert "The reward was 0." in page.texts
        assert "Left out, because it was 0 all the time: " not in " ".join(page.texts)
        for log in trainer.state.log_history:
            log["entropy"] = 0.0
        trainer.report.write()
        text = " ".join(Page(tmp_path / "report.html").texts)
        assert "Left out, because it was 0 all the time: Entropy of the policy." in text

    def test_says_that_nothing_was_logged(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, workflow=Pair(), write_report=True)
        trainer.report.write()
        page = Page(tmp_path / "report.html")
        assert "Nothing that could be drawn was logged yet." in page.texts and page.images == []

    def test_is_not_written_unless_asked_for(self, tiny_model, tmp_path):
        assert run(tiny_model, tmp_path, MultiAgentPPOTrainer, write_report=False).report is None
        assert not list(tmp_path.rglob("report.html")) and not (tmp_path / "pictures").exists()

    def test_can_be_added_to_a_trainer(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, workflow=Pair())
        trainer.add_callback(ReportCallback(trainer))
        trainer.train()
        assert Page(tmp_path / "report.html").images

    def test_pictures_of_a_run_before_are_taken_away(self, tiny_model, tmp_path):
        (tmp_path / "pictures").mkdir()
        for name in ("value-loss.png", "mine.png"):
            (tmp_path / "pictures" / name).write_bytes(b"old")
        run(tiny_model, tmp_path, MultiAgentPPOTrainer, critic="none")
        assert not (tmp_path / "pictures" / "value-loss.png").exists()
        assert (tmp_path / "pictures" / "mine.png").read_bytes() == b"old"

    def test_is_written_at_every_save_and_at_the_end(self, tiny_model, tmp_path, monkeypatch):
        steps = []
        monkeypatch.setattr(ReportCallback, "write", lambda self: steps.append(self.trainer.state.global_step))
        run(tiny_model, tmp_path, MultiAgentPPOTrainer, max_steps=5, save_strategy="steps", save_steps=2)
        assert steps == [2, 4, 5, 5]


class TestLatents:
    @pytest.mark.parametrize("scope", ["agent", "observation"])
    def test_are_the_means_of_each_agent(self, tiny_model, tmp_path, scope):
        trainer = make(tiny_model, tmp_path, SHPPOTrainer, workflow=Pair(), latent_scope=scope)
        script(trainer)
        output = generation_batch(trainer)
        trainer.log({})
        own = output["team_obs"][torch.arange(len(output["agent"])), output["agent"]]
        with torch.no_grad():
            mu = trainer.modules.latent_net(own)[0]
        for i, agent in enumerate(("a", "b")):
            expected = mu[output["agent"] == i]
            assert torch.allclose(torch.tensor(trainer.agent_latents[agent]), expected.mean(0), atol=2e-5)
            assert (expected.std(0).max() < 1e-6) == (scope == "agent")

    def test_are_those_since_the_last_log_and_of_training_only(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, SHPPOTrainer, workflow=Pair())
        script(trainer)
        generation_batch(trainer)
        trainer.model.eval()
        trainer.log({})
        assert trainer.agent_latents is None
        trainer.model.train()
        trainer.log({})
        assert set(trainer.agent_latents) == {"a", "b"}
        trainer.log({})
        assert trainer.agent_latents is None

    def test_survive_a_resume(self, tiny_model, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = run(tiny_model, tmp_path, SHPPOTrainer, **options)
        resumed = make(tiny_model, tmp_path, SHPPOTrainer, workflow=Pair(), write_report=True, **options)
        script(resumed)
        (tmp_path / "report.html").unlink()
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        steps, before = zip(*latents_of(resumed), strict=True)
        assert steps == (1, 2, 3, 4) and before[:2] == tuple(latents for _, latents in latents_of(whole))[:2]
        saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
        assert [log[LATENTS] for log in saved if LATENTS in log] == list(before)
        assert "Latents of the agents" in Page(tmp_path / "report.html").headings


class TestFaults:
    def test_a_broken_picture_is_left_out_with_a_warning(self, tiny_model, tmp_path, monkeypatch, caplog):
        def broken(axis, plot):
            raise FloatingPointError("no plane")

        monkeypatch.setattr(drawing, "_draw_plane", broken)
        trainer = run(tiny_model, tmp_path, SHPPOTrainer)
        assert trainer.state.global_step == 2
        page = Page(tmp_path / "report.html")
        assert "Mean latents: this picture could not be drawn. The log of the run has the error." in page.texts
        assert len(page.images) == len(list((tmp_path / "pictures").iterdir())) >= 5
        assert "The picture 'Mean latents' was not drawn: FloatingPointError('no plane')" in caplog.text

    def test_a_full_disk_does_not_end_the_run_and_leaves_the_report_before(
        self, tiny_model, tmp_path, monkeypatch, caplog
    ):
        (tmp_path / "report.html").write_text("before")

        def full(path, content):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(callback, "write_whole", full)
        trainer = run(tiny_model, tmp_path, MultiAgentPPOTrainer)
        assert trainer.state.global_step == 2 and (tmp_path / "report.html").read_text() == "before"
        assert "No space left on device" in caplog.text

    def test_a_tracker_that_fails_does_not_end_the_run(self, tiny_model, tmp_path, monkeypatch, caplog):
        def down(self):
            raise ConnectionError("down")

        monkeypatch.setattr(ReportCallback, "_show_in_trackers", down)
        assert run(tiny_model, tmp_path, MultiAgentPPOTrainer).state.global_step == 2
        assert "ConnectionError('down')" in caplog.text

    @pytest.mark.parametrize("name", ["report.html", "pictures"])
    def test_a_folder_without_room_is_refused_at_once(self, tiny_model, tmp_path, name):
        if name == "pictures":
            (tmp_path / name).write_text("")
        else:
            (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=f"output_dir=.*{name}' is in the way\\. .*, or set write_report=False"):
            make(tiny_model, tmp_path, workflow=Pair(), write_report=True)

    def test_a_run_that_logs_nothing_is_refused_at_once(self):
        with pytest.raises(ValueError, match=r"logging_strategy='no' logs nothing\. Set logging_strategy='steps', or"):
            MultiAgentPPOConfig("out", use_cpu=True, bf16=False, write_report=True, logging_strategy="no")


class TestTrackers:
    def test_tensorboard_gets_the_pictures(self, tiny_model, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run(tiny_model, tmp_path, SHPPOTrainer, report_to="tensorboard")
        (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
        events = EventAccumulator(str(folder)).Reload()
        expected = {f"report/{path.stem}" for path in (tmp_path / "pictures").iterdir()}
        assert set(events.Tags()["images"]) == expected and "report/mean-latents" in expected
        assert events.Images("report/mean-latents")[0].step == 2
        assert "train/reward" in events.Tags()["scalars"]

    def test_wandb_gets_the_pictures(self, tiny_model, tmp_path, monkeypatch):
        import wandb

        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        wandb.teardown()  # of an earlier test in this process, whose settings it would use again
        try:
            run(tiny_model, tmp_path / "team", SHPPOTrainer, report_to="wandb")
            images = Path(wandb.run.dir).rglob("media/images/report/*")
            sent = {path.name.rsplit("_", 2)[0] for path in images}
        finally:
            wandb.finish()
        assert sent == {path.stem for path in (tmp_path / "team" / "pictures").iterdir()}


class TestProcesses:
    def test_only_the_main_one_writes(self, tiny_model, tmp_path):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes/ddp.yaml")]
        command += ["--num_processes", "2", __file__, tiny_model, str(tmp_path)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        first, second = (json.loads((tmp_path / f"process-{i}.json").read_text()) for i in range(2))
        assert "report.html" in first["written"] and "mean-latents.png" in first["written"] and second["written"] == []
        assert first["latents"] == second["latents"] and len(first["latents"]) == 2
        assert "2 on cpu" in (tmp_path / "report.html").read_text()


def main(model, path):
    """A run on each of two processes, which notes what this one writes."""
    written = []
    write = callback.write_whole
    callback.write_whole = lambda path, content: (written.append(path.name), write(path, content))
    trainer = make(model, path, SHPPOTrainer, letters, workflow=Pair(), write_report=True, max_steps=2)
    trainer.train()
    note = {"written": written, "latents": latents_of(trainer)}
    (Path(path) / f"process-{trainer.accelerator.process_index}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main(*sys.argv[1:])
