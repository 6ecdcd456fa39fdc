"""Agents as ordinary adapters: what a process without marcog_trl loads is the agent, or as far from it as the report says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import teams
import torch
from launched import launched
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from marcog_trl import MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer
from marcog_trl.heterogeneity import fold
from marcog_trl.team.export import delete_export
from marcog_trl.team.modules import ForwardContext


TEAMS = {
    "agent": (SHPPOTrainer, {"latent_scope": "agent"}),
    "observation": (SHPPOTrainer, {}),
    "separate": (SHPPOTrainer, {"parameter_sharing": "separate"}),
    "shared": (SHPPOTrainer, {"parameter_sharing": "shared"}),
    "ppo": (MultiAgentPPOTrainer, {}),
    "grpo": (MultiAgentGRPOTrainer, {}),
    "dora": (MultiAgentGRPOTrainer, {"lora": {"use_dora": True}}),
}


def make(name, model, path, workflow=None, **options):
    """A team whose adapter and modules are far from their start, and whose replies are scripted."""
    trainer_class, own = TEAMS[name]
    trainer = teams.make(model, path, trainer_class, workflow=workflow or teams.Pair(), **{**own, **options})
    if isinstance(trainer, SHPPOTrainer):
        teams.randomize(trainer.modules, scale=0.1)
    teams.script(trainer)
    return trainer


VANILLA = """
import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

model, out, prompt, *folders = sys.argv[1:]
logits = {}
for folder in folders:
    agent = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).eval()
    with torch.no_grad():
        logits[folder] = agent(input_ids=torch.tensor([json.loads(prompt)])).logits
assert "marcog_trl" not in sys.modules and "trl" not in sys.modules
torch.save(logits, out)
"""


@pytest.fixture(scope="module")
def exported(tiny_model, tmp_path_factory):
    """Of every team: its agents' live logits, those of the exported ones in a process without marcog_trl, its folder."""
    folder = tmp_path_factory.mktemp("exported")
    live, folders = {}, []
    for name in TEAMS:
        trainer = make(name, tiny_model, folder / name / "run")
        live[name] = {agent: teams.live_logits(trainer, agent) for agent in trainer.agents}
        spoken, generate = [], trainer.team.generate
        trainer.team.generate = lambda rows, spoken=spoken, generate=generate: spoken.extend(rows) or generate(rows)
        trainer.export_agents(folder / name / "agents")
        if name == "observation":
            latents = {agent: [row.latent for row in spoken if row.slot.agent == agent] for agent in "ab"}
            for agent, own in latents.items():
                with torch.no_grad(), trainer.modules.rows(ForwardContext(z=torch.stack(own).mean(0)[None])):
                    live["mean", agent] = trainer.model(input_ids=torch.tensor([teams.PROMPT])).logits
        folders += [str(folder / name / "agents" / agent) for agent in trainer.agents]
    out = folder / "logits.pt"
    command = [sys.executable, "-c", VANILLA, tiny_model, str(out), json.dumps(teams.PROMPT), *folders]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    vanilla = {(Path(f).parts[-3], Path(f).name): logits for f, logits in torch.load(out).items()}
    return live, vanilla, folder


class TestVanillaPeft:
    @pytest.mark.parametrize("name", [name for name in TEAMS if name != "observation"])
    def test_an_exported_agent_is_the_live_one(self, exported, name):
        live, vanilla, _ = exported
        for agent, logits in live[name].items():
            assert (vanilla[name, agent] - logits).abs().max() < 1e-5 * max(1, logits.abs().max())
        differ = (live[name]["a"] - live[name]["b"]).abs().max() > 1e-2
        assert differ == (name in ("agent", "separate"))

    def test_in_observation_scope_it_has_the_mean_latent(self, exported):
        live, vanilla, _ = exported
        for agent in "ab":
            assert (vanilla["observation", agent] - live["mean", agent]).abs().max() < 1e-5
            assert (vanilla["observation", agent] - live["observation"][agent]).abs().max() > 1e-4

    @pytest.mark.parametrize("name", TEAMS)
    def test_folders_hold_an_ordinary_adapter_and_nothing_else(self, exported, tiny_model, name):
        agents = exported[2] / name / "agents"
        assert {path.name for path in agents.iterdir()} == {"a", "b", "export.json"}
        assert {path.name for path in agents.parent.iterdir()} <= {"agents", "run"}
        for agent in "ab":
            files = {path.name for path in (agents / agent).iterdir()}
            assert files == {"adapter_config.json", "adapter_model.safetensors"}
            config = json.loads((agents / agent / "adapter_config.json").read_text())
            assert (config["peft_type"], config["r"], config["inference_mode"]) == ("LORA", 4, True)
            assert config["base_model_name_or_path"] == tiny_model
            assert not any("marcog" in key for key in load_file(agents / agent / "adapter_model.safetensors"))
        content = json.loads((agents / "export.json").read_text())
        expected = {"agent": "latent", "observation": "latent", "separate": "separate"}.get(name, "shared")
        assert content["parameter_sharing"] == expected
        assert content["latent_scope"] == (name if expected == "latent" else None)
        measured = {agent: report["tokens"] > 0 for agent, report in content["agents"].items()}
        assert measured == {"a": name == "observation", "b": name == "observation"}


