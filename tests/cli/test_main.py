"""`marcog-trl` and `python -m marcog_trl`: the commands, their help and what they refuse."""

import importlib
import runpy
import sys

import pytest

from marcog_trl.cli.main import COMMANDS, main
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.recipe import TrainingRecipe


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, what) in COMMANDS.items():
        assert f"{name} " in printed and what in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: marcog-trl {name}" in printed
    examples = [line for line in printed.splitlines() if line.startswith(f"    marcog-trl {name} --")]
    assert examples
    flags = {word.partition("=")[0] for line in examples for word in line.split() if word.startswith("--")}
    assert flags <= set(printed[printed.index("options:") :].replace(",", " ").split())


def test_the_help_of_a_recipe_has_every_flag(capsys):
    recipe = TrainingRecipe("MultiAgentPPOTrainer", None)
    with pytest.raises(SystemExit) as ended:
        read_training_arguments(recipe, ["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(flag in printed for flag in ("--config FILE", "--override", "--num_replies", "--gamma", "--lora_r"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: no command is given. Use one of solve, evaluate, export"),
        (["sovle", "--team", "x"], "error: unknown command sovle. Did you mean solve?"),
        (["--team", "x"], "error: unknown command --team. See marcog-trl --help."),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert str(ended.value.code).startswith(message) and "\n" not in ended.value.code


def test_the_module_passes_on_flags_and_exit_code(monkeypatch):
    """A solution that fails its tests ends with 1."""
    given = []
    monkeypatch.setattr("marcog_trl.cli.solve.main", lambda argv: given.append(argv) or 1)
    monkeypatch.setattr(sys, "argv", ["marcog_trl", "solve", "--team", "x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("marcog_trl", run_name="__main__")
    assert ended.value.code == 1 and given == [["--team", "x"]]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("marcog_trl.cli.export"), "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["export"])
    assert ended.value.code == 130 and "Interrupted. Nothing was kept." in capsys.readouterr().err
