"""What is wrong with a command line is said in one line, before a model is loaded."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from marcog_trl.cli.main import main
from marcog_trl.cli.train import train
from marcog_trl.execution.__main__ import main as execution_main


RECIPES = Path(__file__).parents[2] / "recipes"
TRAINING = ("train_ppo", "train_magrpo", "train_shppo")


TEAM = """
from marcog_trl import Agent, Workflow


class Note:
    pass


class Duo(Workflow):
    agents = (Agent("a", "Write."), Agent("b", "Write."))

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        return replies["a"]


class Needy(Duo):
    def __init__(self, rounds):
        pass
"""


class LoadedTooEarly(BaseException):
    """That a model would be loaded now."""


def load_too_early(*args, **options):
    raise LoadedTooEarly


@pytest.fixture
def models(tiny_model, tmp_path):
    """Names of models that cannot be used, by what is wrong with them."""
    folders = {name: tmp_path / name for name in ("truncated", "no_tokenizer", "empty")}
    shutil.copytree(tiny_model, folders["truncated"])
    weights = folders["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(tiny_model, folders["no_tokenizer"], ignore=shutil.ignore_patterns("token*", "chat*"))
    folders["empty"].mkdir()
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture
def data(tmp_path):
    """Names of files of problems that cannot be used, by what is wrong with them."""
    good = {"prompt": "def f(x):", "test": ["assert f(1) == 1"], "entry_point": "f"}
    files = {}
    for name, change in {"number": {"prompt": 3}, "format": {"test_format": "nose"}}.items():
        file = files[name] = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(good | change) for _ in range(2)))
    return {name: str(file) for name, file in files.items()}


@pytest.fixture
def workflows(tmp_path):
    """Files of workflows."""
    files = {"team": tmp_path / "team.py", "broken": tmp_path / "broken.py"}
    files["team"].write_text(TEAM)
    files["broken"].write_text(f"{TEAM}\ncolour\n")
    return {name: str(file) for name, file in files.items()}


def load(recipe):
    """A recipe as a module; not by its name, which `evaluate` shares with a package."""
    spec = importlib.util.spec_from_file_location(f"recipes_{recipe}", RECIPES / f"{recipe}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def line(monkeypatch, capsys, tmp_path):
    """`line(recipe, *argv)`: the one line in which a recipe ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def run(recipe, *argv):
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *argv])
        with pytest.raises(SystemExit) as ended:
            if recipe in TRAINING:
                train(load(recipe).RECIPE, trainer_class=load_too_early)
            else:
                load(recipe).main()
        message = str(ended.value.code)
        assert message.startswith("error: ") and "\n" not in message, message
        return message

    return run


