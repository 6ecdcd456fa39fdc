"""Command lines of recipes and commands, and CoMLRL's and MARCOG's files and flags: what they set, or their one line of error."""

import dataclasses
import importlib
import json
import os
import shlex
import shutil
from pathlib import Path
from string import Template

import pytest
import yaml

from marcog_trl.cli import parsing
from marcog_trl.cli.evaluate import EvaluationArguments
from marcog_trl.cli.export import ExportArguments
from marcog_trl.cli.main import main
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.solve import SolveArguments
from marcog_trl.execution.__main__ import main as execution_main


FOLDER = Path(__file__).parents[2] / "recipes"
LINES = yaml.safe_load(Path(__file__).with_name("command_lines.yaml").read_text())
FILES = LINES.pop("files")
CASES = [(command, line, said) for command, lines in LINES.items() for line, said in lines.items()]
CLASSES = {"evaluate": EvaluationArguments, "export": ExportArguments, "solve": SolveArguments}
TEAM = """
from marcog_trl import Agent, Workflow


class Note:
    pass


class Duo(Workflow):
    agents = (Agent("a", "Write."), Agent("b", "Write."))

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        return replies["a"]


class Tooled(Duo):
    agents = (Agent("a", "Write.", tools=(print,)), Agent("b", "Write."))


class Needy(Duo):
    def __init__(self, rounds):
        pass


def talk(problem, client):
    pass
"""
SHAPE = {"model_type": "qwen2", "vocab_size": 3000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
# What keeps the trainings of wrong lines small, and on this machine
SMALL = {
    "--dataset_train_split": "train[:2]", "--dataset_test_split": "test[:2]", "--workflow": "collaboration",
    "--report_to": "none", "--output_dir": "out", "--bf16": "false",
}  # fmt: skip


@pytest.fixture(scope="module")
def names(tiny_model, tmp_path_factory):
    """What $names in the lines stand for."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    shutil.copytree(tiny_model, folder / "truncated")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(tiny_model, folder / "no_tokenizer", ignore=shutil.ignore_patterns("token*", "chat*"))
    shutil.copytree(tiny_model, folder / "small_vocabulary")
    config = json.loads((folder / "small_vocabulary" / "config.json").read_text())
    (folder / "small_vocabulary" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    (folder / "empty").mkdir()
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(SHAPE))
    settings = yaml.safe_load((FOLDER / "configs" / "qwen2.5-coder-1.5b.yaml").read_text())
    (folder / "shape_config").write_text(yaml.safe_dump(settings | {"model_name_or_path": str(folder / "shape")}))
    (folder / "duo").write_text(TEAM)
    (folder / "broken_duo").write_text(f"{TEAM}\ncolour\n")
    good = {"prompt": "def f(x):", "test": ["assert f(1) == 1"], "entry_point": "f"}
    for name, change in {"prompt_3": {"prompt": 3}, "format_nose": {"test_format": "nose"}}.items():
        (folder / name).write_text("\n".join([json.dumps(good | change)] * 2))
    (folder / "good").write_text("def f(x):\n    return x\n")
    (folder / "no_python").write_text("def f(:")
    (folder / "bytes").write_bytes(b"\xff\xfe")
    for name, ending in {"duo": ".py", "broken_duo": ".py", "prompt_3": ".jsonl", "format_nose": ".jsonl"}.items():
        (folder / name).rename(folder / f"{name}{ending}")
    return {path.stem if path.suffix in (".py", ".jsonl") else path.name: str(path) for path in folder.iterdir()} | {
        "tiny": tiny_model,
        "embedded_model": "built",
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder, no accounts, and an embedded model that is not built."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("HF_TOKEN", "WANDB_MODE"):
        os.environ.pop(name, None)
    os.environ["OPENAI_API_KEY"] = "any"
    monkeypatch.setattr(parsing, "build_default_model", lambda: "built")


class LoadedTooEarly(BaseException):
    """That a model would be loaded now."""


def load_too_early(*args, **options):
    raise LoadedTooEarly


def train(command, argv):
    """Runs a recipe up to where it would load the model."""
    recipe = RECIPES[command.removeprefix("train_")]
    small = [word for flag, value in SMALL.items() if flag[2:] not in " ".join(argv) for word in (flag, value)]
    stop = {"trainer_class": load_too_early} if recipe.module == "train" else {}
    return importlib.import_module(f"marcog_trl.cli.{recipe.module}").train(recipe, [*small, *argv], **stop)


def read(command, argv):
    """All fields that a command line sets, and the environment."""
    if command in CLASSES:
        objects = parsing.Parser(CLASSES[command]).parse(argv)
    else:
        objects = parsing.read_training_arguments(RECIPES[command.removeprefix("train_")], argv)
    found = {f.name: getattr(thing, f.name) for thing in objects for f in dataclasses.fields(thing)}
    return found | {f"env.{name}": value for name, value in os.environ.items()}


@pytest.mark.parametrize(("command", "line", "said"), CASES, ids=[f"{case[0]} {case[1]}"[:150] for case in CASES])
def test_command_line(names, place, capsys, command, line, said):
    argv = shlex.split(Template(line).substitute(names))
    if isinstance(said, dict):
        bf16 = ["--bf16", "false"] if command.startswith("train_") and "bf16" not in line else []
        found = read(command, [*argv, *bf16])
        assert said.pop("says", "") in capsys.readouterr().err
        wanted = {name: names[value[1:]] if str(value).startswith("$") else value for name, value in said.items()}
        assert {name: found[name] for name in wanted} == wanted
        return
    with pytest.raises((SystemExit, ValueError)) as ended:
        train(command, argv) if command.startswith("train_") else main([command, *argv])
    message = f"error: {ended.value}" if isinstance(ended.value, ValueError) else str(ended.value)
    assert message.startswith("error: ") and "\n" not in message and said in message


def test_what_is_right_goes_on_to_the_model(place, tiny_model):
    with pytest.raises(LoadedTooEarly):
        train("train_ppo", ["--model_name_or_path", tiny_model])


def test_a_missing_file_is_said_before_the_embedded_model_is_built(place, monkeypatch):
    monkeypatch.setattr(parsing, "build_default_model", load_too_early)
    with pytest.raises(SystemExit, match=r"Problem set 'nowhere\.jsonl' is not there"):
        train("train_ppo", ["--dataset_name", "nowhere.jsonl"])


@pytest.mark.parametrize("recipe", ["train_magrpo", "train_ppo", "train_shppo"])
def test_the_files_of_the_recipes_serve_every_trainer(place, recipe):
    """By name, too, and from anywhere."""
    files = [file for file in (FOLDER / "configs").glob("*.yaml") if not file.stem.startswith("builtin-m")]
    assert len(files) >= 9
    for file in files:
        found = read(recipe, ["--config", file.stem, "--bf16", "false", "--report_to", "none"])
        workflow = yaml.safe_load(file.read_text()).get("workflow", "collaboration")
        assert Path(found["workflow"]).name == workflow and found["logging_steps"] in (1, 5)


def test_an_account_is_asked_for(place, tiny_model, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # of an earlier test in this process, whose settings it would use again
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    with pytest.raises(SystemExit, match="report_to='wandb' needs an account"):
        train("train_ppo", ["--report_to", "wandb", "--model_name_or_path", tiny_model])


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("=1e-5", "1e-5"),  # text to YAML; the parser of flags makes it a number
        ("=2.0e-05", 2e-5),
        ("=no", "no"),
        ("=None", None),
        ("=[x, 'y z']", ["x", "y z"]),
        ("={k: 1}", {"k": 1}),
        ("=test[33:163]", "test[33:163]"),
        ("=x=y", "x=y"),
        ("=note: this", "note: this"),
        ("=2026-01-02", "2026-01-02"),
        ("=@home", "@home"),
    ],
)
def test_values_of_overrides(line, value):
    name, found = parsing.parse_override(f"a.b{line}")
    assert name == "a.b" and found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("$good --tests missing.py", "cannot read 'missing.py'"),
        ("missing.py --tests $good", "cannot read 'missing.py'"),
        ("$good --tests .", "cannot read '.': Is a directory."),
        ("$good --tests $bytes", "it is not UTF-8 text"),
        ("$good --tests $no_python", "is not Python: invalid syntax, line 1."),
        ("$good --test $good", "unknown flag --test. Did you mean --tests?"),
        ("$good --tests $good --timeout nan", "timeout=nan must be a positive number"),
        ("$good", "the following arguments are required: --tests"),
    ],
)
def test_execution(names, place, monkeypatch, capsys, line, said):
    monkeypatch.setattr("sys.argv", ["execution", *shlex.split(Template(line).substitute(names))])
    with pytest.raises(SystemExit) as ended:
        execution_main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("error: ") and said in printed and printed.count("\n") == 1
