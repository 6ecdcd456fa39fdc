"""Teams whose workflow is in a file: saved, loaded, resumed, exported and pushed with it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import teams
from local_hub import use_hub

from marcog_trl import MultiAgentGRPOTrainer, SHPPOTrainer, Team
from marcog_trl.cli.main import main
from marcog_trl.evaluation.baselines import single_agent
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.team.export import export_team
from marcog_trl.team.hub import push_team


FILE = """from pathlib import Path

from marcog_trl import Agent, Slot, Workflow

with Path("runs.txt").open("a") as runs:  # how often this file was run
    runs.write("x")


class Duo(Workflow):
    def __init__(self, num_agents=2):
        self.agents = tuple(Agent(f"a{i}", "Write the function.") for i in range(num_agents))

    @property
    def slots(self):
        return (*(Slot(agent.name) for agent in self.agents), Slot("a0", act=1))

    def play(self, problem):
        replies = yield {agent.name: self.ask(agent.name, problem) for agent in self.agents}
        last = yield {"a0": self.ask("a0", problem, *replies.values())}
        return last["a0"] or replies["a0"]
"""
DATA = teams.dataset(4, entry_point=["f"] * 4, test=[["assert f(1) == 2"]] * 4, test_format=["asserts"] * 4)
EXECUTION = {"isolation": "best_effort", "num_workers": 1}
PROBLEM = {"prompt": "def f(x):", "entry_point": "f"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file in the current folder, as a user has it."""
    monkeypatch.chdir(tmp_path)
    path = Path("my_team.py")
    path.write_text(FILE)
    return path


def runs():
    path = Path("runs.txt")
    return len(path.read_text()) if path.exists() else 0


def make(model, folder, trainer=MultiAgentGRPOTrainer, workflow="my_team.py:Duo", **options):
    options = {"max_steps": 2, "per_device_train_batch_size": 12, "data": DATA, **EXECUTION, **options}
    return teams.make(model, folder, trainer, workflow=workflow, **options)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A run of two steps, with a checkpoint of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        Path("my_team.py").write_text(FILE)
        trainer = make(tiny_model, "team", SHPPOTrainer, save_strategy="steps", save_steps=1)
        Path("my_team.py").write_text("1 / 0  # edited while the run goes on")
        teams.script(trainer)
        trainer.train()
        trainer.save_model()
        trainer.executor.close()
        return Path("team").absolute()


@pytest.fixture
def folder(trained, file):
    """A copy of the saved team; the user's file is beside it."""
    return shutil.copytree(trained, "team")


def one_line(error):
    assert "\n" not in str(error.value)


class TestSave:
    def test_keeps_the_file_as_it_was_run(self, folder):
        for saved in (Path(folder), Path(folder) / "checkpoint-1"):
            assert (saved / "my_team.py").read_text() == FILE
            team = json.loads((saved / "team.json").read_text())
            assert team["settings"]["workflow"] == "my_team.py:Duo" and team["workflow"] == "Duo"
            assert len(team["workflow_sha256"]) == 64 and "source_file" not in team
        assert "my_team.py" in json.loads((Path(folder) / "checkpoint-1" / "complete.json").read_text())["files"]

    def test_never_writes_to_the_user_s_own_file(self, tiny_model, file):
        trainer = make(tiny_model, Path.cwd())
        file.write_text(f"{FILE}# edited since")
        trainer.save_model()
        assert file.read_text().endswith("# edited since")
        trainer.save_model("elsewhere")
        assert Path("elsewhere/my_team.py").read_text() == FILE

    def test_an_instance_is_not_saved_and_has_to_be_given(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, workflow=teams.Pair())
        trainer.save_model()
        with pytest.raises(ValueError, match=r"the workflow Pair, which is not in the folder\. Pass it") as error:
            Team.from_pretrained(tmp_path)
        one_line(error)
        assert Team.from_pretrained(tmp_path, workflow=teams.Pair()).agents == ["a", "b"]