TRAIN = ("--dataset_train_split", "train[:2]", "--dataset_test_split", "test[:2]", "--workflow", "collaboration")
BAD_TRAINING = {
    "--learning_rate -1": "learning_rate=-1.0 must be at least 0. Set learning_rate=",
    "--learning_rate nan": "learning_rate=nan must be a finite number. Set learning_rate=",
    "--temperature 0": "temperature=0.0 must be greater than 0. Set temperature=1.0.",
    "--top_p 5": "top_p=5.0 must be greater than 0 and at most 1. Set top_p=1.0.",
    "--per_device_train_batch_size 0": "per_device_train_batch_size=0 must be at least 1.",
    "--per_device_train_batch_size -4": "per_device_train_batch_size=-4 must be at least 1.",
    "--gradient_accumulation_steps 0": "gradient_accumulation_steps=0 must be at least 1.",
    "--num_iterations 0": "num_iterations=0 must be at least 1. Set num_iterations=1.",
    "--console auto": "console='auto' is unknown. Use one of 'lines', 'trl'.",
    "--consol trl": "unknown flag --consol. Did you mean --console?",
    "--eval_problems 0": "eval_problems=0 must be at least 1. Set eval_problems=24.",
    "--num_samples -1": "num_samples=-1 must be at least 0. Set num_samples=4.",
    "--num_sample 1": "unknown flag --num_sample. Did you mean --num_samples?",
    "--num_steps inf": "num_steps=inf must be a finite number.",
    "--lora_alpha 0": "lora_alpha=0 must be at least 1. Set lora_alpha=32.",
    "--advantage mean": "--advantage is a flag of train_magrpo.py and train_marlhf.py, not of this recipe. Remove it.",
    "--latent_size 3": "--latent_size is a flag of train_shppo.py and train_madpo.py, not of this recipe. Remove it.",
    "--generation_kwargs x": "generation_kwargs='x' must be a mapping. Use JSON on the command line.",
    "--model_init_kwargs [1]": "model_init_kwargs='[1]' must be a mapping. Use JSON on the command line.",
    "--lr_scheduler_type cosine_with_min_lr": "lr_scheduler_type='cosine_with_min_lr' does not accept",
    "--output_dir /proc/nowhere": "output_dir='/proc/nowhere' cannot be written: No such file or directory.",
    "--output_dir /etc/passwd": "output_dir='/etc/passwd' cannot be written: File exists.",
    "--model_name_or_path /nowhere": "model_name_or_path='/nowhere' is not a folder, and not a model on the Hub.",
    "--model_name_or_path some/where": "model_name_or_path='some/where' cannot be loaded: We couldn't connect",
    "--model_name_or_path {truncated}": "model.safetensors is damaged or incomplete",
    "--model_name_or_path {no_tokenizer}": "has no tokenizer. Save one there with tokenizer.save_pretrained(",
    "--model_name_or_path {empty}": "cannot be loaded: Unrecognized model",
    "--reward some/where": "reward='some/where' cannot be loaded: We couldn't connect",
    "--push_to_hub": "push_to_hub=True needs a token with write access, to push to 'out'. Run `hf auth login`",
    "--push_to_hub --hub_model_id a/b/c": "push_to_hub=True has no valid name for the repository: 'a/b/c'.",
    "--dataset_name {number}": "its prompt=3 is neither text nor a list of chat messages",
    "--dataset_name {format}": "test_format='nose' must be one of",
    "--override marlhf.num_turns=2": "--override has 'marlhf.num_turns', but the section 'marlhf' belongs to train_marlhf.py",
    "--override dataset.type=classeval": "dataset.type='classeval' is not supported. Remove it, and set workflow: classeval",
    "--override tokenizer.padding_side=left": "the section 'tokenizer'. The tokenizer is loaded as it was saved.",
    "--workflow nowhere.py:Debate": "workflow='nowhere.py:Debate': the file 'nowhere.py' cannot be read: No such file",
    "--workflow my_team.py": "workflow='my_team.py' is unknown. Use one of 'single', 'collaboration'",
    "--workflow {team}:Dou": "team.py' defines no class 'Dou'. Did you mean ",
    "--workflow {team}:Note": "Note is not a Workflow. Write 'class Note(Workflow):'",
    "--workflow {team}:Needy": "needs the argument 'rounds', which no setting gives. Give it a default value.",
    "--workflow {team}:Duo --num_agents 3": "num_agents=3 is not an option of workflow='",
    "--workflow {team}:Duo --num_turns 2": "num_turns=2 contradicts the given workflow Duo. Leave num_turns out",
    "--workflow {broken}:Duo": "cannot be imported: NameError: name 'colour' is not defined (",
    "--override dataset.name=coophumaneval dataset.train_split=train[16:]": "split='train[16:]' of problem set",
}  # fmt: skip
BAD_EVALUATION = {
    "": "There is nothing to evaluate. Set --adapter outputs/quickstart, or --model_name_or_path.",
    "--adapter a --model_name_or_path b": "--adapter and --model_name_or_path exclude each other.",
    "--adapter a --untrained --single_agent": "--untrained and --single_agent exclude each other",
    "--adapter /nowhere": "'/nowhere' is not a folder. Use a folder that a trainer's save_model wrote.",
    "--model_name_or_path /nowhere": "model_name_or_path='/nowhere' is not a folder, and not a model on the Hub.",
    "--model_name_or_path {no_tokenizer}": "has no tokenizer. Save one there",
    "--num_sample 1": "unknown flag --num_sample. Did you mean --num_samples?",
    "--learning_rate 1": "--learning_rate is a flag of train_magrpo.py",
    "--model_name_or_path /nowhere --num_samples -1": "num_samples=-1 must be at least 1. Set num_samples=10.",
    "--model_name_or_path /nowhere --num_samples two": "argument --num_samples/--num-samples: invalid int value: 'two'",
    "--model_name_or_path /nowhere --batch_size 0": "batch_size=0 must be at least 1. Set batch_size=128.",
    "--model_name_or_path /nowhere --seed -1": "seed=-1 must be at least 0",
    "--model_name_or_path /nowhere --k 20": "k=[20] has 20, which is not in 1 to num_samples=10.",
    "--model_name_or_path /nowhere --sampling best": "sampling='best' is unknown. Use 'keyed' or 'stream'.",
    "--model_name_or_path /nowhere --output figures": "output='figures' must end in .json.",
    "--model_name_or_path /nowhere --dataset_columns x": "dataset_columns='x' has no '='.",
    "--model_name_or_path /nowhere --override colour=red": "--override has an unknown key 'colour'.",
    "--model_name_or_path {tiny} --override temperature=0": "temperature=0 must be greater than 0.",
    "--model_name_or_path {tiny} --workflow {team}:Dou": "team.py' defines no class 'Dou'. Did you mean ",
    "--model_name_or_path {tiny} --workflow {broken}:Duo": "NameError: name 'colour' is not defined (",
    "--adapter a --workflow single --override workflow=pipeline": "--override has workflow, which another flag sets, too.",
    "--config": "--config needs a file. Write --config file.yaml.",
    "--config missing.yaml": "The file of --config cannot be read: [Errno 2] No such file or directory: 'missing.yaml'",
    "--config {broken_yaml}": "The file of --config cannot be read: while parsing a flow sequence",
    "--config {unknown_key} --model_name_or_path /nowhere": "unknown flag --num_sample. Did you mean --num_samples?",
    "--model_name_or_path /nowhere extra": "'extra' belongs to no flag. Write --flag value.",
    "--model_name_or_path /nowhere --reward nosuch": "Reward 'nosuch' is unknown. Use one of 'execution_reward'",
}  # fmt: skip
BAD_EXPORT = {
    "": "the following arguments are required: --output_dir",
    "--output_dir o": "There is nothing to export or push. Set --adapter outputs/quickstart, or --push user/team.",
    "--output_dir o --push user/team --num_agents 3": "--num_agents, --agents and --workflow need --adapter.",
    "--output_dir o --push user/team --workflow a.py:A": "--num_agents, --agents and --workflow need --adapter.",
    "--output_dir o --adapter /nowhere": "'/nowhere' is not a folder. Use a folder that a trainer's save_model wrote.",
    "--output_dir o --adapter /nowhere --num_problems 0": "num_problems=0 must be at least 1. Set num_problems=64.",
    "--output_dir o --adapter /nowhere --dataset_columns x": "dataset_columns='x' has no '='.",
    "--output_dir / --adapter /nowhere": "'/' exists already. Use a new folder.",
    "--output_dir o --adapte /nowhere": "unknown flag --adapte. Did you mean --adapter?",
}


