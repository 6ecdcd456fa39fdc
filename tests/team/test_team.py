"""A saved team solves problems, also with more agents than it was trained with, from Python and from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import teams
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from marcog_trl import MultiAgentPPOTrainer, SHPPOTrainer, Team
from marcog_trl.cli.main import main
from marcog_trl.evaluation.baselines import untrained_team
from marcog_trl.problems.tests import read_problem
from marcog_trl.team.settings import TeamSettings


TESTED = teams.dataset(2, test=[["assert f(1)"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)
PROBLEM = {"prompt": "def f(x):\n    '''Twice x.'''\n", "entry_point": "f"}
TESTS = {"test": ["assert f(1) == 2"], "test_format": "asserts"}


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """`saved(workflow, ...)`: folder of a team."""
    folders = {}

    def save(workflow, trainer_class=SHPPOTrainer, **options):
        key = workflow, trainer_class, str(options)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("team")
            trainer = teams.make(
                tiny_model, folders[key], trainer_class, workflow=workflow, data=TESTED, reward=teams.letters,
                isolation="best_effort", num_workers=1, per_device_train_batch_size=1, **options,
            )  # fmt: skip
            teams.randomize(trainer.model.get_base_model().marcog_team)
            trainer.save_model()
            trainer.executor.close()
        return folders[key]

    return save


@pytest.fixture
def load():
    loaded = []

    def from_pretrained(path, **options):
        loaded.append(Team.from_pretrained(path, isolation="best_effort", num_workers=1, **options))
        return loaded[-1]

    yield from_pretrained
    for team in loaded:
        team.close()


def recite(team, *calls):
    """Makes the agents reply with the given texts."""
    encode = team.tokenizer.encode
    replies = iter([[encode(text, add_special_tokens=False) for text in call] for call in calls])
    team._generate = lambda rows: next(replies)


class TestSolve:
    def test_gives_messages_code_and_verdict(self, saved, load):
        team = load(saved("collaboration"))
        assert team.agents == ["helper", "main"]
        recite(team, ["def aux(x):\n    return x", "def f(x):\n    return 2 * aux(x)"])
        answer = team.solve(PROBLEM | TESTS)
        assert [(m["agent"], m["turn"], m["reply"]) for m in answer.messages] == [
            ("helper", 1, "def aux(x):\n    return x"), ("main", 1, "def f(x):\n    return 2 * aux(x)"),
        ]  # fmt: skip
        assert "Twice x." in answer.messages[0]["prompt"][-1]["content"]
        assert answer.code.startswith("def aux(x):") and answer.verdict.status == "passed"

    def test_many_problems_keep_their_order_whatever_the_batch(self, saved, load):
        team = load(saved("collaboration"))
        problems = [PROBLEM | {"entry_point": f"f{i}", "prompt": f"def f{i}(x):\n"} for i in range(5)]
        answers = team.solve(problems, batch_size=2)
        again = team.solve(problems)
        assert [[m["reply"] for m in answer.messages] for answer in answers] == [
            [m["reply"] for m in answer.messages] for answer in again
        ]
        for i, answer in enumerate(answers):
            assert f"def f{i}(x)" in answer.messages[1]["prompt"][-1]["content"]

    def test_a_prompt_alone_is_a_problem_of_a_single_agent(self, saved, load):
        team = load(saved("single", MultiAgentPPOTrainer))
        assert len(team.solve("Say something.").messages) == 1


class TestOtherSizes:
    @pytest.mark.parametrize(
        ("workflow", "num_agents", "agents"),
        [
            ("collaboration", 4, ["helper", "helper2", "helper3", "main"]),
            ("pipeline", 1, ["coder"]),
            ("pipeline", 5, ["planner", "coder", "debugger", "debugger2", "debugger3"]),
            ("discussion", 3, ["solver", "solver2", "solver3"]),
        ],
    )
    def test_a_team_works_with_more_or_fewer_agents(self, saved, load, workflow, num_agents, agents):
        team = load(saved(workflow), num_agents=num_agents)
        assert team.agents == agents
        assert {m["agent"] for m in team.solve(PROBLEM | TESTS).messages} == set(agents)


class TestBadInput:
    def test_agents_with_adapters_of_their_own_cannot_be_more(self, saved, load):
        path = saved("collaboration", parameter_sharing="separate")
        with pytest.raises(ValueError, match=r"num_agents=3 does not fit .* \['helper', 'main'\] has its own adapter"):
            load(path, num_agents=3)

    def test_what_a_workflow_needs_is_asked_for(self, saved, load):
        with pytest.raises(ValueError, match="row 1: it has no 'entry_point', which workflow Collaboration needs"):
            load(saved("collaboration")).solve([PROBLEM, {"prompt": "Write."}])
        with pytest.raises(ValueError, match="row 0: it has no 'test', which workflow Pipeline needs"):
            load(saved("pipeline")).solve(PROBLEM)

    def test_code_is_a_problem(self, saved, load):
        team = load(saved("collaboration"))
        recite(team, ["def aux(x):\n    return x", "def f(x):\n    return x + 1"])
        answer = team.solve("def f(x): ...\n\n\nassert f(1) == 2\n")
        assert answer.code.endswith("return x + 1") and answer.verdict.passed == answer.verdict.total == 1
        recite(team, ["def aux(x):\n    return x", "def f(x):\n    return x + 1"])
        assert team.solve({"prompt": "Write f.", "test": "assert f(1) == 3"}).verdict.passed == 0

    @pytest.mark.parametrize(
        ("problem", "options", "message"),
        [
            ("def f(x):\n    return x", {}, "the function f has a body, so there is nothing to write"),
            ("Write f.", {}, "problems: 1 problem cannot be used: row 0: it has no 'entry_point'"),
            ({**PROBLEM, "prompt": 5}, {}, "its prompt=5 is neither text nor a list of chat messages"),
            (PROBLEM, {"batch_size": -1}, r"batch_size=-1 must be positive\. Set batch_size=128"),
        ],
    )
    def test_what_is_no_problem_is_refused(self, saved, load, problem, options, message):
        with pytest.raises(ValueError, match=message):
            load(saved("collaboration")).solve([problem], **options)

    def test_what_is_no_team_is_refused(self, load, tmp_path):
        with pytest.raises(ValueError, match=r"has no team\.json"):
            load(tmp_path)
        with pytest.raises(
            ValueError, match=r"'nobody/nothing' is not a folder, and the Hub, .* cannot be reached"
        ) as error:
            load("nobody/nothing")
        assert len(str(error.value)) < 200

    @pytest.mark.parametrize(
        "missing", ["adapter_config.json", "adapter_model.safetensors", "team_modules.safetensors", "tokenizer.json"]
    )
    def test_a_team_that_lacks_a_file_is_refused(self, saved, load, tmp_path, missing):
        shutil.copytree(saved("collaboration"), tmp_path / "team")
        (tmp_path / "team" / missing).unlink()
        with pytest.raises(ValueError, match=missing.partition(".")[0]):
            load(tmp_path / "team")

    @pytest.mark.parametrize("content", ["{", "[]", '{"format_version": 3}', '{"format_version": 2}'])
    def test_a_description_that_cannot_be_read_is_refused(self, load, tmp_path, content):
        (tmp_path / "team.json").write_text(content)
        with pytest.raises(ValueError, match=r"team\.json"):
            load(tmp_path)

    def test_a_base_model_that_is_gone_can_be_given(self, saved, load, tiny_model, tmp_path):
        shutil.copytree(saved("collaboration"), tmp_path / "team")
        for name, key in (("team.json", "base_model"), ("adapter_config.json", "base_model_name_or_path")):
            content = json.loads((tmp_path / "team" / name).read_text())
            (tmp_path / "team" / name).write_text(json.dumps({**content, key: "/nowhere/model"}))
        with pytest.raises(ValueError, match=r"base model '/nowhere/model', cannot be loaded: .* Set base_model"):
            load(tmp_path / "team")
        assert load(tmp_path / "team", base_model=tiny_model).agents == ["helper", "main"]

    def test_a_base_model_that_has_changed_is_refused(self, saved, load, tiny_model, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.model.layers[1].self_attn.v_proj.weight.data += 1e-3
        model.save_pretrained(tmp_path / "base")
        with pytest.raises(
            ValueError, match=r"weights of '.*base' are not those that the team was trained on.* Set base_model"
        ):
            load(saved("collaboration"), base_model=str(tmp_path / "base"))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_a_base_model_of_another_type_is_the_same(self, saved, load, dtype):
        team = load(saved("collaboration"), model_init_kwargs={"dtype": dtype})
        assert team.model.dtype == getattr(torch, dtype)

    def test_a_team_that_does_not_know_its_base_s_weights_is_loaded(self, saved, load, tmp_path):
        shutil.copytree(saved("collaboration"), tmp_path / "team")
        content = json.loads((tmp_path / "team" / "team.json").read_text())
        del content["base_fingerprint"], content["settings"]["optim"]
        (tmp_path / "team" / "team.json").write_text(json.dumps(content))
        assert load(tmp_path / "team").agents == ["helper", "main"]

    def test_a_base_model_has_the_revision_of_the_training(self, tiny_model, tmp_path, monkeypatch):
        """From a cache of the Hub with two branches, of which `main` has another model of the same shape."""
        repository = tmp_path / "models--org--tiny"
        (repository / "refs").mkdir(parents=True)
        for branch, digit in (("main", "0"), ("step3000", "5")):
            shutil.copytree(tiny_model, repository / "snapshots" / (digit * 40))
            (repository / "refs" / branch).write_text(digit * 40)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.model.layers[1].self_attn.v_proj.weight.data += 1e-3
        model.save_pretrained(repository / "snapshots" / ("5" * 40))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        revision = {"revision": "step3000", "cache_dir": str(tmp_path)}
        trainer = teams.make("org/tiny", tmp_path / "run", model_init_kwargs=revision)
        trainer.save_model()
        loaded = Team.from_pretrained(tmp_path / "run", model_init_kwargs={"cache_dir": str(tmp_path)})
        for name, p in trainer.model.named_parameters():
            if "layers.1.self_attn.v_proj.base_layer" in name:
                assert torch.equal(loaded.model.get_parameter(name), p)
        wrong = {"revision": "main", "cache_dir": str(tmp_path)}
        with pytest.raises(ValueError, match="are not those that the team was trained on"):
            Team.from_pretrained(tmp_path / "run", model_init_kwargs=wrong)

    def test_an_adapter_of_another_base_model_is_refused(self, saved, load, tmp_path):
        path = saved("collaboration")
        for file in path.iterdir():
            if file.is_file():
                (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "somebody/else"
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"is for 'somebody/else', but team\.json names"):
            load(tmp_path)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestFilesThatDoNotFit:
    @pytest.fixture
    def team(self, saved, tmp_path):
        """A copy of a saved team."""

        def copy(**options):
            shutil.copytree(saved("collaboration", **options), tmp_path / "team")
            return tmp_path / "team"

        return copy

    @pytest.mark.parametrize("trainer_class", [SHPPOTrainer, MultiAgentPPOTrainer])
    @pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
    def test_a_base_model_of_another_shape_is_refused(self, team, load, tiny_model, tmp_path, trainer_class, change):
        config = AutoConfig.from_pretrained(tiny_model)
        config.update(change)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
        message = r"team', on the base model '.*/base', cannot be loaded: .* Set base_model"
        with pytest.raises(ValueError, match=message):
            load(
                team(trainer_class=trainer_class, lora={"target_modules": ["q_proj", "v_proj"]}),
                base_model=str(tmp_path / "base"),
            )

    def test_unknown_settings_are_refused(self, team, load):
        path = team()
        with pytest.raises(ValueError, match=r"A team has no setting 'temprature'\. Did you mean 'temperature'"):
            load(path, temprature=1.0)
        settings = json.loads((path / "team.json").read_text())["settings"]
        edit(path / "team.json", settings={**settings, "colour": 1})
        with pytest.raises(ValueError, match=r"team\.json' has an unknown setting 'colour'\. Remove it"):
            load(path)
        edit(path / "team.json", settings={**settings, "colour": None})  # of another version, and not set
        load(path)


def test_a_workflow_that_runs_code_uses_the_executor_of_the_team(tiny_model):
    """Also where problems have no tests; it is made when code is first run."""
    example = Path(__file__).parents[2] / "recipes" / "examples" / "tester.py"
    settings = TeamSettings(workflow=f"{example}:TestAndFix", isolation="best_effort", num_workers=1)
    team = untrained_team(tiny_model, settings)
    assert team._executor is None
    recite(team, ["assert f(1) == 2", "def f(x):\n    return 3"], ["def f(x):\n    return 2 * x"])
    answer = team.solve({"prompt": "def f(x):", "entry_point": "f"})
    assert answer.messages[-1]["prompt"][0]["content"].endswith("assert f(1) == 2: f(1) returned 3, expected 2")
    assert answer.code == "def f(x):\n    return 2 * x" and answer.verdict is None
    assert team._executor.isolation.level == "best_effort" and team._executor.num_workers == 1
    team.close()


class TestCommandLine:
    def test_prints_the_solution_and_the_verdict(self, saved, tmp_path, capsys, monkeypatch):
        problem = tmp_path / "problem.py"
        problem.write_text("def f(x):\n    '''Twice x.'''\n\n\nassert f(1) == 2\nassert f(2) == 4\n")
        solve = Team.solve

        def scripted(team, *args, **kwargs):
            print("[WARNING] of a library")
            recite(team, ["def aux(x):\n    return x", "def f(x):\n    return x + 1"])
            return solve(team, *args, **kwargs)

        monkeypatch.setattr(Team, "solve", scripted)
        arguments = [
            "solve",
            "--team",
            str(saved("collaboration")),
            "--problem",
            str(problem),
            "--isolation",
            "best_effort",
        ]
        assert main(arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == "def aux(x):\n    return x\n\n\ndef f(x):\n    return x + 1\n"
        assert "failed: 1 of 2 tests passed" in printed.err and "[WARNING] of a library" in printed.err

    def test_reads_problems_with_tests_of_every_format(self):
        stub = "import math\n\n\ndef area(r):\n    '''Area of a disc.'''\n"
        problem = read_problem(stub)
        assert problem == {"prompt": stub, "entry_point": "area"}
        problem = read_problem(f"{stub}\nassert area(0) == 0\n")
        assert problem["test"] == ["\nassert area(0) == 0"] and problem["test_format"] == "asserts"
        assert problem["prompt"] == stub and problem["setup"].strip() == "import math"
        problem = read_problem(f"import math\n\x0c{stub}\nassert area(0) == 0; assert area(1) > 3; x = 1\n")
        assert problem["prompt"].endswith(stub)
        assert problem["test"] == ["\nassert area(0) == 0; assert area(1) > 3; x = 1"]
        problem = read_problem(stub, "def check(candidate):\n    assert candidate(0) == 0\n")
        assert problem["test_format"] == "check"

    def test_classes_before_the_function_are_the_program_s(self):
        """Their objects would be strangers to the program if the tests had classes of their own."""
        source = "import math\n\n\nclass Node:\n    pass\n\n\ndef f(node):\n    ...\n\n\nassert f(Node()) is None\n"
        problem = read_problem(source)
        assert "class Node" in problem["prompt"] and "class" not in problem["setup"] and "math" in problem["setup"]

    @pytest.mark.parametrize(
        ("source", "tests", "message"),
        [
            ("def f(x:", None, "the problem is not Python"),
            ("x = 1", None, "the problem defines no function"),
            ("def f(x): ...", "assert ((", r"the tests are not Python: .*\. Write 'assert f\(1\) == 2', for example"),
            ("def f(x): ...", "", r"the tests are empty\. Write 'assert .*, or leave out --tests"),
            ("def f(x): ...", "# later\n", "the tests are empty"),
            ("def f(x): ...\nassert f(1)", "assert f(2)", "has tests after its function, and --tests has others"),
        ],
    )
    def test_refuses_what_is_no_problem(self, source, tests, message):
        with pytest.raises(ValueError, match=message):
            read_problem(source, tests)

    def test_a_model_may_take_the_place_of_a_team(self, tiny_model, tmp_path, capsys):
        (tmp_path / "stack.py").write_text("class Stack:\n    def push(self, x): ...\n")
        (tmp_path / "f.py").write_text("def f(x):\n    raise NotImplementedError\n")
        arguments = [
            "solve",
            "--model_name_or_path",
            tiny_model,
            "--workflow",
            "collaboration",
            "--override",
            "max_completion_length=3",
        ]
        assert main([*arguments, "--messages", "--problem", str(tmp_path / "f.py")]) == 1
        assert "--- helper, turn 1" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="Stack is a class, but the agents of Collaboration write functions"):
            main([*arguments, "--problem", str(tmp_path / "stack.py")])

    def test_other_agents_come_from_a_file(self, saved, tmp_path, capsys):
        (tmp_path / "problem.py").write_text("def f(x):\n    '''Twice x.'''\n")
        (tmp_path / "agents.yaml").write_text("helper2: Write aux2 in the style of Knuth.\n")
        arguments = ["solve", "--team", str(saved("collaboration")), "--problem", str(tmp_path / "problem.py")]
        arguments += ["--isolation", "best_effort", "--messages", "--agents", str(tmp_path / "agents.yaml")]
        assert main([*arguments, "--num_agents", "3"]) == 1  # random weights write no code
        printed = capsys.readouterr()
        assert "--- helper2, turn 1" in printed.err and printed.err.endswith("No reply has code.\n")
        assert printed.out == ""
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        message = "error: roles has a text for 'helper2', which is not an agent of the team ['helper', 'main'].\n"
        assert capsys.readouterr().err.endswith(message)