class TestLoad:
    def test_needs_trust_and_runs_nothing_without_it(self, folder):
        with pytest.raises(ValueError, match=r"'team' has its workflow in my_team\.py, and to load it") as error:
            Team.from_pretrained(folder)
        one_line(error)
        with pytest.raises(ValueError, match="Read the file, then set trust_remote_code=True"):
            single_agent(folder)
        assert runs() == 0

    def test_with_trust(self, folder, file):
        file.unlink()
        team = Team.from_pretrained(folder, trust_remote_code=True, **EXECUTION)
        assert runs() == 1 and team.agents == ["a0", "a1"]
        assert team.description.settings["workflow"] == "my_team.py:Duo"
        assert team.description.source_file.content == FILE.encode()
        answer = team.solve(PROBLEM)
        assert [message["agent"] for message in answer.messages] == ["a0", "a1", "a0"]
        assert answer.messages[0]["prompt"][0]["content"] == "Write the function.\n\ndef f(x):"

    @pytest.mark.parametrize("instance", [False, True])
    def test_with_a_copy_of_one_s_own(self, folder, instance):
        from marcog_trl import make_workflow

        workflow = make_workflow("my_team.py:Duo") if instance else "my_team.py:Duo"
        team = Team.from_pretrained(folder, workflow=workflow, **EXECUTION)
        assert team.agents == ["a0", "a1"] and team.description.source_file.content == FILE.encode()

    def test_of_another_size(self, folder):
        team = Team.from_pretrained(folder, num_agents=3, trust_remote_code=True, **EXECUTION)
        assert team.agents == ["a0", "a1", "a2"] and len(team.solve(PROBLEM).messages) == 4

    def test_a_file_that_is_gone_is_missed(self, folder):
        (Path(folder) / "my_team.py").unlink()
        with pytest.raises(ValueError, match=r"'team' has no my_team\.py, which defines its workflow") as error:
            Team.from_pretrained(folder, trust_remote_code=True)
        one_line(error)
        assert Team.from_pretrained(folder, workflow="my_team.py:Duo").agents == ["a0", "a1"]

    @pytest.mark.parametrize(
        ("workflow", "message"),
        [
            ("my_team.py:Other", r"defines no class 'Other'"),
            ("gone.py:Duo", r"the file 'gone\.py' cannot be read"),
            ("pipeline", r"was saved with agents=.*'a0'.*'planner'"),
        ],
    )
    def test_another_workflow_is_refused(self, folder, workflow, message):
        with pytest.raises(ValueError, match=message) as error:
            Team.from_pretrained(folder, workflow=workflow)
        one_line(error)

    def test_the_file_stays_in_the_folder(self, folder):
        """A name with a path in `team.json` does not lead out of it."""
        path = Path(folder) / "team.json"
        path.write_text(path.read_text().replace("my_team.py:Duo", "../my_team.py:Duo"))
        (Path(folder) / "my_team.py").unlink()
        with pytest.raises(ValueError, match=r"has no my_team\.py"):
            Team.from_pretrained(folder, trust_remote_code=True)


class TestBaselines:
    def test_a_single_agent_has_the_budget_of_the_workflow(self, folder):
        team = single_agent(folder, trust_remote_code=True, **EXECUTION)
        assert team.agents == ["solver"] and team.settings.max_completion_length == 3 * 6
        assert single_agent(folder, workflow="my_team.py:Duo", **EXECUTION).settings.max_completion_length == 3 * 6

    def test_a_reward_of_one_s_own_is_given_or_replaced(self, folder):
        team = Team.from_pretrained(folder, trust_remote_code=True, **EXECUTION)
        with pytest.raises(ValueError, match=r"with a reward of its own: Reward 'letters' is unknown.*--reward"):
            evaluate_team(team, DATA.select([0]), 1)
        assert "rewards/letters" in evaluate_team(team, DATA.select([0]), 1, reward_funcs=teams.letters)

    def test_an_evaluation_goes_on_with_the_same_file_only(self, folder, file):
        def evaluate():
            team = Team.from_pretrained(folder, workflow="my_team.py:Duo", **EXECUTION)
            return evaluate_team(team, DATA.select([0]), 1, output="e.json", reward_funcs=teams.letters)

        evaluate()
        evaluate()
        file.write_text(f"{FILE}# changed\n")
        with pytest.raises(ValueError, match="is an evaluation with workflow_sha256="):
            evaluate()