class TestTraining:
    @pytest.mark.parametrize("argv", BAD_TRAINING)
    def test_mistakes(self, line, models, data, workflows, tiny_model, argv):
        flags = [flag.format(**models, **data, **workflows) for flag in argv.split()]
        model = [] if "--model_name_or_path" in flags else ["--model_name_or_path", tiny_model]
        splits = [] if "dataset.name" in argv else TRAIN
        report = [] if "--report_to" in flags else ["--report_to", "none"]
        assert BAD_TRAINING[argv] in line("train_ppo", *splits, *report, "--output_dir", "out", *model, *flags)

    @pytest.mark.parametrize("recipe", TRAINING)
    def test_every_recipe_checks_them(self, line, recipe, tiny_model):
        argv = (*TRAIN, "--report_to", "none", "--model_name_or_path", tiny_model, "--beta", "nan")
        assert "beta=nan must be a finite number. Set beta=0.0." in line(recipe, *argv)

    def test_an_account_is_asked_for(self, line, tiny_model, monkeypatch):
        wandb = pytest.importorskip("wandb")
        wandb.teardown()  # of an earlier test in this process, whose settings it would use again
        monkeypatch.setattr(wandb, "login", lambda **options: False)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        argv = (*TRAIN, "--report_to", "wandb", "--model_name_or_path", tiny_model)
        assert "report_to='wandb' needs an account. Run `wandb login`" in line("train_ppo", *argv)

    def test_a_workflow_is_checked_before_the_default_model_is_built(self, line, workflows, monkeypatch):
        monkeypatch.setattr("marcog_trl.cli.parsing.build_default_model", load_too_early)
        assert "NameError: name 'colour'" in line("train_shppo", "--workflow", f"{workflows['broken']}:Duo")

    def test_what_is_right_goes_on_to_the_model(self, line, tiny_model):
        with pytest.raises(LoadedTooEarly):
            line("train_ppo", *TRAIN, "--report_to", "none", "--output_dir", "o", "--model_name_or_path", tiny_model)


