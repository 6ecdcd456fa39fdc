"""Tables, figures in JSON, and curves."""

import json
import math

from marcog_trl.report.results import plot_curves, print_figures, print_table, write_results


FIGURES = {
    "untrained": {"solved": 0.25, "solved_greedy": 0.2, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0},
    "trained": {"solved": 0.75, "solved_greedy": 0.8, "reward": 0.9, "tests_passed": 0.9, "parses": 1.0},
}


class TestReport:
    def test_the_table_shows_the_change(self, capsys):
        print_table(FIGURES, "A team")
        shown = capsys.readouterr().out
        assert "A team" in shown and "+0.500" in shown and "+0.600" in shown

    def test_an_evaluation_is_shown_with_its_intervals(self, capsys):
        print_figures({"pass@1": 0.25, "pass@1_interval": 0.0625, "solved": 0.25, "samples": 40}, "A team")
        rows = [line.strip()[1:-1].split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["pass@1", "0.250", "0.062"],
            ["solved (sampled)", "0.250", ""],
            ["samples", "40", ""],
        ]

    def test_results_are_written_whole(self, tmp_path):
        write_results(tmp_path / "new" / "results.json", FIGURES)
        assert json.loads((tmp_path / "new" / "results.json").read_text()) == FIGURES
        assert len(list((tmp_path / "new").iterdir())) == 1

    def test_curves_are_drawn_of_what_was_logged(self, tmp_path):
        history = [{"step": step, "reward": math.log(step), "agents/a/reward": 0.1, "kl": None} for step in (1, 2, 3)]
        assert plot_curves(history, ["a"], tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert not plot_curves([{"step": 1, "train_loss": 2.0}], ["a"], tmp_path / "curves.png")
        assert not (tmp_path / "curves.png").exists()  # it was of another run
