"""Programs of one's own in trainers and teams: trained as the same team written as a workflow, saved, loaded and measured."""

import json
import sys
from pathlib import Path

import pytest
import teams
import torch
from programs import ASK, ask, same_training, text_of
from tool_model import CHATS, call, multiply, recite_texts

from marcog_trl import (
    Agent,
    MultiAgentGRPOTrainer,
    MultiAgentPPOTrainer,
    Program,
    SHPPOTrainer,
    Team,
    Workflow,
    program_reward,
)
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.recipe import RECIPES
from marcog_trl.evaluation.evaluate import evaluate_team


TRAINERS = [MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer]
EXECUTION = {"isolation": "best_effort", "num_workers": 1}
DATA = teams.dataset(4, entry_point=["f"] * 4, test=[["assert f(1) == 2"]] * 4, test_format=["asserts"] * 4)
FILE = """import pathlib

pathlib.Path("runs.txt").open("a").write("x")  # how often this file was run


async def solve(problem, client):
    plan = await client.chat.completions.create(
        model="planner", messages=[{"role": "user", "content": problem["prompt"]}]
    )
    code = await client.chat.completions.create(
        model="coder", messages=[{"role": "user", "content": f"Plan: {plan.choices[0].message.content}"}]
    )
    return f"Solution: {code.choices[0].message.content}"
"""
SCRIPT = f"""import pathlib

pathlib.Path("runs.txt").open("a").write("x")
{ASK}
print("Solution: " + ask("coder", "Plan: " + ask("planner", problem["prompt"])))
"""


async def solve(problem, client):
    plan = text_of(await ask(client, "planner", problem["prompt"]))
    return "Solution: " + text_of(await ask(client, "coder", f"Plan: {plan}"))


class Same(Workflow):
    """The same team as a workflow."""

    agents = (Agent("planner", "planner"), Agent("coder", "coder"))

    def play(self, problem):
        plan = yield {"planner": [{"role": "user", "content": problem["prompt"]}]}
        code = yield {"coder": [{"role": "user", "content": f"Plan: {plan['planner']}"}]}
        return "Solution: " + code["coder"]


def program(**options):
    return Program(solve, ["planner", "coder"], **{"max_calls": 1, "stage_timeout": 60, **options})


def figures(trainer):
    """What was logged, but for times, and what only programs have."""
    return [
        {
            name: value
            for name, value in entry.items()
            if not any(part in name for part in ("time", "program", "second", "runtime"))
        }
        for entry in trainer.state.log_history
    ]