class TestDistance:
    def test_is_the_mean_divergence_on_what_the_live_agent_wrote(self, tiny_model, tmp_path):
        """Against the files that were written, in plain PEFT, at the temperature at which the agents speak."""
        workflow = teams.Chain("abc", num_turns=2)
        data = teams.dataset(3)
        trainer = make("observation", tiny_model, tmp_path, workflow, temperature=0.5, per_device_train_batch_size=12)
        spoken = []
        observe = trainer.team.generate
        trainer.team.generate = lambda rows: spoken.extend(rows) or observe(rows)
        report = trainer.export_agents(tmp_path / "agents", data)
        assert json.loads((tmp_path / "agents" / "export.json").read_text())["agents"] == report
        assert len(spoken) == 18
        for agent in "abc":
            base = AutoModelForCausalLM.from_pretrained(tiny_model)
            folded = PeftModel.from_pretrained(base, tmp_path / "agents" / agent).eval()
            total, tokens = 0.0, 0
            for row in (row for row in spoken if row.slot.agent == agent):
                ids = torch.tensor([row.prompt_ids + row.completion_ids])
                with torch.no_grad():
                    with trainer.modules.rows(ForwardContext(z=row.latent[None])):
                        live = trainer.model.eval()(input_ids=ids).logits
                    logits = torch.cat([live, folded(input_ids=ids).logits]) / 0.5
                    p, q = logits[:, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
                total += torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
                tokens += len(row.completion_ids)
            assert report[agent]["tokens"] == tokens
            assert report[agent]["kl_per_token"] == pytest.approx(total / tokens, rel=1e-3)
            assert report[agent]["kl_per_token"] > 1e-5

    def test_is_0_where_latents_do_not_depend_on_the_prompt(self, tiny_model, tmp_path):
        trainer = make("observation", tiny_model, tmp_path)
        with torch.no_grad():
            trainer.modules.latent_net.first.weight.zero_()
        report = trainer.export_agents(tmp_path / "agents")
        assert all(own["kl_per_token"] < 1e-8 and own["tokens"] > 0 for own in report.values())


class Silent(teams.Pair):
    """Agent b speaks in one problem only."""

    def play(self, problem):
        yield {
            agent.name: problem["prompt"] for agent in self.agents if agent.name == "a" or "f1" in problem["prompt"]
        }

    def solution(self, problem, replies):
        return replies["a"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("problems", "message"),
        [
            ([], r"problems=\[\] cannot be played\. Pass problems with a column 'prompt'\."),
            ([{"question": "?"}], r"problems with the columns \['question'\] cannot be played"),
            ([{"prompt": "def f0(x):"}], r"Agent 'b' wrote no reply on the 1 problems\. Pass problems on which"),
        ],
    )
    def test_problems_that_say_nothing_of_an_agent(self, tiny_model, tmp_path, problems, message):
        trainer = make("observation", tiny_model, tmp_path / "run", Silent())
        with pytest.raises(ValueError, match=message):
            trainer.export_agents(tmp_path / "agents", problems)
        assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == []

    @pytest.mark.parametrize(
        ("name", "works"),
        [("a/b", "a_b"), ("..", "main"), (" ", "main"), ("a.b", "a_b"), ("a b", "a_b"), ("-r", "r"), ("", "main")],
    )
    def test_names_that_cannot_be_folders_and_words(self, tiny_model, tmp_path, name, works):
        trainer = make("ppo", tiny_model, tmp_path)
        trainer.team.agents[0] = name
        with pytest.raises(ValueError, match=f"Agent '{name}' cannot be exported, .*, such as '{works}'"):
            trainer.export_agents(tmp_path / "agents")

    def test_what_is_no_export_is_not_replaced(self, tiny_model, tmp_path):
        trainer = make("ppo", tiny_model, tmp_path / "run")
        (tmp_path / "agents" / "notes").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"contains 'notes', which is not an export\. Use a new folder"):
            trainer.export_agents(tmp_path / "agents")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ValueError, match=r"file' is a file\. Use a new folder"):
            trainer.export_agents(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.parametrize("name", ["notes.txt", "a/notes.txt", "mine/adapter_config.json", "images/curve.png"])
    def test_a_user_s_file_in_an_earlier_export_is_kept(self, tiny_model, tmp_path, name):
        trainer = make("ppo", tiny_model, tmp_path / "run")
        trainer.export_agents(tmp_path / "agents")
        (tmp_path / "agents" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "agents" / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"contains '{name}', which is not an export\. Use a new folder"):
            trainer.export_agents(tmp_path / "agents")
        assert (tmp_path / "agents" / name).read_text() == "mine"

    def test_a_user_s_file_beside_a_whole_model_is_kept(self, tiny_model, tmp_path):
        whole = {"full_finetuning": True, "peft_config": None, "workflow": teams.Pair()}
        trainer = teams.make(tiny_model, tmp_path / "run", **whole)
        trainer.export_agents(tmp_path / "agents")
        trainer.export_agents(tmp_path / "agents")
        (tmp_path / "agents" / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match=r"contains 'notes\.txt', which is not an export"):
            trainer.export_agents(tmp_path / "agents")
        assert (tmp_path / "agents" / "notes.txt").read_text() == "mine"

    def test_to_delete_an_export_keeps_a_user_s_files(self, tiny_model, tmp_path):
        make("ppo", tiny_model, tmp_path / "run").export_agents(tmp_path / "agents")
        (tmp_path / "agents" / "a" / "notes.txt").write_text("mine")
        delete_export(tmp_path / "agents")
        assert [path.relative_to(tmp_path / "agents").as_posix() for path in (tmp_path / "agents").rglob("*")] == [
            "a",
            "a/notes.txt",
        ]


class TestWholeFolders:
    def test_an_earlier_export_is_replaced_whole(self, tiny_model, tmp_path):
        make("ppo", tiny_model, tmp_path / "run", teams.Pair("abc")).export_agents(tmp_path / "agents")
        trainer = make("agent", tiny_model, tmp_path / "run", teams.Pair("ad"))
        trainer.export_agents(tmp_path / "agents")
        assert {path.name for path in (tmp_path / "agents").iterdir()} == {"a", "d", "export.json"}
        assert {path.name for path in tmp_path.iterdir()} <= {"agents", "run"}

    def test_a_failure_leaves_the_earlier_one_and_nothing_else(self, tiny_model, tmp_path, monkeypatch):
        trainer = make("agent", tiny_model, tmp_path / "run")
        trainer.export_agents(tmp_path / "agents")
        before = (tmp_path / "agents" / "a" / "adapter_model.safetensors").read_bytes()
        save = fold.save_file

        def fail_at_the_second(tensors, path, **options):
            if Path(path).parent.name == "b":
                raise OSError("disk full")
            save({key: tensor + 1 for key, tensor in tensors.items()}, path, **options)

        monkeypatch.setattr(fold, "save_file", fail_at_the_second)
        with pytest.raises(OSError, match="disk full"):
            trainer.export_agents(tmp_path / "agents")
        assert (tmp_path / "agents" / "a" / "adapter_model.safetensors").read_bytes() == before
        assert {path.name for path in tmp_path.iterdir()} <= {"agents", "run"}


# Several processes: this file is what they run

PARALLEL = ["observation", "agent", "separate", "ppo"]


def sharding_all(config_class):
    """A configuration with which ZeRO-3 shards small tensors too."""

    def make_config(*args, **kwargs):
        config = config_class(*args, **kwargs)
        if config.deepspeed_plugin is not None:
            config.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    return make_config


def export_before_and_after_training(model, out, *names):
    """Training moves nothing, but from then on ZeRO-3 gathers in other ways."""
    for name in names:
        rates = {"learning_rate": 0.0, "critic_learning_rate": 0.0}
        if TEAMS[name][0] is SHPPOTrainer:
            rates |= {"latent_learning_rate": 0.0, "inference_learning_rate": 0.0}
        trainer = make(name, model, out / name, per_device_train_batch_size=4, **rates)
        for when in ("before", "after"):
            if when == "after":
                trainer.train()
                adapter = [p.numel() for name, p in trainer.model.named_parameters() if "lora_" in name]
                assert (sum(adapter) == 0) == (trainer.args.deepspeed_plugin is not None)
            path = out / f"{name}-{when}"
            report = trainer.export_agents(path)
            assert json.loads((path / "export.json").read_text())["agents"] == report


@pytest.mark.slow
def test_two_processes_export_what_one_does(tiny_model, tmp_path):
    export_before_and_after_training(tiny_model, tmp_path / "one", *PARALLEL)
    launched("zero3", __file__, tiny_model, tmp_path / "two", *PARALLEL, timeout=400)
    for name in (f"{name}-{when}" for name in PARALLEL for when in ("before", "after")):
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        for agent in "ab":
            expected, tensors = (load_file(folder / agent / "adapter_model.safetensors") for folder in (one, two))
            assert expected.keys() == tensors.keys()
            for key, tensor in expected.items():
                assert (tensors[key] - tensor).abs().max() < 1e-5, (name, key)
            assert all(tensor.abs().max() > 1e-2 for tensor in expected.values())
            reports = [json.loads((folder / "export.json").read_text())["agents"][agent] for folder in (one, two)]
            assert reports[0]["tokens"] == reports[1]["tokens"]
            assert reports[1]["kl_per_token"] == pytest.approx(reports[0]["kl_per_token"], rel=1e-3)


if __name__ == "__main__":
    teams.CONFIGS = {trainer: sharding_all(config) for trainer, config in teams.CONFIGS.items()}
    export_before_and_after_training(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
