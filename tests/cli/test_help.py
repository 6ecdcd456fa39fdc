"""Help, and the episodes of a run, come at once: without PyTorch, TRL and other libraries that take seconds to import."""

import re
import subprocess
import sys

import pytest

from marcog_trl.cli.help import FOLDER, commands, kept_help, made_help
from marcog_trl.report.episodes import COLUMNS, write_rows


SLOW = ("torch", "trl", "transformers", "datasets", "peft", "accelerate")
CHILD = (
    "import sys\nfrom marcog_trl.cli.main import main\ntry:\n    status = main()\nexcept SystemExit as end:\n    status = end.code\n"
    f"print('status', status, 'slow', sorted(set({SLOW}) & set(sys.modules)))"
)


def run(*argv):
    return subprocess.run([sys.executable, "-c", CHILD, *argv], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("words", [[], ["train"], ["episodes"], *commands()], ids=" ".join)
def test_help_imports_nothing_slow(words):
    shown = run(*words, "--help")
    assert shown.endswith("slow []\n") and "usage: marcog-trl" in shown and len(shown.splitlines()) > 8


def test_episodes_import_nothing_slow(tmp_path):
    written = {name: [] if name in ("messages", "earlier_turns", "results", "rewards") else None for name in COLUMNS}
    written |= {"step": 3, "split": "train", "task_id": "x/7", "problem": "p", "solution": "code", "status": "passed"}
    write_rows(tmp_path / "episodes" / "train-0000003-0-0.parquet", [written])
    for flags in ([], ["--show", "1"]):
        shown = run("episodes", str(tmp_path), *flags)
        assert "x/7" in shown and shown.endswith("status 0 slow []\n")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_what_is_kept_is_what_the_parser_says(words, monkeypatch):
    """If not, `python -m marcog_trl.cli.help` writes it anew. Versions of Python differ in the lines, and not in the words."""
    monkeypatch.setenv("COLUMNS", "100")
    kept, made = (set(re.findall(r"[\w./'-]+", text)) for text in (kept_help([*words, "--help"]), made_help(words)))
    assert kept == made


def test_all_that_is_kept_is_of_a_command():
    assert {file.stem for file in FOLDER.iterdir()} == {"-".join(words) for words in commands()}