class TestTraining:
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_is_that_of_the_same_workflow(self, tiny_model, tmp_path, trainer):
        trained = []
        for workflow in (Same(), program()):
            made = teams.make(tiny_model, tmp_path, trainer, workflow=workflow, max_steps=2, seed=3)
            made.train()
            trained.append((figures(made), teams.trainable(made)))
            failed = teams.logged(made, "program/failed")
        (metrics, weights), (other_metrics, other_weights) = trained
        assert failed == [0, 0]
        assert [list(entry) for entry in metrics] == [list(entry) for entry in other_metrics]
        for entry, other in zip(metrics, other_metrics, strict=True):
            differ = {
                name for name in entry if "speed" not in name and "per_" not in name and entry[name] != other[name]
            }
            assert not {name for name in differ if entry[name] == entry[name]}  # but for NaN
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)

    @pytest.mark.parametrize(
        ("trainer", "options"), [(MultiAgentGRPOTrainer, {}), (MultiAgentPPOTrainer, {"critic": "agent"})]
    )
    def test_calls_that_arrive_apart_train_as_those_of_one_stage(self, tiny_model, tmp_path, trainer, options):
        async def apart(problem, client):
            return "|".join([text_of(await ask(client, agent, problem["prompt"] + agent)) for agent in "ab"])

        class Together(Workflow):
            agents = (Agent("a", "a"), Agent("b", "b"))

            def play(self, problem):
                replies = yield {name: [{"role": "user", "content": problem["prompt"] + name}] for name in "ab"}
                return "|".join(replies.values())

        workflow = Program(apart, ["a", "b"], max_calls=1, stage_timeout=60)
        same_training(tiny_model, tmp_path, Together(), workflow, trainer, **options)

    def test_max_tokens_cut_replies_off(self, tiny_model, tmp_path):
        """Rows are the first tokens of what the model writes, and programs are told how many and why."""
        made, rows, told = self.limited(tiny_model, tmp_path, MultiAgentGRPOTrainer)
        calls = teams.script(made)
        batch = teams.generation_batch(made)
        first, second = (replies for _, replies in calls)
        expected = [*(ids[:3] for ids in first), *second]
        assert [row.completion_ids for act in (0, 1) for row in rows if row.slot.act == act] == expected
        assert any(len(ids) > 3 for ids in first)
        assert sorted(batch["completion_mask"].sum(1).tolist()) == sorted(map(len, expected))
        assert sorted(told) == sorted(
            (len(row.prompt_ids), len(row.completion_ids), "stop" if row.completion_ids[-1] == teams.EOS else "length")
            for row in rows
        )

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_max_tokens_in_each_trainer(self, tiny_model, tmp_path, trainer):
        made, rows, _ = self.limited(tiny_model, tmp_path, trainer)
        made.train()
        lengths = [[len(row.completion_ids) for row in rows if row.slot.act == act] for act in (0, 1)]
        assert max(lengths[0]) == 3 < max(lengths[1])
        assert all(row.token_states is None or len(row.token_states) == len(row.completion_ids) for row in rows)
        assert teams.logged(made, "completions/max_length") == [max(lengths[1])]

    @staticmethod
    def limited(model, path, trainer):
        """A trainer of a program with two calls, the first with a limit, its rows, and what the program is told."""
        told, rows = [], []

        async def short(problem, client):
            for options in ({"max_tokens": 3}, {"max_completion_tokens": 100}):
                reply = await ask(client, "a", problem["prompt"], **options)
                usage = reply.usage
                assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
                told.append((usage.prompt_tokens, usage.completion_tokens, reply.choices[0].finish_reason))
            return text_of(reply)

        def reward(completions, **given):
            rows.extend(row for of_episode in given["rows"] for row in of_episode)
            return teams.letters(completions)

        workflow = Program(short, ["a"], max_calls=2, stage_timeout=60)
        return teams.make(model, path, trainer, reward, workflow=workflow), rows, told

    def test_failed_programs_are_left_out(self, tiny_model, tmp_path):
        async def some(problem, client):
            solution = await solve(problem, client)
            if problem["prompt"].startswith("def f0"):
                raise KeyError("f0")
            return solution

        workflow = Program(some, ["planner", "coder"], max_calls=1)
        made = teams.make(tiny_model, tmp_path, workflow=workflow, trainer=MultiAgentGRPOTrainer)
        with pytest.warns(UserWarning, match="A program failed.*KeyError"):
            made.train()
        assert teams.logged(made, "program/failed") == teams.logged(made, "episodes/masked") == [0.5]

    @pytest.mark.parametrize("rewards", [None, {"planner": 1.0}])
    def test_rewards_of_the_program(self, tiny_model, tmp_path, rewards):
        async def rewarding(problem, client):
            return {"solution": await solve(problem, client), "rewards": 0.25 if rewards is None else rewards}

        made = teams.make(
            tiny_model, tmp_path, workflow=Program(rewarding, ["planner", "coder"], max_calls=1),
            trainer=MultiAgentGRPOTrainer, reward=program_reward,
        )  # fmt: skip
        made.train()
        logged = [teams.logged(made, f"agents/{agent}/reward") for agent in ("planner", "coder")]
        assert logged == ([[0.25], [0.25]] if rewards is None else [[1.0], [0.0]])


