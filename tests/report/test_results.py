"""Tables of results, and their file."""

import json

from marcog_trl.report.console import print_evaluation, print_table
from marcog_trl.report.results import change_rows, examples, write_results


RESULTS = {
    "untrained": {"solved": 0.25, "solved_greedy": 0.2, "reward": 0.5, "tests_passed": 0.5, "parses": 1.0},
    "trained": {"solved": 0.75, "solved_greedy": 0.8, "reward": 0.9, "tests_passed": 0.9, "parses": 1.0},
}


class TestResults:
    def test_the_table_shows_the_change(self, capsys):
        print_table(("untrained", "trained", "change"), change_rows(RESULTS), "A team")
        shown = capsys.readouterr().out
        assert "A team" in shown and "+0.500" in shown and "+0.600" in shown

    def test_an_evaluation_is_shown_with_its_intervals(self, capsys):
        print_evaluation(
            {"pass@1": 0.25, "pass@1_interval": [0.1875, 0.3254], "solved": 0.25, "samples": 40}, "A team"
        )
        rows = [line.strip()[1:-1].split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["pass@1", "0.250", "0.188 to 0.325"],
            ["solved (sampled)", "0.250", ""],
            ["samples", "40", ""],
        ]

    def test_results_are_written_whole(self, tmp_path):
        write_results(tmp_path / "new" / "results.json", RESULTS)
        assert json.loads((tmp_path / "new" / "results.json").read_text()) == RESULTS
        assert len(list((tmp_path / "new").iterdir())) == 1


class TestExamples:
    """The problems to read: what changed first."""

    def episode(self, status, reply="r"):
        return {"greedy": {"status": status, "tests_passed": 1, "tests": 2, "message": "why", "replies": {"a": reply}}}

    def chosen(self, before, after, count=2):
        problems = [{"prompt": f"p{i}"} for i in range(len(before))]
        untrained, trained = ([self.episode(status) for status in statuses] for statuses in (before, after))
        return [example["prompt"] for example in examples(problems, untrained, trained, count)]

    def test_one_that_training_solved_and_one_that_it_did_not(self):
        failed, passed = "failed", "passed"
        assert self.chosen([passed, failed, failed, failed], [passed, failed, passed, failed]) == ["p2", "p1"]
        assert self.chosen([passed, failed, failed], [passed, passed, passed]) == ["p1", "p0"]
        assert self.chosen([passed, "error"], [failed, "timeout"], 5) == ["p1", "p0"]

    def test_they_hold_replies_and_verdicts(self):
        problem = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write f.\n"}]}
        before, after = self.episode("error", " no\n"), self.episode("passed", "yes")
        (found,) = examples([problem], [before], [after])
        assert found["prompt"] == "Be brief.\n\nWrite f."
        assert (found["untrained"], found["trained"]) == (before["greedy"], after["greedy"])
