"""The code in the guide of `marcog_trl/problems`."""

from guides import code_of


def test_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(code_of("marcog_trl/problems/README.md"), {})
