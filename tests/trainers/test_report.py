"""The figures of a team: what counts as solved, and that measuring leaves no trace."""

import json
import math

import pytest
import teams
import torch

from marcog_trl import SHPPOTrainer, load_problems
from marcog_trl.trainers.report import evaluate_team, plot_curves, print_table, write_results


RIGHT, WRONG, BROKEN = "return x + 1", "return x", "return ("


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    data = teams.Dataset.from_dict(
        {
            "prompt": [f"def f{i}(x):" for i in range(3)],
            "test": [["assert f(1) == 2", "assert f(0) == 0 or f(0) == 1"]] * 3,
            "test_format": ["asserts"] * 3,
            "entry_point": ["f"] * 3,
        }
    )
    trainer = teams.make(
        tiny_model, tmp_path_factory.mktemp("report"), SHPPOTrainer, data=data, reward="execution_reward",
        isolation="best_effort", num_workers=1, per_device_train_batch_size=6,
    )  # fmt: skip
    yield trainer
    trainer.executor.close()


class TestEvaluateTeam:
    def test_counts_what_passes_what_parses_and_what_it_earns(self, trainer):
        batches = []

        def generate(prompt_ids, *rest):
            greedy = not trainer.generation_config.do_sample
            batches.append((len(prompt_ids), greedy, trainer.model.training))
            bodies = [RIGHT] * len(prompt_ids) if greedy else [RIGHT, WRONG, WRONG, BROKEN] * (len(prompt_ids) // 4)
            return [trainer._tokenizer(f"def f(x):\n    {body}")["input_ids"] for body in bodies], None

        trainer._generate_single_turn = generate
        random, generation = torch.random.get_rng_state(), trainer.generation_config
        trainer.model.train()
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=4, batch_size=8)
        assert batches == [(8, False, False), (4, False, False), (3, True, False)]
        assert trainer.model.training and trainer.generation_config is generation
        assert torch.equal(torch.random.get_rng_state(), random)
        assert not trainer._pending_metrics
        # Right: both tests; wrong: one of them; broken: none
        assert figures["solved"] == 0.25 and figures["solved_greedy"] == 1 and figures["samples"] == 12
        assert figures["tests_passed"] == figures["reward"] == (1 + 0.5 + 0.5 + 0) / 4
        assert figures["parses"] == 0.75
        assert figures["solved_interval"] == figures["solved_greedy_interval"] == 0  # all problems alike

    def test_generates_while_the_batch_before_is_executed(self, trainer, monkeypatch):
        events = []

        def generate(prompt_ids, *rest):
            events.append("generate")
            return [trainer._tokenizer(f"def f(x):\n    {WRONG}")["input_ids"] for _ in prompt_ids], None

        submit, score = trainer.executor.submit, trainer._score
        monkeypatch.setattr(trainer, "_generate_single_turn", generate)
        monkeypatch.setattr(trainer.executor, "submit", lambda jobs: events.append("submit") or submit(jobs))
        monkeypatch.setattr(trainer, "_score", lambda *args: events.append("score") or score(*args))
        figures = evaluate_team(trainer, trainer.train_dataset, num_samples=2, batch_size=2)
        sampled = ["generate", "submit", "generate", "submit", "score", "generate", "submit", "score", "score"]
        greedy = ["generate", "submit", "generate", "submit", "score", "score"]
        assert events == sampled + greedy
        assert figures["tests_passed"] == 0.5 and figures["samples"] == 6

    def test_refuses_problems_that_tell_nothing(self, trainer):
        with pytest.raises(ValueError, match="problems is empty"):
            evaluate_team(trainer, trainer.train_dataset.select([]))


FIGURES = {
    "untrained": {"solved": 0.25, "solved_greedy": 0.2, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0},
    "trained": {"solved": 0.75, "solved_greedy": 0.8, "reward": 0.9, "tests_passed": 0.9, "parses": 1.0},
}


class TestReport:
    def test_the_table_shows_the_change(self, capsys):
        print_table(FIGURES, "A team")
        shown = capsys.readouterr().out
        assert "A team" in shown and "+0.500" in shown and "+0.600" in shown

    def test_results_are_written_whole(self, tmp_path):
        write_results(tmp_path / "new" / "results.json", FIGURES)
        assert json.loads((tmp_path / "new" / "results.json").read_text()) == FIGURES
        assert len(list((tmp_path / "new").iterdir())) == 1

    def test_curves_are_drawn_of_what_was_logged(self, tmp_path):
        history = [{"step": step, "reward": math.log(step), "agents/a/reward": 0.1, "kl": None} for step in (1, 2, 3)]
        plot_curves(history, ["a"], tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="no logged metrics"):
            plot_curves([{"step": 1, "train_loss": 2.0}], ["a"], tmp_path / "none.png")


def test_the_built_in_problems_can_be_measured(trainer):
    problems = load_problems("builtin", split="test").select(range(2))
    trainer._generate_single_turn = lambda prompt_ids, *rest: (
        [trainer._tokenizer(problems[i % 2]["canonical_solution"])["input_ids"] for i, _ in enumerate(prompt_ids)],
        None,
    )
    figures = evaluate_team(trainer, problems, num_samples=1)
    assert figures["solved"] == figures["solved_greedy"] == figures["parses"] == 1
