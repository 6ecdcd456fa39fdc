"""The report of a run: what is in it, who writes it, that it is whole after a resume, and that it ends no run."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest
from teams import Pair, dataset, make, script

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.report.callback import ReportCallback


RESULTS = {
    name: {"solved": share, "solved_interval": [share - 0.05, share + 0.04], "solved_greedy": share, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0}
    for name, share in (("untrained", 0.25), ("trained", 0.75))
}  # fmt: skip


class Page(HTMLParser):
    """Headings, texts and pictures of a page; fails on tags that are not closed in order."""

    def __init__(self, folder):
        super().__init__()
        self.open, self.headings, self.texts, self.pictures = [], [], [], {}
        self.source = (Path(folder) / "report.html").read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            shown = dict(attrs)
            self.pictures[shown["alt"]] = base64.b64decode(shown["src"].removeprefix("data:image/png;base64,"))
        if tag not in ("img", "input", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def run(model, path, trainer=MultiAgentPPOTrainer, resume=None, **options):
    """A reported run of two steps with replies from a script."""
    options = {"workflow": Pair(), "write_report": True, "max_steps": 2, **options}
    made = make(model, path, trainer, **options)
    script(made)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize(
    ("trainer", "options", "shown", "absent"),
    [
        (SHPPOTrainer, {"beta": 0.1}, {"Variance that the critic explains", "Distance of the latents"}, set()),
        (MultiAgentGRPOTrainer, {}, set(), {"Variance that the critic explains", "Distance of the latents"}),
    ],
)
def test_shows_what_the_trainer_logs(tiny_model, tmp_path, trainer, options, shown, absent):
    made = run(tiny_model, tmp_path, trainer, **options)
    page = Page(tmp_path)
    always = {"Reward", "Reward per agent", "Entropy of the policy", "Gradient per agent", "Length of a reply"}
    assert (shown | always) <= set(page.pictures) and not absent & set(page.pictures)
    assert all(image.startswith(b"\x89PNG") for image in page.pictures.values())
    assert page.headings == ["The run", "Agents", "Pictures", "Metrics", "Settings"]
    text = " ".join(page.texts)
    for words in (made._name, "You are a.", tiny_model, "Pair", "letters", "Step 2 of 2", "ledger/evaluations"):
        assert words in text


def test_names_the_settings_that_differ_from_their_defaults(tiny_model, tmp_path):
    run(tiny_model, tmp_path, max_completion_length=7, hub_token="secret", temperature=1.0)
    texts = Page(tmp_path).texts
    assert texts[texts.index("max_completion_length") + 1] == "7"
    assert "secret" not in texts and "temperature" not in texts and "top_k" not in texts


def test_takes_texts_literally(tiny_model, tmp_path):
    run(tiny_model, tmp_path, workflow=Pair(("<b>a</b>", "b&c")))
    page = Page(tmp_path)
    assert "<b>" not in page.source and "You are <b>a</b>." in page.texts and "b&c" in page.texts


def test_shows_results_and_replies_before_and_after_training(tiny_model, tmp_path):
    trainer = run(tiny_model, tmp_path)
    tests = {"tests": 2, "message": ""}
    before = {"replies": {"a": " x < y"}, "status": "failed", "tests_passed": 0, **tests}
    after = {"replies": {"a": "x & y"}, "status": "passed", "tests_passed": 2, **tests}
    examples = [{"prompt": "Write <f>.", "untrained": before, "trained": after}]
    trainer.report.write(trainer.args, trainer.state, {**RESULTS, "seconds": 3.0}, examples)
    page = Page(tmp_path)
    assert page.headings[:2] == ["Held-out problems", "Before and after training"]
    assert {"0.250 (0.200 to 0.290)", "0.750 (0.700 to 0.790)", "+0.500"} <= set(page.texts)
    assert {"Write <f>.", "x < y", "x & y", "failed: 0 of 2 tests passed."} <= set(page.texts)
    assert page.source.count('class="verdict passed"') == 1


def test_says_what_went_wrong(tiny_model, tmp_path):
    run(tiny_model, tmp_path, reward=lambda completions, **_: [0.0] * len(completions), max_steps=5)
    assert any(text.startswith("The reward was 0 in the last 5 logs") for text in Page(tmp_path).texts)


def test_is_written_at_every_save_and_at_the_end(tiny_model, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(ReportCallback, "write", lambda self, args, state: steps.append(state.global_step))
    run(tiny_model, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    assert steps == [2, 4, 5, 5]


def test_is_whole_after_a_resume(tiny_model, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    whole = run(tiny_model, tmp_path, eval_dataset=dataset(2), eval_strategy="steps", eval_steps=1, **options)
    resumed = run(tiny_model, tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    steps = [log["step"] for log in resumed.state.log_history if "reward" in log]
    assert steps == [1, 2, 3] and resumed.state.log_history[0] == whole.state.log_history[0]
    texts = Page(tmp_path).texts
    assert "eval_reward" in texts  # of the steps before, as the second run measures none


def test_a_report_that_cannot_be_written_does_not_end_the_run(tiny_model, tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    assert run(tiny_model, tmp_path).state.global_step == 2
    assert "The report of the run was not written" in caplog.text and "IsADirectoryError" in caplog.text
