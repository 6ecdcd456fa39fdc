"""A team goes to the Hub whole, and comes back: against a Hub in memory."""

import json
import re
import runpy
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import teams
import torch
import wandb
from launched import launched
from local_hub import TOKEN, use_hub
from safetensors.torch import load, load_file
from transformers import set_seed

from marcog_trl import SHPPOTrainer
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.cli.train import train
from marcog_trl.team.card import write_card
from marcog_trl.team.export import export_agents, export_team
from marcog_trl.team.hub import PushError, push_team
from marcog_trl.team.modules import ForwardContext
from marcog_trl.team.team import Team


ROOT = Path(__file__).parents[2]
TESTED = teams.dataset(2, test=[["assert f(1)"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)
REPOSITORY = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "team.json",
    "team_modules.safetensors",
    "README.md",
    "tokenizer.json",
    "agents/export.json",
    "agents/helper/adapter_config.json",
    "agents/helper/adapter_model.safetensors",
    "agents/main/adapter_config.json",
    "agents/main/adapter_model.safetensors",
}


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    return use_hub(monkeypatch, tmp_path_factory.mktemp("cache"))


def make(model, path, **options):
    trainer = teams.make(
        model, path, SHPPOTrainer, workflow="collaboration", data=TESTED, reward="execution_reward", num_workers=1,
        isolation="best_effort", per_device_train_batch_size=4, **options,
    )  # fmt: skip
    teams.randomize(trainer.modules)
    teams.script(trainer)
    return trainer


def write_results(folder):
    figures = {
        "solved": 0.25,
        "solved_interval": [0.2, 0.3],
        "reward": 1.5,
        "tests_passed": 0.5,
        "parses": 1.0,
        "samples": 8,
    }
    figures |= {"solved_greedy": 0.5, "solved_greedy_interval": [0.4, 0.6]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    results = {"untrained": figures, "trained": {**figures, "solved": 0.75}, "seconds": 3.0}
    (Path(folder) / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """The folder of a trained team in agent scope, with pickles, a checkpoint and the lock of the run beside it."""
    path = tmp_path_factory.mktemp("saved") / "run"
    trainer = make(tiny_model, path, latent_scope="agent", save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card("run", "builtin")
    trainer.executor.close()
    write_results(path)
    (path / "_run.lock").touch()
    return path


@pytest.fixture(scope="module")
def written(saved, tmp_path_factory):
    """What `export_team` writes of it, and the team."""
    trainer = Team.from_pretrained(saved, isolation="best_effort")
    path = tmp_path_factory.mktemp("written") / "team"
    export_team(trainer, saved, path)
    trainer.executor.close()
    return path, trainer


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestExportTeam:
    def test_writes_the_team_as_it_was_and_its_agents(self, saved, written):
        files, before = files_of(written[0]), files_of(saved)
        assert REPOSITORY | {"results.json"} <= set(files)
        for name in files:
            if "/" not in name and name != "README.md":
                assert files[name] == before[name], name
        assert not [name for name in files if name.endswith((".bin", ".pt", ".partial")) or "checkpoint" in name]
        assert "_run.lock" not in files
        assert [path.name for path in written[0].parent.iterdir()] == ["team"]

    def test_a_team_without_a_trainers_card_gets_one(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path / "run", parameter_sharing="separate")
        trainer.save_model()
        trainer.executor.close()
        assert "Training procedure" not in (tmp_path / "run" / "README.md").read_text()
        export_team(trainer.team, tmp_path / "run", tmp_path / "team")
        card = (tmp_path / "team" / "README.md").read_text()
        assert "Each agent was trained with an adapter of its own." in card
        assert REPOSITORY <= set(files_of(tmp_path / "team"))

    def test_a_team_of_another_size_is_written_as_what_it_is(self, saved, tmp_path):
        shutil.copytree(saved, tmp_path / "saved", ignore=shutil.ignore_patterns("checkpoint-*"))
        saved = tmp_path / "saved"
        (saved / "report.html").write_text("of the training")
        roles = {"helper2": "Write aux2, which counts."}
        trainer = Team.from_pretrained(saved, isolation="best_effort", num_agents=3, roles=roles)
        report = export_team(trainer, saved, tmp_path / "team")
        trainer.executor.close()
        files = files_of(tmp_path / "team")
        assert list(report) == ["helper", "helper2", "main"]
        assert not {"results.json", "report.html"} & set(files)
        assert {f"agents/{agent}/adapter_model.safetensors" for agent in report} <= set(files)
        card = files["README.md"].decode()
        assert "A team of 3 LLM agents" in card and "| helper2 | Write aux2, which counts. |" in card
        assert "trained with other agents or role texts (`helper`, `main`), and not trained further with these" in card
        loaded = Team.from_pretrained(tmp_path / "team", isolation="best_effort")
        assert loaded.workflow.agents == trainer.workflow.agents and len(loaded.agents) == 3
        assert json.loads(files["team.json"])["rewards"] == ["execution_reward"]
        small = Team.from_pretrained(tmp_path / "team", isolation="best_effort", num_agents=2)
        assert small.settings.roles is None and small.agents == ["helper", "main"]

    def test_refuses_bad_folders(self, written, tiny_model, tmp_path):
        path, trainer = written
        with pytest.raises(ValueError, match=r"has no team\.json\. Use a folder that a trainer's save_model wrote"):
            export_team(trainer, tmp_path, tmp_path / "out")
        with pytest.raises(ValueError, match=r"team' exists already\. Use a new folder"):
            export_team(trainer, path, path)
        team = json.loads((path / "team.json").read_text())
        (tmp_path / "team.json").write_text(json.dumps({**team, "workflow": "Single"}))
        with pytest.raises(ValueError, match=r"The team's workflow is 'Collaboration', but that of .* is"):
            export_team(trainer, tmp_path, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["team.json"]


class TestCard:
    def test_says_what_the_team_is_how_it_was_trained_and_how_to_use_it(self, saved, written):
        card = (written[0] / "README.md").read_text()
        assert card.startswith("---\n") and "\n# run\n" in card and "- shppo" in card
        team = json.loads((saved / "team.json").read_text())
        for agent in team["agents"]:
            assert f"| {agent['name']} | {' '.join(agent['role'].split())} | `agents/{agent['name']}` |" in card
        assert "workflow: `Collaboration`, 1 turn; rewards: `execution_reward`" in card and "on `builtin`" in card
        assert "| solved (sampled) | 0.250 (0.200 to 0.300) | 0.750 (0.200 to 0.300) |" in card
        assert "| mean reward | 1.500 | 1.500 |" in card
        assert "--enable-lora --max-loras 2 --max-lora-rank 8" in card
        assert "--lora-modules helper=agents/helper main=agents/main" in card
        assert "@article{guo2025heterogeneous" in card and "vonwerra2020trl" in card and "TRL: 1." in card
        assert "It gives the same outputs as the agent in the team." in card and "KL per token" not in card

    def test_links_to_the_run_in_a_tracker_and_keeps_the_link(self, tiny_model, tmp_path, monkeypatch):
        monkeypatch.setattr(wandb, "run", SimpleNamespace(url="https://wandb.ai/someone/runs/1"))
        trainer = make(tiny_model, tmp_path)
        trainer.create_model_card("run")
        monkeypatch.setattr(wandb, "run", None)
        write_card(tmp_path, "someone/team", trainer.team.description.to_dict())
        trainer.executor.close()
        assert "](https://wandb.ai/someone/runs/1)" in (tmp_path / "README.md").read_text()

    def test_can_be_written_again(self, written, tmp_path):
        (tmp_path / "team").mkdir()
        for name, content in files_of(written[0]).items():
            (tmp_path / "team" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "team" / name).write_bytes(content)
        card = tmp_path / "team" / "README.md"
        before = card.read_text()
        write_card(tmp_path / "team")
        assert card.read_text() == before
        write_card(tmp_path / "team", "someone/else")
        assert 'team = "someone/else"' in card.read_text() and "\n# else\n" in card.read_text()
        assert "hf download someone/else --local-dir team" in card.read_text()
        write_card(tmp_path / "team")
        assert card.read_text() == before

    def test_does_not_say_where_files_lie_on_this_machine(self, written, tiny_model):
        card = (written[0] / "README.md").read_text()
        assert str(Path(tiny_model).parent) not in card and "path/to/tiny" in card

    def test_says_how_far_agents_in_observation_scope_are_from_the_live_ones(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, latent_learning_rate=0.0)
        report = trainer.export_agents(tmp_path / "agents")
        trainer.create_model_card("run")
        write_card(tmp_path, team=trainer.team.description.to_dict())
        card = (tmp_path / "README.md").read_text()
        for agent, own in report.items():
            assert re.search(rf"\| {agent} \|.*\| {own['kl_per_token']:.2g} \({own['tokens']} tokens\) \|", card)

    def test_of_one_agent(self, tiny_model, tmp_path):
        trainer = teams.make(tiny_model, tmp_path, teams.MultiAgentGRPOTrainer)
        trainer.save_model()
        trainer.export_agents(tmp_path / "agents")
        trainer.create_model_card("run")
        card = (tmp_path / "README.md").read_text()
        assert "\nOne LLM agent on the local model `tiny`, trained by reinforcement learning" in card
        assert "workflow: `Single`, 1 turn; rewards: `letters`." in card
        assert "--max-loras 1 --max-lora-rank 8 \\\n    --lora-modules solver=agents/solver\n" in card
        assert "prompt = 'def add(a, b):  # the sum of a and b'\n" in card and "All agents use" not in card
        assert "tokenizer(prompt, return_tensors" in card  # plain text of a user's dataset is continued

    def test_of_somebody_else_is_not_touched(self, saved, tmp_path):
        (tmp_path / "README.md").write_text("# Mine\n")
        with pytest.raises(ValueError, match=r"README\.md' is not the card of a team of this version\. Write one"):
            write_card(tmp_path, team=json.loads((saved / "team.json").read_text()))
        assert (tmp_path / "README.md").read_text() == "# Mine\n"


class TestPushTeam:
    def test_is_one_commit_of_the_whole_folder(self, hub, written):
        push_team(written[0], "someone/team")
        assert {name: hub.repos["someone/team"][name] for name in REPOSITORY} == {
            name: content for name, content in files_of(written[0]).items() if name in REPOSITORY
        }
        assert hub.commits == [sorted(files_of(written[0]))]
        push_team(written[0], "someone/team")  # again, into a repository that exists
        assert len(hub.commits) == 2

    def test_agents_that_the_team_no_longer_has_go_in_the_same_commit(self, hub, saved, written, tmp_path):
        trainer = Team.from_pretrained(saved, isolation="best_effort", num_agents=3)
        export_team(trainer, saved, tmp_path / "team")
        trainer.executor.close()
        push_team(tmp_path / "team", "someone/team")
        assert "agents/helper2/adapter_config.json" in hub.repos["someone/team"]
        hub.repos["someone/team"]["notes.md"] = b"mine"
        push_team(written[0], "someone/team")
        assert set(hub.repos["someone/team"]) == {
            *files_of(tmp_path / "team"),
            *files_of(written[0]),
            "notes.md",
        } - {
            "agents/helper2/adapter_config.json",
            "agents/helper2/adapter_model.safetensors",
        }
        assert len(hub.commits) == 2

    @pytest.mark.parametrize(
        ("token", "is_full", "message"),
        [("hf_stranger", False, "You have no rights"), (TOKEN, True, "The storage is full")],
    )
    def test_a_failure_is_clear_keeps_everything_and_can_be_mended(self, hub, written, token, is_full, message):
        before = {name: content for name, content in files_of(written[0]).items() if name != "README.md"}
        hub.is_full = is_full
        with pytest.raises(PushError, match=rf"The push to 'someone/team' failed: .*{message}") as raised:
            push_team(written[0], "someone/team", token=token)
        way = f"To push it again: python recipes/export.py --output_dir {written[0]} --push someone/team"
        assert str(raised.value).endswith(way)
        assert not hub.repos.get("someone/team")
        after = files_of(written[0])
        assert {name: after[name] for name in before} == before and after.keys() == before.keys() | {"README.md"}
        hub.is_full = False
        push_team(written[0], "someone/team")
        assert REPOSITORY <= set(hub.repos["someone/team"])

    def test_an_agents_push_saves_first_and_then_pushes(self, hub, tiny_model, tmp_path):
        write_results(tmp_path)
        trainer = make(tiny_model, tmp_path)
        hub.is_full = True
        with pytest.raises(PushError, match="The storage is full"):
            trainer.push_agents_to_hub("someone/team", dataset_name="builtin")
        assert REPOSITORY <= set(files_of(tmp_path))
        hub.is_full = False
        push_team(tmp_path, "someone/team")
        repository = hub.repos["someone/team"]
        assert REPOSITORY <= set(repository) and "training_args.bin" not in repository
        card = repository["README.md"].decode()
        assert "# team" in card and "KL per token" in card and "| solved (sampled) | 0.250" in card
        modules = load(repository["team_modules.safetensors"])
        assert all(torch.equal(modules[name], tensor) for name, tensor in trainer.modules.state_dict().items())


@pytest.fixture
def recipe(hub, monkeypatch):
    """Runs the recipe with a command line."""

    def run_recipe(*arguments):
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        monkeypatch.syspath_prepend(ROOT / "recipes")  # as where it is started
        runpy.run_path(str(ROOT / "recipes" / "export.py"), run_name="__main__")

    return run_recipe


class TestRecipe:
    def test_exports_pushes_and_pushes_again(self, hub, recipe, saved, tmp_path, monkeypatch, capsys):
        out = tmp_path / "team"
        monkeypatch.setenv("HF_TOKEN", "hf_stranger")
        with pytest.raises(SystemExit, match=r"error: The push to 'someone/team' failed: .*You have no rights"):
            recipe("--adapter", saved, "--output_dir", out, "--isolation", "best_effort", "--push", "someone/team")
        assert f"{out}/agents/main: the agent itself" in capsys.readouterr().out
        assert REPOSITORY <= set(files_of(out)) and not hub.commits
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        recipe("--output_dir", out, "--push", "someone/team")
        assert "Pushed: https://huggingface.co/someone/team/commit/" in capsys.readouterr().out
        assert hub.commits == [sorted(files_of(out))]


class TestLoading:
    @pytest.fixture
    def snippets(self, hub, written):
        push_team(written[0], "someone/team")
        return re.findall(r"(?ms)^```python\n(.*?)^```", hub.repos["someone/team"]["README.md"].decode(), re.DOTALL)

    def test_the_cards_snippet_loads_the_agents_with_peft_alone(self, hub, written, snippets, tmp_path):
        unpack(hub.repos["someone/team"], tmp_path)
        trainer, names = written[1], {}
        assert "marcog_trl" not in snippets[0] and "trl" not in re.findall(r"^from (\w+)", snippets[0], re.M)
        snippet = snippets[0].replace("path/to/tiny", trainer.model.config.name_or_path)
        exec(snippet.replace("someone/team", str(tmp_path)), names)
        logits = {}
        trainer.model.eval()
        with torch.no_grad():
            mu, _ = trainer.modules.latents(trainer.role_observations)
            for agent, z in zip(trainer.agents, mu, strict=True):
                names["model"].set_adapter(agent)
                logits[agent] = names["model"].eval()(**names["inputs"]).logits
                with trainer.modules.rows(ForwardContext(z=z[None])):
                    expected = trainer.model(**names["inputs"]).logits
                assert (expected - logits[agent]).abs().max() < 1e-5 * max(1, expected.abs().max())
        assert (logits["helper"] - logits["main"]).abs().max() > 1e-3

    def test_the_cards_snippet_loads_the_whole_team(self, snippets):
        names = {}
        exec(snippets[1], names)
        assert names["team"].agents == ["helper", "main"]
        names["team"].close()


class TestPushToHub:
    def test_without_rights_it_fails_before_any_work(self, hub, tiny_model, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_stranger")
        with pytest.raises(PushError, match=r"You have no rights .* -- Log in with a token with write access"):
            make(tiny_model, tmp_path, push_to_hub=True, hub_model_id="someone/team")


def test_a_recipe_whose_last_push_fails_keeps_its_results(hub, tiny_model, tmp_path, capsys):
    hub.is_full = True
    out = tmp_path / "run"
    flags = (
        f"--model_name_or_path {tiny_model} --max_steps 1 --num_test_samples 0 --logging_steps 1 --num_generations 2 "
    )
    flags += "--max_completion_length 4 --per_device_train_batch_size 8 --report_to none --bf16 false --isolation best_effort "
    flags += f"--push_to_hub true --hub_model_id someone/team --output_dir {out}"
    with pytest.raises(SystemExit) as ended:
        train(RECIPES["shppo"], flags.split())
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert error.startswith("error: The push to 'someone/team' failed: ") and "The storage is full" in error
    assert error.endswith(f"To push it again: python recipes/export.py --output_dir {out} --push someone/team")
    assert REPOSITORY | {"results.json", "report.html"} <= set(files_of(out)) and not hub.commits


SCRIPT = """
import sys
import pytest
import teams
import torch
from local_hub import use_hub
from marcog_trl import SHPPOTrainer

hub = use_hub(pytest.MonkeyPatch(), sys.argv[2] + "-cache")
data = teams.dataset(4, entry_point=["f"] * 4)


def reward(completions, replies, **kwargs):
    return teams.letters(["".join(texts.values()) for texts in replies])


trainer = teams.make(
    sys.argv[1], sys.argv[2], SHPPOTrainer, workflow="collaboration", data=data, reward=reward, push_to_hub=True,
    hub_model_id="someone/team", latent_scope="agent", save_strategy="steps", save_steps=1, hub_strategy="every_save",
    hub_always_push=True, max_steps=2, per_device_train_batch_size=4,
)
trainer.train()
if trainer.accelerator.is_main_process:
    torch.save(hub.states, sys.argv[2] + ".pt")
"""


def unpack(files, folder):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def check_agents(files, folder):
    """Agents in a repository are those of the adapter beside them, folded from the modules beside it."""
    unpack(files, folder)
    loaded = Team.from_pretrained(folder, isolation="best_effort")
    export_agents(loaded, folder / "again")
    for agent in loaded.agents:
        pushed = load(files[f"agents/{agent}/adapter_model.safetensors"])
        for name, tensor in load_file(folder / "again" / agent / "adapter_model.safetensors").items():
            assert (pushed[name] - tensor).abs().max() < 1e-6, (agent, name)
    return loaded


def test_a_trainers_push_takes_agents_away_that_it_does_not_have(hub, tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, hub_model_id="someone/team", hub_revision="trial")
    trainer.push_to_hub()
    before = dict(hub.repos["someone/team"])
    assert REPOSITORY <= set(before)
    hub.repos["someone/team"] |= {"agents/helper2/adapter_config.json": b"{}", "notes.md": b"mine"}
    trainer.push_to_hub()
    trainer.executor.close()
    assert set(hub.repos["someone/team"]) == {*before, "notes.md"}
    assert set(hub.revisions) == {"trial"}


class TestEverySave:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["ddp", "zero3"])
    def test_every_push_is_of_one_step_with_several_processes(self, tiny_model, tmp_path, mode):
        (tmp_path / "script.py").write_text(SCRIPT)
        launched(mode, tmp_path / "script.py", tiny_model, tmp_path / "run")
        pushed = [files for files in torch.load(tmp_path / "run.pt") if "team.json" in files]
        assert len({files["adapter_model.safetensors"] for files in pushed}) == 2  # steps
        for i, files in enumerate(pushed):
            assert REPOSITORY <= set(files)
            check_agents(files, tmp_path / str(i))
            assert 'subfolder="agents/helper"' in files["README.md"].decode()

    @pytest.fixture
    def trainer(self, hub, tiny_model, tmp_path):
        options = {"push_to_hub": True, "hub_model_id": "someone/team", "hub_strategy": "every_save"}
        trainer = make(tiny_model, tmp_path, save_strategy="steps", save_steps=1, max_steps=2, **options)
        yield trainer
        trainer.executor.close()

    def test_in_observation_scope_training_goes_on_as_if_nothing_had_been(self, hub, trainer, tiny_model, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        other = make(tiny_model, tmp_path / "other", **options)
        for each in (trainer, other):
            del each._generate_single_turn  # samples
            set_seed(0)
            each.train()
            each.executor.close()
        expected, weights = teams.trainable(other), teams.trainable(trainer)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        exported = json.loads(hub.repos["someone/team"]["agents/export.json"])
        assert exported["latent_scope"] == "observation" and exported["agents"]["main"]["tokens"] > 0

    def test_while_a_push_is_under_way_nothing_changes(self, hub, trainer, tmp_path):
        trainer.train()
        trainer._finish_current_push()
        before, commits = files_of(tmp_path), len(hub.commits)
        teams.randomize(trainer.modules)
        running = Future()
        trainer.push_in_progress.jobs.append(running)
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        assert files_of(tmp_path) == before and len(hub.commits) == commits
        running.set_result(None)
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        trainer._finish_current_push()
        assert files_of(tmp_path) != before and len(hub.commits) == commits + 1
