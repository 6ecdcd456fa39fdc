"""The commands and paths in the guides: scripts and files exist, and every flag is accepted."""

import re
import shlex
from pathlib import Path

import pytest

from marcog_trl.cli import parsing
from marcog_trl.cli.evaluate import EvaluationArguments
from marcog_trl.cli.export import ExportArguments
from marcog_trl.cli.parsing import Parser, read_training_arguments
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.solve import SolveArguments


ROOT = Path(__file__).parents[2]
GUIDES = [
    *(ROOT / path for path in ("README.md", "recipes/README.md", "recipes/benchmarks/README.md", "tests/README.md")),
    *sorted(ROOT.glob("marcog_trl/*/README.md")),
    *sorted(ROOT.glob("recipes/examples/*/README.md")),
]
COMMANDS = sorted(
    {
        (script, flags)
        for guide in GUIDES
        for script, flags in re.findall(
            r"(?:recipes/|marcog-trl )(train[_ ][a-z]+|evaluate|export|solve)(?:\.py)?\b([^`\n|]*)", guide.read_text()
        )
        if "--" in flags
    }
)


@pytest.mark.parametrize(("script", "flags"), COMMANDS)
def test_flags_are_accepted(script, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.setattr(parsing, "build_default_model", lambda: "built")
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    argv = shlex.split(flags, comments=True)
    if script.startswith("train"):
        read_training_arguments(RECIPES[script[len("train_") :]], [*argv, "--bf16", "false"])
    else:
        classes = {"evaluate": EvaluationArguments, "export": ExportArguments, "solve": SolveArguments}
        Parser(classes[script]).parse(argv)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_paths_exist(guide):
    text = guide.read_text()
    named = re.findall(r"(?<![\w/.-])((?:recipes|tests|marcog_trl)/[\w./-]*\w)/?(?=[`\s),:;#|\"\]]|$)", text)
    linked = [guide.parent / path for path in re.findall(r"\]\((?!https?:)([\w./-]+)", text)]
    missing = [path for path in [*(ROOT / path for path in named), *linked] if not path.exists()]
    assert not missing