class TestResume:
    def test_a_changed_file_is_refused_before_any_work(self, tiny_model, folder, file):
        file.write_text(f"{FILE}\n# another comment\n")
        checkpoint = Path(folder) / "checkpoint-1"
        trainer = make(tiny_model, "other", SHPPOTrainer)
        calls, name = teams.script(trainer), re.escape(f"{checkpoint}/my_team.py")
        message = (
            f"another version of the workflow's file, '{name}', than this run. Set --workflow {name}:Duo to resume"
        )
        with pytest.raises(ValueError, match=message) as error:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        one_line(error)
        assert not calls
        trainer.load_team(checkpoint)  # a new run may begin from its weights

    @pytest.mark.parametrize("workflow", ["my_team.py:Duo", "team/checkpoint-1/my_team.py:Duo"])
    def test_goes_on_with_the_same_file(self, tiny_model, folder, workflow):
        trainer = make(tiny_model, "other", SHPPOTrainer, workflow=workflow, save_strategy="steps", save_steps=1)
        teams.script(trainer)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        assert trainer.state.global_step == 2
        assert Path("other/checkpoint-2/my_team.py").read_text() == FILE
        assert (Path(folder) / "checkpoint-1" / "my_team.py").read_text() == FILE


class TestShare:
    def test_the_file_is_exported_and_pushed(self, folder, monkeypatch, tmp_path):
        team = Team.from_pretrained(folder, trust_remote_code=True, **EXECUTION)
        export_team(team, folder, "exported", DATA)
        assert Path("exported/my_team.py").read_text() == FILE
        hub = use_hub(monkeypatch, tmp_path / "cache")
        push_team("exported", "user/team")
        assert {"my_team.py", "team.json", "README.md"} <= set(hub.repos["user/team"])
        card = Path("exported/README.md").read_text()
        assert (
            "The workflow is Python code in `my_team.py`, which `trust_remote_code=True` runs. Read it first." in card
        )
        assert 'Team.from_pretrained("user/team", trust_remote_code=True)' in card


def test_a_reward_in_a_file_is_saved_and_measured(tiny_model, tmp_path, monkeypatch, capsys):
    """Without the user's file, and only if its copy is trusted."""
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text("def brief(completions, **kwargs):\n    return [7.0 for _ in completions]\n")
    options = {"workflow": "collaboration", "data": DATA, **EXECUTION}
    trainer = teams.make(tiny_model, "team", MultiAgentGRPOTrainer, ["my_reward.py:brief"], **options)
    trainer.save_model()
    assert json.loads(Path("team/team.json").read_text())["rewards"] == ["my_reward.py:brief"]
    Path("my_reward.py").unlink()
    command = ["evaluate", "--team", "team", "--dataset_test_split", "test[:1]", "--num_samples", "1"]
    command += ["--isolation", "best_effort"]
    with pytest.raises(SystemExit, match=r"The team has its reward in '.*my_reward\.py'") as error:
        main(command)
    one_line(error)
    main([*command, "--trust_remote_code", "--output", "figures.json"])
    assert json.loads(Path("figures.json").read_text())["figures"]["reward"] == 7.0
    export_team(Team.from_pretrained("team", isolation="best_effort"), Path("team"), "exported", DATA)
    assert Path("exported/my_reward.py").is_file()