class TestOtherRecipes:
    @pytest.mark.parametrize("argv", BAD_EVALUATION)
    def test_evaluation(self, line, models, workflows, tiny_model, tmp_path, argv):
        files = {"broken_yaml": "num_samples: [1", "unknown_key": "num_sample: 1"}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        paths = {name: tmp_path / name for name in files}
        flags = [flag.format(**models, **workflows, **paths, tiny=tiny_model) for flag in argv.split()]
        assert BAD_EVALUATION[argv] in line("evaluate", *flags)

    @pytest.mark.parametrize("argv", BAD_EXPORT)
    def test_export(self, line, argv):
        assert BAD_EXPORT[argv] in line("export", *argv.split())


class TestCommands:
    """`python -m marcog_trl.execution` and `marcog-trl solve`."""

    @pytest.fixture
    def files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("ok.py").write_text("def f(x):\n    return x\n")
        Path("tests.py").write_text("assert f(1) == 1\n")
        Path("bad.py").write_text("def f(:")
        Path("bytes.py").write_bytes(b"\xff\xfe")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("ok.py --tests missing.py", "cannot read 'missing.py': No such file or directory."),
            ("missing.py --tests tests.py", "cannot read 'missing.py': No such file or directory."),
            ("ok.py --tests .", "cannot read '.': Is a directory."),
            ("ok.py --tests bytes.py", "cannot read 'bytes.py': it is not UTF-8 text"),
            ("ok.py --tests bad.py", "'bad.py' is not Python: invalid syntax, line 1."),
            ("ok.py --tests tests.py --setup missing.py", "cannot read 'missing.py'"),
            ("ok.py --test tests.py", "unknown flag --test. Did you mean --tests?"),
            ("ok.py --tests tests.py --timeout nan", "timeout=nan must be a positive number"),
            ("ok.py", "the following arguments are required: --tests"),
        ],
    )
    def test_execution(self, files, monkeypatch, capsys, argv, message):
        monkeypatch.setattr(sys, "argv", ["execution", *argv.split()])
        with pytest.raises(SystemExit) as ended:
            execution_main()
        printed = capsys.readouterr()
        assert ended.value.code == 2 and printed.err.startswith("error: ") and message in printed.err
        assert printed.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--team /nowhere --problem ok.py", "'/nowhere' is not a folder."),
            ("--adapter /nowhere --problem ok.py", "'/nowhere' is not a folder."),
            ("--team /nowhere --problem missing.py", "cannot read 'missing.py': No such file or directory."),
            ("--team /nowhere --problem bytes.py", "cannot read 'bytes.py': it is not UTF-8 text"),
            ("--team /nowhere --problem bad.py", "the problem is not Python: invalid syntax"),
            ("--tea /nowhere --problem ok.py", "unknown flag --tea. Did you mean --team?"),
            ("", "the following arguments are required: --team/--adapter, --problem"),
        ],
    )
    def test_solve(self, files, capsys, argv, message):
        with pytest.raises(SystemExit) as ended:
            main(["solve", *argv.split()])
        printed = capsys.readouterr()
        assert ended.value.code == 2 and printed.err.startswith("error: ") and message in printed.err
        assert printed.err.count("\n") == 1 and printed.out == ""
