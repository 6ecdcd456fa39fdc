"""Runs recipes in the process of a test, on the tiny model."""

import importlib

import pytest

from marcog_trl.cli.console import interrupts
from marcog_trl.cli.recipe import RECIPES


@pytest.fixture
def run_recipe(tiny_model, tmp_path, capfd):
    """`run_recipe(name, *flags)`: a short run in the folder `out`; returns what it printed."""

    def run(name, *flags, **options):
        recipe = RECIPES[name]
        module = importlib.import_module(f"marcog_trl.cli.{recipe.module}")
        where = ["--model_name_or_path", tiny_model, "--use_cpu", "--output_dir", str(tmp_path / "out")]
        capfd.readouterr()
        with interrupts() as kept:
            module.train(recipe, [*where, *flags], kept, **options)
        return capfd.readouterr().out

    return run