class TestBranches:
    OPTIONS = {"credit": "counterfactual", "fanout": [2, 2], "num_generations": 4, "per_device_train_batch_size": 12}

    @pytest.mark.parametrize("trainer", [MultiAgentGRPOTrainer, MultiAgentPPOTrainer])
    def test_counterfactual_credit_is_that_of_the_same_workflow(self, tiny_model, tmp_path, trainer):
        batches = []
        for workflow in (Same(), program(replayable=True)):
            made = teams.make(tiny_model, tmp_path, trainer, workflow=workflow, **self.OPTIONS)
            teams.script(made)
            batches.append(teams.generation_batch(made))
        assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("completion_ids", "advantages"))

    @pytest.mark.parametrize("options", [OPTIONS, {"joint_mode": "cross", "per_device_train_batch_size": 8}], ids=str)
    def test_needs_a_replayable_program(self, tmp_path, options):
        with pytest.raises(ValueError, match="Set replayable=True"):  # before there is a model
            teams.make("no/model", tmp_path, MultiAgentGRPOTrainer, workflow=program(), **options)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a program as a Python file, and as a script of a command."""
    monkeypatch.chdir(tmp_path)
    Path("my_agents.py").write_text(FILE)
    Path("my_agent.cmd").write_text(SCRIPT)
    return tmp_path


NAMES = {"function": "my_agents.py:solve", "command": f"{sys.executable} -u my_agent.cmd"}


def runs():
    return len(Path("runs.txt").read_text()) if Path("runs.txt").exists() else 0


@pytest.mark.parametrize("kind", NAMES)
class TestSaved:
    @pytest.fixture
    def folder(self, tiny_model, here, kind):
        made = teams.make(
            tiny_model, "team", MultiAgentGRPOTrainer, workflow=NAMES[kind], agents=["planner", "coder"], max_calls=1,
            program_timeout=120.0, data=DATA, **EXECUTION,
        )  # fmt: skip
        made.train()
        made.save_model()
        made.executor.close()
        Path("runs.txt").unlink()
        for name in ("my_agents.py", "my_agent.cmd"):
            Path(name).unlink()
        return Path("team")

    def test_with_its_file_and_loaded_with_trust_only(self, folder, kind):
        file = "my_agents.py" if kind == "function" else "my_agent.cmd"
        assert (folder / file).read_text() == (FILE if kind == "function" else SCRIPT)
        settings = json.loads((folder / "team.json").read_text())["settings"]
        assert settings["agents"] == ["planner", "coder"] and settings["max_calls"] == 1
        assert settings["workflow"] == NAMES[kind]
        with pytest.raises(ValueError, match="trust_remote_code"):
            Team.from_pretrained(folder)
        assert runs() == 0

        team = Team.from_pretrained(folder, trust_remote_code=True, **EXECUTION)
        answer = team.solve({"prompt": "def f(x):", "entry_point": "f"})
        assert [message["agent"] for message in answer.messages] == ["planner", "coder"]
        assert runs() == 1
        assert team.settings.max_calls == 1 and team.settings.program_timeout == 120.0

        assert evaluate_team(team, DATA.select([0]), 1, reward_funcs=teams.letters)["problems"] == 1

    def test_with_a_script_that_is_gone(self, folder, kind):
        for name in ("my_agents.py", "my_agent.cmd"):
            (folder / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match="has no my_agent"):
            Team.from_pretrained(folder, trust_remote_code=True)


class TestNames:
    def test_a_program_needs_its_agents(self, here, tmp_path):
        with pytest.raises(ValueError, match=r"is a program\. Set agents"):
            teams.make("no/model", tmp_path, MultiAgentGRPOTrainer, workflow="my_agents.py:solve")

    def test_other_workflows_have_no_such_settings(self, tmp_path):
        with pytest.raises(ValueError, match="max_calls=2"):
            teams.make("no/model", tmp_path, MultiAgentGRPOTrainer, workflow="pipeline", max_calls=2)

    def test_an_instance_has_its_own_settings_and_must_be_passed_again(self, tiny_model, here):
        async def append(problem, client):
            problem["prompt"].append({"role": "assistant", "content": "mine"})
            return text_of(await ask(client, "a", "x")) + text_of(await ask(client, "b", "x"))

        seen, calls = [], {"a": 1, "b": 2}
        made = teams.make(
            tiny_model, "team", MultiAgentGRPOTrainer, workflow=Program(append, ["a", "b"], max_calls=calls),
            reward=lambda prompts, completions, **kwargs: seen.extend(prompts) or [0.0] * len(prompts),
            data=teams.dataset(2, prompt=[[{"role": "user", "content": "Write f."}]] * 2), per_device_train_batch_size=6,
        )  # fmt: skip
        made.train()
        assert len(made.workflow.slots) == 3 and made.team.settings.max_calls == calls
        assert {len(prompt) for prompt in seen} == {1}
        made.save_model()
        with pytest.raises(
            ValueError, match=r"workflow Program, which is not in the folder\. Pass it: workflow=Program\(\.\.\.\)"
        ):
            Team.from_pretrained("team")
        assert Team.from_pretrained("team", workflow=Program(append, ["a", "b"], max_calls=calls)).agents == ["a", "b"]

    def test_a_command_without_a_file_needs_trust_too(self, tiny_model, here):
        made = teams.make(
            tiny_model,
            "team",
            MultiAgentGRPOTrainer,
            workflow="env true",
            agents=["a"],
            data=DATA,
            max_calls=1,
            **EXECUTION,
        )
        made.save_model()
        with pytest.raises(ValueError, match="trust_remote_code"):
            Team.from_pretrained("team")


class TestTools:
    """Tools of the program, whose calls the model writes."""

    @pytest.mark.parametrize("returned", ["12", ""])
    def test_calls_of_tools_go_to_the_program(self, tool_model, tmp_path, returned):
        described = [
            {"type": "function", "function": {"name": "multiply", "description": multiply.__doc__, "parameters": {}}}
        ]

        async def using(problem, client):
            messages = [{"role": "user", "content": "What is 3 * 4?"}]
            while True:
                response = await client.chat.completions.create(model="a", messages=messages, tools=described)
                choice = response.choices[0]
                if choice.finish_reason != "tool_calls":
                    return choice.message.content
                messages.append(choice.message.model_dump(exclude_none=True))
                for called in choice.message.tool_calls:
                    result = str(multiply(**json.loads(called.function.arguments)))
                    assert result == "12"
                    messages.append({"role": "tool", "tool_call_id": called.id, "content": returned})

        made = teams.make(
            tool_model, tmp_path, MultiAgentGRPOTrainer, workflow=Program(using, ["a"], max_calls=2), data=CHATS,
            max_completion_length=200, num_generations=2, per_device_train_batch_size=4,
            reward=lambda completions, **kwargs: [float(len(c[-1]["content"])) for c in completions],
        )  # fmt: skip
        thought = "<think>\nI multiply.\n</think>\n\n"
        asked = recite_texts(made, [thought + call(a=3, b=4), "I know.<|im_end|>"], ["It is 12.<|im_end|>"])
        batch = teams.generation_batch(made)
        assert "multiply" in asked[0][0] and thought in asked[1][0]
        assert asked[1][0].rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip() == returned
        assert batch["advantages"].abs().sum() > 0


def test_messages_that_the_chat_template_refuses_are_those_of_the_program(tool_model, tmp_path):
    """The episode of such a program fails, and the run goes on."""
    refusal = "{% if messages|length > 2 %}{{ raise_exception('Too many messages!') }}{% endif %}"

    async def talkative(problem, client):
        last = {"role": "user", "content": problem["prompt"]}
        messages = [last] * (1 + 2 * problem["prompt"].startswith("def f0"))
        return text_of(await client.chat.completions.create(model="a", messages=messages))

    workflow = Program(talkative, ["a"], max_calls=1)
    made = teams.make(tool_model, tmp_path, MultiAgentGRPOTrainer, workflow=workflow)
    made._tokenizer.chat_template = refusal + made._tokenizer.chat_template
    with pytest.warns(UserWarning, match="refuses messages with the roles.*Too many messages"):
        made.train()
    assert teams.logged(made, "program/failed") == [0.25]


@pytest.mark.parametrize("agents", [["planner", "coder"], ["planner"]])
def test_a_file_of_settings_names_the_agents(tiny_model, tmp_path, monkeypatch, agents):
    """Under a name that CoMLRL's files use for models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agents.py").write_text(FILE)
    settings = {"workflow": f"{tmp_path / 'my_agents.py'}:solve", "agents": agents, "model_name_or_path": tiny_model}
    (tmp_path / "run.yaml").write_text(json.dumps(settings | {"use_cpu": True, "bf16": False}))
    _, args, _ = read_training_arguments(RECIPES["magrpo"], ["--config", str(tmp_path / "run.yaml")])
    assert args.agents == agents and [agent.name for agent in args.make_workflow().agents] == agents
