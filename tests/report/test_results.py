"""Tables of results, and their file."""

import json

from marcog_trl.report.console import print_evaluation, print_table
from marcog_trl.report.results import write_results


RESULTS = {
    "untrained": {"solved": 0.25, "solved_greedy": 0.2, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0},
    "trained": {"solved": 0.75, "solved_greedy": 0.8, "reward": 0.9, "tests_passed": 0.9, "parses": 1.0},
}


class TestResults:
    def test_the_table_shows_the_change(self, capsys):
        print_table(RESULTS, "A team")
        shown = capsys.readouterr().out
        assert "A team" in shown and "+0.500" in shown and "+0.600" in shown

    def test_an_evaluation_is_shown_with_its_intervals(self, capsys):
        print_evaluation({"pass@1": 0.25, "pass@1_interval": 0.0625, "solved": 0.25, "samples": 40}, "A team")
        rows = [line.strip()[1:-1].split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["pass@1", "0.250", "0.062"],
            ["solved (sampled)", "0.250", ""],
            ["samples", "40", ""],
        ]

    def test_results_are_written_whole(self, tmp_path):
        write_results(tmp_path / "new" / "results.json", RESULTS)
        assert json.loads((tmp_path / "new" / "results.json").read_text()) == RESULTS
        assert len(list((tmp_path / "new").iterdir())) == 1
