"""`marcog-trl` and `python -m marcog_trl`: the commands, their help and what they refuse."""

import importlib
import os
import runpy
import signal
import sys
import time

import pytest

from marcog_trl.cli.main import COMMANDS, main
from marcog_trl.cli.recipe import RECIPES


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, what) in COMMANDS.items():
        assert f"{name} " in printed and what in printed


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"train"}))
def test_the_help_of_a_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: marcog-trl {name}" in printed
    examples = [line for line in printed.splitlines() if line.startswith(f"    marcog-trl {name} ")]
    assert examples
    flags = {word.partition("=")[0] for line in examples for word in line.split() if word.startswith("--")}
    assert flags <= set(printed[printed.index("options:") :].replace(",", " ").split())


def test_the_help_of_training(capsys):
    """It lists the recipes. That of a recipe has our flags and the usual ones of TRL, or all of them."""
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in RECIPES) and "  qwen2.5-coder-1.5b\n" in printed
    helps = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main(["train", "ppo", flag])
        assert not ended.value.code
        helps.append(capsys.readouterr().out)
    usual = ("--config FILE", "--override", "--num_replies", "--num_turns", "--critic", "--lora_r", "--learning_rate")
    assert all(flag in text for flag in usual for text in helps)
    assert "--adam_beta2" not in helps[0] and "--help-all" in helps[0] and "--adam_beta2" in helps[1]
    assert len(helps[0].splitlines()) < 0.4 * len(helps[1].splitlines())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: no command is given. Use one of train, solve, evaluate, compare, export"),
        (["sovle", "--team", "x"], "error: unknown command sovle. Did you mean solve?"),
        (["train", "sppo", "--seed", "1"], "error: unknown recipe sppo. Did you mean shppo?"),
        (["--team", "x"], "error: unknown command --team. Use one of train, solve"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and str(ended.value).startswith(message) and "\n" not in str(ended.value)


def test_the_module_passes_on_flags_and_exit_code(monkeypatch):
    """A solution that fails its tests ends with 1."""
    given = []
    monkeypatch.setattr("marcog_trl.cli.solve.main", lambda argv, status: given.append(argv) or 1)
    monkeypatch.setattr(sys, "argv", ["marcog_trl", "solve", "--team", "x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("marcog_trl", run_name="__main__")
    assert ended.value.code == 1 and given == [["--team", "x"]]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(argv, status):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("marcog_trl.cli.export"), "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["export"])
    assert ended.value.code == 130 and "Interrupted. Nothing was kept." in capsys.readouterr().err


def test_a_command_that_is_terminated_says_what_is_kept(monkeypatch, capsys):
    def terminated(argv, status):
        status.now = lambda: "The checkpoint is kept."
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(importlib.import_module("marcog_trl.cli.export"), "main", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["export"])
    finally:
        signal.signal(signal.SIGTERM, before)  # the program, which has ended, ignored it
    assert ended.value.code == 143 and "Terminated. The checkpoint is kept." in capsys.readouterr().err
